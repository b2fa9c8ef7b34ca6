"""The values of quantised tensors, computed independently for the tests."""

from __future__ import annotations

from torch import Tensor

from flashtile.quantize import Quantized


def factors(descale: Tensor, x: Tensor, block: int) -> Tensor:
    """The factor of every row of dense `x`, (batch, rows, heads, 1)."""
    B, rows, heads, _ = x.shape
    if descale.dim() == 2:
        return descale.repeat_interleave(heads // descale.shape[1], 1).view(B, 1, heads, 1)
    return descale.repeat_interleave(block, 2)[:, :, :rows].transpose(1, 2)[..., None]


def unscaled(small: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """The values of the float8 numbers, in float64."""
    return (
        small.q.double() * factors(small.q_descale, small.q, 64),
        small.k.double() * factors(small.k_descale, small.k, 128),
        small.v.double() * factors(small.v_descale, small.v, 128),
    )


def descales(small: Quantized) -> dict[str, Tensor]:
    names = ("q_descale", "k_descale", "v_descale")
    return {name: getattr(small, name) for name in names}
