"""Checks of masks as spans."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...masks import BlockMask
from ...spans import MAX_INTERVALS, Spans
from .tensors import same_device, shape_of, tensor

# Masks of other kinds, and the arguments that take them.
_ADVICE = {
    BlockMask: "; pass a BlockMask as block_mask",
    Tensor: "; pass a dense mask as attn_mask, or as BlockMask.from_dense(...) in block_mask",
}


def spans(mask: Any, q: Tensor) -> None:
    """Check a mask for queries (batch, seq_q, heads, head_dim) or (total_q, heads, head_dim)."""
    if mask is None:
        return
    if not isinstance(mask, Spans):
        advice = _ADVICE.get(type(mask), "")
        raise TypeError(f"mask: got {type(mask).__name__}, want flashtile.Spans{advice}")
    for name, x in zip(Spans._fields, mask, strict=True):
        tensor(f"mask.{name}", x)
        if x.dtype != torch.int32:
            raise TypeError(f"mask.{name}: got dtype {x.dtype}, want torch.int32")
        same_device(f"mask.{name}", x, q)
        _shape(f"mask.{name}", x, q)
    if mask.starts.shape != mask.stops.shape:
        raise ValueError(
            f"mask: got starts of shape {shape_of(mask.starts)} and stops of shape "
            f"{shape_of(mask.stops)}, want the same shape"
        )


def _shape(name: str, x: Tensor, q: Tensor) -> None:
    """Raise unless `x` has a row for each query, and one to eight intervals in each row."""
    is_packed = q.dim() == 3
    heads, rows = q.shape[-2], q.shape[-3]
    batch = 1 if is_packed else q.shape[0]
    if (
        x.dim() != 4
        or x.shape[0] not in (1, batch)
        or x.shape[1] not in (1, heads)
        or x.shape[2] != rows
        or not 1 <= x.shape[3] <= MAX_INTERVALS
    ):
        first = "1" if is_packed else f"1 or {batch}"
        names = "1, heads or 1, total_q" if is_packed else "batch or 1, heads or 1, seq_q"
        raise ValueError(
            f"{name}: got shape {shape_of(x)}, want ({first}, 1 or {heads}, {rows}, 1 to "
            f"{MAX_INTERVALS}): ({names}, intervals)"
        )
