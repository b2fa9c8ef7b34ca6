"""Attention by PyTorch's own CPU flash kernel, one call per piece of the mask, merged by the
log-sum-exp.

The kernel supports full and square causal attention and returns the log-sum-exp. A mask that can be
cut into such pieces runs at the kernel's speed: bottom-right causal, windows, chunks, packed
sequences, block masks, sinks. The kernel's backward takes the output and log-sum-exp of the whole
row, so pieces need no correction; a sink only makes the log-sum-exp larger.

In 16 bits the kernel's backward rounds the gradients of K and V after every block of query rows
and every head of a group. Therefore a call gets few rows and one head of a group, and the results
of the calls are added up in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ...masks import Window
from ...native_kernels import kernels
from ...ops.merge.formula import add_sink, merge
from .segments import KeyRun, SegmentMask

INFINITY = float("inf")
KERNEL_KEYS = 512  # the kernel skips masked keys in blocks of this many


class Piece(NamedTuple):
    """One call of the kernel: rows ``[m0, m1)`` over one or more spans of keys ``[n0, n1)``."""

    m0: int
    m1: int
    spans: tuple[tuple[int, int], ...]
    causal: bool  # square lower triangle
    visible: Tensor | None  # bool (rows, keys of all spans), True where visible

    def rows(self, x: Tensor) -> Tensor:
        """The piece's rows of q, out, or their gradients."""
        return x[:, :, self.m0 : self.m1]

    def keys(self, x: Tensor) -> Tensor:
        """The piece's keys of k or v: a view of one span, or several spans concatenated."""
        parts = [x[:, :, n0:n1] for n0, n1 in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def add_to_keys(self, total: Tensor, gradient: Tensor) -> None:
        """Add the gradient of the piece's keys to `total`, the gradient of all keys."""
        sizes = [n1 - n0 for n0, n1 in self.spans]
        for (n0, n1), part in zip(self.spans, gradient.split(sizes, dim=2), strict=True):
            total[:, :, n0:n1] += part


def pieces(mask: SegmentMask, BLOCK_M: int) -> Iterator[Piece]:
    """The kernel calls that cover all visible scores. Rows that see no key may be in no piece."""
    for m0, m1 in mask.query_tiles(BLOCK_M):
        if mask.layout is not None:
            runs = list(mask.key_runs(m0, m1, mask.visibility.N))
            if runs:
                spans = tuple((run.start, run.stop) for run in runs)
                yield Piece(m0, m1, spans, False, _joined(runs, m1 - m0))
            continue
        start, full_stop = mask.visibility.key_range(m0)
        full_start, stop = mask.visibility.key_range(m1 - 1)
        triangle = _causal_square(mask, m0, m1)
        if triangle is not None:
            n0 = triangle.spans[0][0]
            if start < n0:
                yield Piece(triangle.m0, m1, ((start, n0),), False, None)
            yield triangle
        elif start < stop:
            # A mask costs the kernel little, so one call covers both edges and the middle, and
            # needs no merging.
            full = full_start <= start and stop <= full_stop
            visible = None if full else mask.visibility.dense((m0, m1), (start, stop))
            yield Piece(m0, m1, ((start, stop),), False, visible)


def _joined(runs: list[KeyRun], rows: int) -> Tensor | None:
    """Concatenate the masks of neighbouring runs; None if nothing is masked."""
    if all(run.visible is None for run in runs):
        return None
    everything = torch.ones(rows, 1, dtype=torch.bool)
    return torch.cat(
        [
            everything.expand(rows, run.stop - run.start) if run.visible is None else run.visible
            for run in runs
        ],
        dim=1,
    )


def _causal_square(mask: SegmentMask, m0: int, m1: int) -> Piece | None:
    """The square under the causal diagonal of rows ``[m0, m1)``, without rows before the first key.

    None if the mask is not causal, if it has a left edge inside the square, or if the square is too
    small for the kernel to skip any of its blocks.
    """
    visibility = mask.visibility
    if not any(isinstance(fact, Window) and fact.right == 0 for fact in visibility.facts):
        return None
    m0 = max(m0, m0 - visibility.position(m0))
    if m0 >= m1:
        return None
    n0, n1 = visibility.position(m0), visibility.position(m1 - 1) + 1
    if visibility.keys is not None:
        n0, n1 = visibility.keys.below(n0), visibility.keys.below(n1)
        if n1 - n0 != m1 - m0:  # some of the keys that stand beside the rows are not here
            return None
    first_start, last_start = visibility.key_range(m0)[0], visibility.key_range(m1 - 1)[0]
    if last_start > first_start or (first_start < n0 and n1 - n0 <= KERNEL_KEYS):
        return None
    return Piece(m0, m1, ((n0, n1),), True, None)


def single_piece(mask: SegmentMask, BLOCK_M: int) -> Piece | None:
    """The piece that covers the whole segment, if one unmasked kernel call does; else None."""
    visibility = mask.visibility
    found = pieces(mask, BLOCK_M)
    first, second = next(found, None), next(found, None)
    whole = (0, visibility.M, ((0, visibility.N),))
    if first is None or second is not None or first.visible is not None or first[:3] != whole:
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
    native_forward, _ = kernels()
    whole = single_piece(mask, BLOCK_M)
    if whole is not None:
        out, lse = native_forward(q, k, v, 0.0, whole.causal, scale=scale)
    else:
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:-1], -INFINITY, dtype=q.dtype)
        previous_row = -1
        for piece in pieces(mask, BLOCK_M):
            out_part, lse_part = native_forward(
                piece.rows(q),
                piece.keys(k),
                piece.keys(v),
                0.0,
                piece.causal,
                attn_mask=_additive(piece.visible, q),
                scale=scale,
            )
            if piece.visible is not None:  # the kernel returns lse 0 for rows that see no key
                lse_part.masked_fill_(~piece.visible.any(-1), -INFINITY)
            if piece.m0 == previous_row:  # an earlier piece has other keys of these rows
                out_part, lse_part = merge(piece.rows(out), piece.rows(lse), out_part, lse_part)
            piece.rows(out).copy_(out_part)
            piece.rows(lse).copy_(lse_part)
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
    """Gradients from the whole rows' `out` and `lse`. All tensors but the lse have one dtype; the
    gradients of several kernel calls are added up in the lse's dtype.
    """
    _, native_backward = kernels()
    whole = single_piece(mask, BLOCK_M)
    group = q.shape[1] // k.shape[1] if q.dtype.itemsize == 2 else 1
    if whole is not None and group == 1:
        return NativeGradients(
            *native_backward(dout, q, k, v, out, lse, 0.0, whole.causal, scale=scale)
        )
    # Rows that see no key have lse -inf, and exp(-inf - lse) would be NaN; with 0 it is 0.
    lse = lse.masked_fill(lse == -INFINITY, 0.0)
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    for piece, member in product(pieces(mask, BLOCK_M), range(group)):
        heads = slice(member, None, group)
        dq_part, dk_part, dv_part = native_backward(
            piece.rows(dout)[:, heads],
            piece.rows(q)[:, heads],
            piece.keys(k),
            piece.keys(v),
            piece.rows(out)[:, heads],
            piece.rows(lse)[:, heads],
            0.0,
            piece.causal,
            attn_mask=_additive(piece.visible, q),
            scale=scale,
        )
        piece.rows(dq)[:, heads].add_(dq_part)
        piece.add_to_keys(dk, dk_part)
        piece.add_to_keys(dv, dv_part)
    return NativeGradients(dq, dk, dv)


def _additive(visible: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask in the kernel's form: 0 or -inf in the dtype of the queries."""
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, -INFINITY)
