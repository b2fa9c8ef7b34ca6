"""Tiles made of PyTorch's own CPU flash kernel, merged by their log-sum-exp.

The kernel knows full and square-causal attention and returns the log-sum-exp. Everything that a
mask can cut into such
pieces runs at its speed: bottom-right causal, windows, chunks, packed sequences, block masks,
    sinks. Its backward takes
the output and log-sum-exp of the whole row, so pieces need no correction; a sink is just a larger
log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...merge import add_sink, merge
from .segments import SegmentMask

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

INFINITY = float("inf")
KERNEL_KEYS = 512  # the kernel skips masked keys in blocks of this many


class Piece(NamedTuple):
    """One call of the kernel: rows ``[m0, m1)`` over keys ``[n0, n1)``."""

    m0: int
    m1: int
    n0: int
    n1: int
    causal: bool  # square lower triangle
    visible: Tensor | None  # bool (rows, keys), True where visible


def pieces(mask: SegmentMask, BLOCK_M: int) -> Iterator[Piece]:
    """The kernel calls that cover what the mask leaves. Rows that see nothing may be in none."""
    everything = mask.visibility.N
    for m0, m1 in mask.query_tiles(BLOCK_M):
        if mask.layout is not None:
            for run in mask.key_runs(m0, m1, everything):
                yield Piece(m0, m1, run.start, run.stop, False, run.visible)
            continue
        start, full_stop = mask.visibility.key_range(m0)
        full_start, stop = mask.visibility.key_range(m1 - 1)
        triangle = _causal_square(mask, m0, m1)
        if triangle is not None:
            if start < triangle.n0:
                yield Piece(triangle.m0, m1, start, triangle.n0, False, None)
            yield triangle
        elif start < stop:
            # A mask costs the kernel little, so edges and middle go in one call that needs no
            # merging.
            full = full_start <= start and stop <= full_stop
            visible = None if full else mask.visibility.dense((m0, m1), (start, stop))
            yield Piece(m0, m1, start, stop, False, visible)


def _causal_square(mask: SegmentMask, m0: int, m1: int) -> Piece | None:
    """The square under the causal diagonal of rows ``[m0, m1)``, less the rows before the first
    key.

    None when the mask is not causal there, when a left edge cuts in, or when the square is too
    small for the kernel to skip anything of it.
    """
    visibility = mask.visibility
    shift = visibility.N - visibility.M
    m0 = max(m0, -shift)
    if m0 >= m1:
        return None
    first_start, first_stop = visibility.key_range(m0)
    last_start, last_stop = visibility.key_range(m1 - 1)
    n0, n1 = m0 + shift, m1 + shift
    if first_stop != n0 + 1 or last_stop != n1 or last_start > first_start:
        return None
    if first_start < n0 and n1 - n0 <= KERNEL_KEYS:
        return None
    return Piece(m0, m1, n0, n1, True, None)


def single_piece(mask: SegmentMask, BLOCK_M: int) -> Piece | None:
    """The piece, when one unmasked kernel call does the whole segment."""
    visibility = mask.visibility
    found = pieces(mask, BLOCK_M)
    first, second = next(found, None), next(found, None)
    whole = (0, visibility.M, 0, visibility.N)
    if first is None or second is not None or first.visible is not None or first[:4] != whole:
        return None
    return first


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: SegmentMask,
    scale: float,
    sink: Tensor | None,
    BLOCK_M: int,
) -> tuple[Tensor, Tensor]:
    """out (batch, heads, M, D) and lse (batch, heads, M); inputs (batch, heads, length, D) in the
    compute dtype.
    """
    whole = single_piece(mask, BLOCK_M)
    if whole is not None:
        out, lse = _forward(q, k, v, 0.0, whole.causal, scale=scale)
    else:
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:-1], -INFINITY, dtype=q.dtype)
        previous_row = -1
        for piece in pieces(mask, BLOCK_M):
            rows, keys = slice(piece.m0, piece.m1), slice(piece.n0, piece.n1)
            out_part, lse_part = _forward(
                q[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                0.0,
                piece.causal,
                attn_mask=_additive(piece.visible, q),
                scale=scale,
            )
            if piece.visible is not None:  # the kernel gives rows that see nothing an lse of 0
                lse_part.masked_fill_(~piece.visible.any(-1), -INFINITY)
            if piece.m0 == previous_row:  # the rows have seen other keys before
                out_part, lse_part = merge(out[:, :, rows], lse[:, :, rows], out_part, lse_part)
            out[:, :, rows], lse[:, :, rows] = out_part, lse_part
            previous_row = piece.m0
    if sink is not None:
        out, lse = add_sink(out, lse, sink[:, None])
    return out, lse


class NativeGradients(NamedTuple):
    """Gradients of q, k, v: (batch, heads, length, D)."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    mask: SegmentMask,
    scale: float,
    BLOCK_M: int,
) -> NativeGradients:
    """Gradients from the whole rows' `out` and `lse`; all in one dtype but the lse."""
    whole = single_piece(mask, BLOCK_M)
    if whole is not None:
        return NativeGradients(*_backward(dout, q, k, v, out, lse, 0.0, whole.causal, scale=scale))
    # Rows that see nothing have lse -inf; in a piece they are masked, and 0 keeps exp(-inf - lse)
    # at 0.
    lse = lse.masked_fill(lse == -INFINITY, 0.0)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for piece in pieces(mask, BLOCK_M):
        rows, keys = slice(piece.m0, piece.m1), slice(piece.n0, piece.n1)
        dq_part, dk_part, dv_part = _backward(
            dout[:, :, rows],
            q[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            out[:, :, rows],
            lse[:, :, rows],
            0.0,
            piece.causal,
            attn_mask=_additive(piece.visible, q),
            scale=scale,
        )
        dq[:, :, rows] += dq_part
        dk[:, :, keys] += dk_part
        dv[:, :, keys] += dv_part
    return NativeGradients(dq, dk, dv)


def _additive(visible: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask as the kernel wants it: 0 or -inf in the dtype of the queries."""
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, -INFINITY)
