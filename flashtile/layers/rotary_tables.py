"""The tables of cosines and sines of a rotary embedding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RotaryTables(NamedTuple):
    """Cosines and sines, (positions, dim / 2); `cos_k` and `sin_k` are None if the keys use the
    same tables as the queries.
    """

    cos: Tensor
    sin: Tensor
    cos_k: Tensor | None = None
    sin_k: Tensor | None = None

    def fit(self, length: int, device: torch.device | None, dtype: torch.dtype | None) -> bool:
        """Whether they cover `length` positions, on that device and in that dtype."""
        return length <= self.cos.shape[0] and self.cos.device == device and self.cos.dtype == dtype


def frequencies(dim: int, base: float, device: torch.device | str | None = None) -> Tensor:
    """base ** (-2 i / dim), (dim / 2,) float32."""
    even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
    return 1.0 / base ** (even / dim)


def xpos_scale(dim: int, device: torch.device | str | None = None) -> Tensor:
    """XPos's zeta, (dim / 2,) float32."""
    even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
    return (even + 0.4 * dim) / (1.4 * dim)


def make_tables(
    length: int,
    inv_freq: Tensor,
    scale: Tensor | None,
    scale_base: float | None,
    device: torch.device | None,
    dtype: torch.dtype | None,
) -> RotaryTables:
    """The tables of the positions 0 to length - 1, computed in float32 and rounded once.

    Args:
        length: number of positions.
        inv_freq: the result of `frequencies`.
        scale: the result of `xpos_scale`, or None for plain RoPE.
        scale_base: scale_base of XPos, or None for plain RoPE.
        device: device of the tables.
        dtype: dtype of the tables.
    """
    # Autograd cannot save tensors that were created in inference mode.
    with torch.inference_mode(False):
        position = torch.arange(length, device=device, dtype=torch.float32)
        angle = torch.outer(position, inv_freq.to(device))
        cos, sin = angle.cos(), angle.sin()
        if scale is None or scale_base is None:
            return RotaryTables(cos.to(dtype), sin.to(dtype))
        distance = (position - length // 2) / scale_base
        growth = scale.to(device) ** distance.unsqueeze(-1)
        tables = (cos * growth, sin * growth, cos / growth, sin / growth)
        return RotaryTables(*(table.to(dtype) for table in tables))
