"""Calls that are `batch_invariant`: tiles of one size, whose borders are multiples of that size.

The bits of a product depend on the sizes of its matrices and on where a row is in them. So here
everything is computed in tiles of the queries at the positions ``[t * BLOCK_M, (t + 1) * BLOCK_M)``
and the keys ``[u * BLOCK_N, (u + 1) * BLOCK_N)``; rows and keys that the call does not have are
zeros. A query is the same row of the same tiles whether it is decoded alone or trained among
thousands, and gradients are added in the order of positions. Tiles of which a query sees nothing,
which are there because of its neighbours, add exact zeros to what it has.

PyTorch's kernel computes each head of each sequence separately, whatever else its call has. The
bits of PyTorch's other operations depend on how many numbers they get at once, so the plain tiles
get one key head of one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...masks import Positions, Run, Visibility, Window
from . import native, tiles
from .distances import DistanceGradients
from .native import NativeProblem, Piece, joined
from .plan import KERNEL_KEYS
from .segments import Indices, KeyRun, SegmentMask, SpanRows, cut
from .tiles import INFINITY, TileGradients, TileProblem

# Rows that share a call of PyTorch's kernel, which has blocks of 32 rows in calls of up to 191.
NATIVE_ROWS = 128


class WholeTiles(NamedTuple):
    """The mask of a segment whose rows are padded."""

    mask: SegmentMask  # of the rows and keys that there are
    before: int  # rows of padding before the first one
    visibility: Visibility  # of all rows: where they stand

    def query_tiles(self, rows: int) -> list[tuple[int, int]]:
        """Query tiles ``[m0, m0 + rows)``."""
        return [(m0, m0 + rows) for m0 in range(0, self.visibility.M, rows)]

    def key_runs(self, m0: int, m1: int, columns: int) -> Iterator[KeyRun]:
        """The tiles of `columns` keys of which some row of ``[m0, m1)`` sees some."""
        rows, before, spans = self.mask.visibility.M, self.before, self.mask.spans
        heads = spans.starts.shape[:2] if isinstance(spans, SpanRows) else ()
        found: dict[int, Tensor | None] = {}  # what rows see of the tile that begins at a key
        for first, last in self.mask.query_tiles(max(rows, 1)):
            first, last = max(first, m0 - before), min(last, m1 - before)
            runs = self.mask.key_runs(first, last, columns) if first < last else ()
            for run in chain.from_iterable(cut(run, columns) for run in runs):
                n0 = run.start // columns * columns
                is_whole = last - first == m1 - m0 and run.stop - run.start == columns
                if is_whole and run.visible is None:
                    found[n0] = None
                    continue
                visible = found.setdefault(n0, torch.zeros(*heads, m1 - m0, columns).bool())
                assert visible is not None
                seeing = slice(first + before - m0, last + before - m0)
                seen = slice(run.start - n0, run.stop - n0)
                visible[..., seeing, seen] = True if run.visible is None else run.visible
        for n0 in sorted(found):
            yield KeyRun(n0, n0 + columns, found[n0])

    def pieces(self) -> Iterator[Piece]:
        """Calls of PyTorch's kernel: for the rows between two multiples of `NATIVE_ROWS`, and the
        tiles of keys that they see. All have a mask, without which it scales scores otherwise.
        """
        M, first = self.visibility.M, self.visibility.position(0)
        is_causal = any(isinstance(x, Window) and x.right == 0 for x in self.visibility.facts)
        for m0, m1 in pairwise(sorted({0, M, *range(-first % NATIVE_ROWS, M, NATIVE_ROWS)})):
            runs, spans = list(self.key_runs(m0, m1, KERNEL_KEYS)), list[tuple[int, int]]()
            if is_causal and runs:  # no row between the multiples sees more, present or not
                end = -(-(first + m1) // NATIVE_ROWS) * NATIVE_ROWS
                runs[-1] = next(cut(runs[-1], end))
            for run in runs:
                start = spans.pop()[0] if spans and spans[-1][1] == run.start else run.start
                spans.append((start, run.stop))
            if runs:
                visible = joined(runs)
                if visible is None:
                    visible = torch.ones(m1 - m0, sum(n1 - n0 for n0, n1 in spans)).bool()
                yield Piece(m0, m1, tuple(spans), False, visible)


class PaddedIndices(Indices):
    """Indices of padded rows and keys, `shift` rows before the first query. Padding has those of
    its neighbours, so that a score function finds what it captures.
    """

    def queries(self, m0: int, m1: int) -> Tensor:
        """The indices of the rows ``[m0, m1)``."""
        return (torch.arange(m0, m1) - self.shift).clamp(0, self.visibility.M - 1)

    def keys(self, run: KeyRun) -> Tensor:
        """The indices of the keys of a run."""
        return torch.arange(run.start, run.stop).clamp(max=self.visibility.N - 1)


class Padding(NamedTuple):
    """The whole tiles around the rows and keys of a segment."""

    visibility: Visibility  # of the rows and keys that there are
    before: int  # rows before the first one
    M: int  # with padding
    N: int

    @classmethod
    def of(cls, visibility: Visibility, BLOCK_M: int, BLOCK_N: int) -> Padding:
        """That of a segment."""
        before = (visibility.N - visibility.M) % BLOCK_M
        M = -(-(before + visibility.M) // BLOCK_M) * BLOCK_M
        return cls(visibility, before, M, -(-visibility.N // BLOCK_N) * BLOCK_N)

    def rows(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Padded rows of q, or of what has one number or row for each query."""
        dims = (0,) * 2 * (x.dim() - 3)
        return F.pad(x, (*dims, self.before, self.M - self.before - x.shape[2]), value=value)

    def keys(self, x: Tensor) -> Tensor:
        """Padded rows of k or v."""
        return x if x.shape[2] == self.N else F.pad(x, (0, 0, 0, self.N - x.shape[2]))

    def bias(self, x: Tensor) -> Tensor:
        """A padded bias."""
        rows = (self.before, self.M - self.before - x.shape[2]) if x.shape[2] > 1 else (0, 0)
        return F.pad(x, (0, self.N - x.shape[3] if x.shape[3] > 1 else 0, *rows))

    def inner(self, x: Tensor) -> Tensor:
        """The queries of padded rows."""
        return x[:, :, self.before : self.before + self.visibility.M]

    def gradients(self, dQ: Tensor, dK: Tensor, dV: Tensor) -> TileGradients:
        """Those of the rows and keys that there are."""
        N = self.visibility.N
        return TileGradients(self.inner(dQ), dK[:, :, :N], dV[:, :, :N])

    def mask(self, mask: SegmentMask) -> WholeTiles:
        """The segment's mask, padded."""
        first = self.visibility.N - self.visibility.M - self.before
        rows = Positions((Run(0, first, self.M),))
        return WholeTiles(mask, self.before, self.visibility._replace(M=self.M, rows=rows))

    def problem(self, tp: TileProblem) -> TileProblem:
        """The segment's attention, padded."""
        visibility, bias, function = self.visibility, tp.score.bias, tp.score.function
        if function is not None:
            indices = function.indices
            indices = PaddedIndices(indices.batch, indices.heads, visibility, self.before)
            function = function._replace(indices=indices)
        return tp._replace(
            Q=self.rows(tp.Q),
            K=self.keys(tp.K),
            V=self.keys(tp.V),
            # It has what tiles ask of a mask.
            mask=cast(SegmentMask, self.mask(tp.mask)),
            score=tp.score._replace(
                bias=None if bias is None else self.bias(bias), function=function
            ),
        )


def forward(tp: TileProblem) -> tuple[Tensor, Tensor]:
    """As `tiles.forward`."""
    padding = Padding.of(tp.mask.visibility, tp.BLOCK_M, tp.BLOCK_N)
    O, L = tiles.forward(padding.problem(tp))
    return padding.inner(O), padding.inner(L)


def row_products(tp: TileProblem, O: Tensor, dO: Tensor) -> Tensor:
    """rowsum(dO * O), (batch, heads, M)."""
    padding = Padding.of(tp.mask.visibility, tp.BLOCK_M, tp.BLOCK_N)
    products = (padding.rows(O) * padding.rows(dO)).split(tp.BLOCK_M, 2)
    return padding.inner(torch.cat([tile.contiguous().sum(-1) for tile in products], -1))


def backward(
    tp: TileProblem,
    L: Tensor,
    dO: Tensor,
    delta: Tensor,
    dbias: Tensor | None,
    dcaptured: Tensor | None,
    of_distances: DistanceGradients | None,
) -> TileGradients:
    """As `tiles.backward`."""
    padding = Padding.of(tp.mask.visibility, tp.BLOCK_M, tp.BLOCK_N)
    of_bias = None if dbias is None else torch.zeros_like(padding.bias(dbias))
    dQ, dK, dV = tiles.backward(
        padding.problem(tp), padding.rows(L, -INFINITY), padding.rows(dO), padding.rows(delta),
        of_bias, dcaptured, of_distances,
    )  # fmt: skip
    if dbias is not None and of_bias is not None:
        rows = padding.inner(of_bias) if dbias.shape[2] > 1 else of_bias
        dbias += rows[..., : dbias.shape[3]]
    return padding.gradients(dQ, dK, dV)


def native_forward(given: NativeProblem) -> tuple[Tensor, Tensor]:
    """As `native.forward`, without a bias and a sink."""
    padding, padded, pieces = _padded(given)
    O, L = native.forward(padded, None, pieces)
    return padding.inner(O), padding.inner(L)


def native_backward(given: NativeProblem, out: Tensor, lse: Tensor, dout: Tensor) -> TileGradients:
    """As `native.backward`, without a bias."""
    padding, padded, pieces = _padded(given)
    O, dO = (padding.rows(x.to(given.dtype)).contiguous() for x in (out, dout))
    L = padding.rows(lse.to(given.dtype), -INFINITY)
    return padding.gradients(*native.backward(padded, O, L, dO, pieces))


def _padded(given: NativeProblem) -> tuple[Padding, NativeProblem, Iterator[Piece]]:
    """A segment with whole tiles, in which the numbers of every call of the kernel lie alike."""
    padding = Padding.of(given.mask.visibility, given.BLOCK_M, KERNEL_KEYS)
    q, k, v = (x.to(given.dtype) for x in given[:3])
    q, k, v = (x.contiguous() for x in (padding.rows(q), padding.keys(k), padding.keys(v)))
    return padding, given._replace(q=q, k=k, v=v), padding.mask(given.mask).pieces()
