"""Attention by PyTorch's own CPU flash kernel, one call per piece of the mask, merged by the
log-sum-exp.

The kernel supports full and square causal attention with a bias and returns the log-sum-exp. A mask
that can be cut into such pieces runs at the kernel's speed: bottom-right causal, windows, chunks,
packed sequences, block masks, spans, sinks. The kernel's backward takes the output and log-sum-exp
of the whole row, so pieces need no correction; a sink only makes the log-sum-exp larger. It has no
gradient of the bias.

In 16 bits the kernel's backward rounds the gradients of K and V after every block of query rows
and every head of a group. Therefore a call gets few rows and one head of a group, and the results
of the calls are added up in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ... import operators
from ...lru import memoised
from ...ops.merge.formula import add_sink, merge
from .plan import KERNEL_KEYS
from .segments import KeyRun, SegmentMask, without_hidden
from .tiles import TileGradients

INFINITY = float("inf")


class Piece(NamedTuple):
    """One call of the kernel: rows ``[m0, m1)`` over one or more spans of keys ``[n0, n1)``."""

    m0: int
    m1: int
    spans: tuple[tuple[int, int], ...]
    causal: bool  # square lower triangle
    # bool (rows, keys of all spans), with leading (batch or 1, heads or 1) under a mask as spans
    visible: Tensor | None

    def rows(self, x: Tensor) -> Tensor:
        """The piece's rows of q, out, or their gradients."""
        if x.shape[2] == self.m1 - self.m0:  # slicing takes longer than asking
            return x
        return x[:, :, self.m0 : self.m1]

    def keys(self, x: Tensor, dim: int = 2) -> Tensor:
        """The piece's keys of k or v: a view of one span, or several spans concatenated."""
        if len(self.spans) > 1:
            return torch.cat([x.narrow(dim, n0, n1 - n0) for n0, n1 in self.spans], dim=dim)
        n0, n1 = self.spans[0]
        return x if x.shape[dim] == n1 - n0 else x.narrow(dim, n0, n1 - n0)

    def operands(self, given: NativeProblem) -> tuple[Tensor, Tensor, Tensor | None]:
        """The piece's keys and values, zero where no row sees them; and what the kernel adds to the
        scores: the bias, and -inf where a query does not see a key. None if it adds nothing.
        """
        k, v, added, visible = self.keys(given.k), self.keys(given.v), given.bias, self.visible
        if added is not None:
            added = added if added.shape[2] == 1 else self.rows(added)
            added = _readable(added if added.shape[3] == 1 else self.keys(added, dim=3), k.dtype)
        if added is not None and visible is not None:
            added = torch.where(visible, added, -INFINITY)
        elif visible is not None:
            added = torch.zeros(visible.shape, dtype=k.dtype).masked_fill_(~visible, -INFINITY)
        if added is None or added.numel() == 0 or added.amin() > -INFINITY:
            return k, v, added
        shown = added > -INFINITY
        if self.causal:
            shown = shown & torch.ones(self.m1 - self.m0, k.shape[2], dtype=torch.bool).tril()
        seen = shown.any(-2)
        return without_hidden(k, seen), without_hidden(v, seen), added

    def add_to_keys(self, total: Tensor, gradient: Tensor) -> None:
        """Add the gradient of the piece's keys to `total`, the gradient of all keys."""
        sizes = [n1 - n0 for n0, n1 in self.spans]
        for (n0, n1), part in zip(self.spans, gradient.split(sizes, dim=2), strict=True):
            total[:, :, n0:n1] += part


def pieces(mask: SegmentMask, BLOCK_M: int) -> Iterator[Piece]:
    """The kernel calls that cover all visible scores. Rows that see no key may be in no piece."""
    for m0, m1 in mask.query_tiles(BLOCK_M):
        if mask.layout is not None or mask.spans is not None:
            runs = list(mask.key_runs(m0, m1, mask.visibility.N))
            parts = [runs]
            if mask.spans is not None:  # whose masks take longer to make than parts to merge
                unmasked = [run for run in runs if run.visible is None]
                parts = [unmasked, [run for run in runs if run.visible is not None]]
            for part in filter(None, parts):
                spans = tuple((run.start, run.stop) for run in part)
                yield Piece(m0, m1, spans, False, joined(part))
            continue
        start, full_stop = mask.visibility.key_range(m0)
        full_start, stop = mask.visibility.key_range(m1 - 1)
        square = mask.visibility.causal_square(m0, m1)
        # In a small one the kernel skips none of its blocks.
        if square is not None and (start >= square.n0 or square.n1 - square.n0 > KERNEL_KEYS):
            if start < square.n0:
                yield Piece(square.m0, m1, ((start, square.n0),), False, None)
            yield Piece(square.m0, m1, ((square.n0, square.n1),), True, None)
        elif start < stop:
            # A mask costs the kernel little, so one call covers both edges and the middle, and
            # needs no merging.
            full = full_start <= start and stop <= full_stop
            visible = None if full else mask.visibility.dense((m0, m1), (start, stop))
            yield Piece(m0, m1, ((start, stop),), False, visible)


def joined(runs: list[KeyRun]) -> Tensor | None:
    """Concatenate the masks of neighbouring runs; None if nothing is masked."""
    masks = [run.visible for run in runs if run.visible is not None]
    if not masks:
        return None
    rows = torch.broadcast_shapes(*(mask.shape[:-1] for mask in masks))
    everything = torch.ones(1, dtype=torch.bool)
    parts = (everything if run.visible is None else run.visible for run in runs)
    sizes = (run.stop - run.start for run in runs)
    return torch.cat([x.expand(*rows, n) for x, n in zip(parts, sizes, strict=True)], dim=-1)


def single_piece(mask: SegmentMask, BLOCK_M: int) -> Piece | None:
    """The piece that covers the whole segment, if one unmasked kernel call does; else None."""
    if mask.spans is not None:
        return None
    if mask.layout is None:
        return _known_single_piece(mask, BLOCK_M)
    return _single_piece(mask, BLOCK_M)


def _single_piece(mask: SegmentMask, BLOCK_M: int) -> Piece | None:
    visibility = mask.visibility
    found = pieces(mask, BLOCK_M)
    first, second = next(found, None), next(found, None)
    whole = (0, visibility.M, ((0, visibility.N),))
    if first is None or second is not None or first.visible is not None or first[:3] != whole:
        return None
    return first


_known_single_piece = memoised(1024)(_single_piece)  # of masks of rules, which hold no tensor


class NativeProblem(NamedTuple):
    """One segment's attention; tensors in any dtype."""

    q: Tensor  # (batch, heads, M, D)
    k: Tensor  # (batch, kv_heads, N, D)
    v: Tensor
    bias: Tensor | None  # (batch or 1, heads or 1, M or 1, N or 1)
    dtype: torch.dtype  # in which the kernel computes
    mask: SegmentMask
    scale: float
    BLOCK_M: int


def forward(
    given: NativeProblem, sink: Tensor | None, parts: Iterable[Piece] | None = None
) -> tuple[Tensor, Tensor]:
    """out (batch, heads, M, D) and lse (batch, heads, M).

    `parts` are the pieces, if not those that the mask would be cut into.
    """
    q, k, v = (_readable(x, given.dtype) for x in given[:3])
    given = given._replace(q=q, k=k, v=v)
    whole = single_piece(given.mask, given.BLOCK_M) if parts is None else None
    if whole is not None:
        out, lse = _piece_forward(whole, given)
    else:
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:-1], -INFINITY, dtype=q.dtype)
        previous_row = -1
        for piece in pieces(given.mask, given.BLOCK_M) if parts is None else parts:
            out_part, lse_part = _piece_forward(piece, given)
            if piece.m0 == previous_row:  # an earlier piece has other keys of these rows
                out_part, lse_part = merge(piece.rows(out), piece.rows(lse), out_part, lse_part)
            piece.rows(out).copy_(out_part)
            piece.rows(lse).copy_(lse_part)
            previous_row = piece.m0
    if sink is not None:
        out, lse = add_sink(out, lse, sink.to(q.dtype)[:, None])
    return out, lse


def _piece_forward(piece: Piece, given: NativeProblem) -> tuple[Tensor, Tensor]:
    """out and lse of a piece."""
    k, v, added = piece.operands(given)
    out, lse = operators.native_forward(
        piece.rows(given.q), k, v, 0.0, piece.causal, attn_mask=added, scale=given.scale
    )
    if added is not None:
        _hide_blind_rows(lse, added, piece.causal)
    return out, lse


def _hide_blind_rows(lse: Tensor, added: Tensor, causal: bool) -> None:
    """Set the lse of rows that see no key to -inf. The kernel returns 0 for them, but 0 may also be
    the lse of a row that sees keys.
    """
    maybe_blind = lse == 0
    if not maybe_blind.any():
        return
    visible = added > -INFINITY
    if causal:
        visible = visible & torch.ones(lse.shape[2], lse.shape[2], dtype=torch.bool).tril()
    lse.masked_fill_(maybe_blind & ~visible.any(-1), -INFINITY)


def backward(
    given: NativeProblem,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    parts: Iterable[Piece] | None = None,
) -> TileGradients:
    """Gradients from the whole rows' `out` and `lse`; those of several kernel calls are added up in
    the lse's dtype. `parts` are as in `forward`.
    """
    bias, dtype, mask, scale, BLOCK_M = given[3:]
    q, k, v, out, dout = (_readable(x, dtype) for x in (*given[:3], out, dout))
    given = given._replace(q=q, k=k, v=v)
    whole = single_piece(mask, BLOCK_M) if parts is None else None
    group = q.shape[1] // k.shape[1] if q.dtype.itemsize == 2 else 1
    assert bias is None or group == 1
    if whole is None or bias is not None:
        # Rows that see no key have lse -inf, and exp(-inf - lse) would be NaN; with 0 it is 0.
        lse = lse.masked_fill(lse == -INFINITY, 0.0)
    if whole is not None and group == 1:
        k, v, added = whole.operands(given)
        results = (dout, q, k, v, out, lse, 0.0, whole.causal)
        return TileGradients(*operators.native_backward(*results, attn_mask=added, scale=scale))
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    for piece, member in product(pieces(mask, BLOCK_M) if parts is None else parts, range(group)):
        heads = slice(member, None, group)
        piece_k, piece_v, added = piece.operands(given)
        dq_part, dk_part, dv_part = operators.native_backward(
            piece.rows(dout)[:, heads],
            piece.rows(q)[:, heads],
            piece_k,
            piece_v,
            piece.rows(out)[:, heads],
            piece.rows(lse)[:, heads],
            0.0,
            piece.causal,
            attn_mask=added,
            scale=scale,
        )
        piece.rows(dq)[:, heads].add_(dq_part)
        piece.add_to_keys(dk, dk_part)
        piece.add_to_keys(dv, dv_part)
    return TileGradients(dq, dk, dv)


def _readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype` with a contiguous last dimension, which the kernel assumes without a check."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()
