"""Rotary position embedding (RoPE) in plain PyTorch.

Each pair of features (a, b) of the token at position m is rotated by the angle m * theta:

    a' = a cos(m theta) - b sin(m theta)
    b' = a sin(m theta) + b cos(m theta)

(RoFormer, Su et al. 2021, equation 34.) 16-bit inputs are rotated in float32. The host never reads
lengths and offsets that are tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...autocast import without_autocast

_BEYOND_ANY_TABLE = 2**62


class Angles(NamedTuple):
    """The tables of angles, and the position of each sequence's first token."""

    cos: Tensor  # (table_len, rotary_dim / 2)
    sin: Tensor
    seqlen_offsets: int | Tensor  # for all sequences, or (batch,)
    cu_seqlens: Tensor | None  # (batch + 1,) of a packed tensor

    def of_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of x's tokens, (..., seq, 1, rotary_dim / 2) in the compute dtype.

        The angle of a position outside of the table is 0.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin, seqlen_offsets, cu_seqlens = self
        if cu_seqlens is None and not isinstance(seqlen_offsets, Tensor):
            rows = slice(seqlen_offsets, seqlen_offsets + x.shape[1])
            return cos[rows].to(dtype).unsqueeze(-2), sin[rows].to(dtype).unsqueeze(-2)

        positions = _positions(x, seqlen_offsets, cu_seqlens)
        in_table = ((positions >= 0) & (positions < cos.shape[0])).unsqueeze(-1)
        nearest = positions.clamp(0, cos.shape[0] - 1)
        cos = torch.where(in_table, cos[nearest].to(dtype), 1.0)
        sin = torch.where(in_table, sin[nearest].to(dtype), 0.0)
        return cos.unsqueeze(-2), sin.unsqueeze(-2)


def rotate(x: Tensor, angles: Angles, interleaved: bool) -> Tensor:
    """Rotate `x` (batch, seq, heads, head_dim), or packed (total, heads, head_dim).

    A pair is (2i, 2i + 1) if `interleaved`, else (i, i + rotary_dim / 2).
    """
    cos, sin = angles.of_rows(x)
    return _rotate_rows(x, cos, sin, interleaved)


def _rotate_rows(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    # A compiler derives a lean backward from the formula and cannot trace the Function's jvp. The
    # gradients of learned tables need x, which the Function does not keep. Where nothing is
    # recorded, `apply` would take longer than rotating a token.
    is_recorded = torch.is_grad_enabled() and x.requires_grad
    learns = cos.requires_grad or sin.requires_grad
    if torch.compiler.is_compiling() or learns or not is_recorded:
        return _rotate_pairs(x, cos, sin, interleaved)
    return _Rotation.apply(x, cos, sin, interleaved)


class _Rotation(torch.autograd.Function):
    """`_rotate_pairs` with explicit derivatives: it is linear in x, and in (cos, sin)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        return _rotate_pairs(x, cos, sin, interleaved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, cos, sin, ctx.interleaved = inputs
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(x, cos, sin)  # freed as soon as the forward pass has used it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_rows(grad, cos, -sin, ctx.interleaved), None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, dcos: Tensor, dsin: Tensor, _: None) -> Tensor:
        x, cos, sin = ctx.saved_tensors
        tail = x.shape[-1] - 2 * cos.shape[-1]
        from_tables = _rotate_pairs(x.narrow(-1, 0, 2 * cos.shape[-1]), dcos, dsin, ctx.interleaved)
        return _rotate_pairs(dx, cos, sin, ctx.interleaved) + F.pad(from_tables, (0, tail))


@without_autocast
def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x (..., heads, head_dim) by cos, sin (..., 1, rotary_dim / 2) in the compute dtype."""
    half = cos.shape[-1]
    head = x.narrow(-1, 0, 2 * half).to(cos.dtype)
    if interleaved:
        a, b = head[..., 0::2], head[..., 1::2]
    else:
        a, b = head[..., :half], head[..., half:]
    pair = (a * cos - b * sin, a * sin + b * cos)
    rotated = torch.stack(pair, dim=-1 if interleaved else -2).reshape(head.shape).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1)


def _positions(x: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Position of each row of x: (batch, seq), or (total,) if packed."""
    if cu_seqlens is None:
        assert isinstance(seqlen_offsets, Tensor)
        return torch.arange(x.shape[1], device=x.device) + seqlen_offsets.unsqueeze(-1)
    row = torch.arange(x.shape[0], device=x.device)
    cu_seqlens = cu_seqlens.long()
    # Rows after the last sequence find the extra entry, which puts them beyond the table.
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    nowhere = cu_seqlens.new_full((1,), -_BEYOND_ANY_TABLE)
    row_of_position_0 = torch.cat((cu_seqlens[:-1] - seqlen_offsets, nowhere))
    return row - row_of_position_0[sequence]
