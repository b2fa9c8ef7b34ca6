"""Cut a call into segments: dense blocks of queries and keys that share one mask.

A segment of a dense call without lengths holds a few batch rows; packed, padded and paged calls
have one segment per sequence; a block mask that differs between heads makes one segment per head.
The kernels get plain (batch, heads, length, head_dim) tensors, whatever the layout of the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...lru import memoised
from ...masks import FULL, PARTIAL, Positions, Run, Visibility
from ...problem import AttentionProblem, Operands, Options

# Batch rows times heads of one segment: bounds the tiles' memory when the batch is large.
MAX_BATCH_HEADS = 64


class KeyRun(NamedTuple):
    """Keys ``[start, stop)`` that a query tile visits in one step; `visible` is None if no score is
    masked.
    """

    start: int
    stop: int
    visible: Tensor | None  # bool (..., rows, stop - start), with spans for batches and heads


def cut(run: KeyRun, size: int) -> Iterator[KeyRun]:
    """`run` cut at multiples of `size`."""
    for n0 in range(run.start // size * size, run.stop, size):
        start, stop = max(n0, run.start), min(n0 + size, run.stop)
        part = slice(start - run.start, stop - run.start)
        yield KeyRun(start, stop, None if run.visible is None else run.visible[..., part])


def without_hidden(x: Tensor, seen: Tensor) -> Tensor:
    """`x` (batch, kv_heads, keys, n) with zeros at the keys that no query of the rows sees: their
    probability is 0, and 0 times NaN or infinity would be NaN.

    Args:
        seen: bool (keys or 1,), or with leading (batch or 1, heads or 1).
    """
    if seen.all():
        return x
    if seen.dim() > 1 and seen.shape[1] > 1:  # some head of the group sees the key
        seen = seen.unflatten(1, (x.shape[1], -1)).any(2)
    return x.masked_fill(~seen[..., None], 0.0)


class BlockLayout(NamedTuple):
    """The block mask of one segment: kinds and partial tiles of one (batch, head)."""

    kinds: list[list[int]]
    partial_index: list[list[int]]
    partial_tiles: Tensor  # bool (P, BM, BN)


class SpanRows(NamedTuple):
    """The intervals of keys of the rows of a segment: (batch or 1, heads or 1, M, R)."""

    starts: Tensor
    stops: Tensor

    @classmethod
    def of(
        cls, operands: Operands, batch: slice, heads: slice, rows: slice, is_packed: bool
    ) -> SpanRows:
        """The spans of some sequences, query heads and query rows of a call with spans."""
        starts, stops = operands.span_starts, operands.span_stops
        assert starts is not None and stops is not None
        index = (
            slice(None) if is_packed or starts.shape[0] == 1 else batch,
            slice(None) if starts.shape[1] == 1 else heads,
            rows,
        )
        return cls(starts[index], stops[index])

    def hulls(self, m0: int, m1: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Disjoint intervals inside ``[start, stop)``, from left to right, outside of which no row
        of ``[m0, m1)`` sees a key.
        """
        if start >= stop:
            return []
        starts = self.starts[:, :, m0:m1].clamp(start, stop)
        stops = self.stops[:, :, m0:m1].clamp(start, stop)
        is_empty = starts >= stops
        first = starts.masked_fill(is_empty, stop).amin((0, 1, 2)).tolist()
        last = stops.masked_fill(is_empty, start).amax((0, 1, 2)).tolist()
        found: list[tuple[int, int]] = []
        for a, b in sorted(zip(first, last, strict=True)):
            if a >= b:
                continue
            if found and a <= found[-1][1]:
                found[-1] = (found[-1][0], max(b, found[-1][1]))
            else:
                found.append((a, b))
        return found

    def full_ranges(self, m0: int, m1: int) -> list[tuple[int, int]]:
        """The keys ``[start, stop)`` that all rows of ``[m0, m1)`` see by the same interval."""
        starts = self.starts[:, :, m0:m1].amax((0, 1, 2)).tolist()
        stops = self.stops[:, :, m0:m1].amin((0, 1, 2)).tolist()
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def visible(self, m0: int, m1: int, n0: int, n1: int) -> Tensor | None:
        """Bool (batch or 1, heads or 1, rows, keys); None if every row sees all of the keys."""
        if any(start <= n0 and n1 <= stop for start, stop in self.full_ranges(m0, m1)):
            return None
        keys = torch.arange(n0, n1)
        starts, stops = self.starts[:, :, m0:m1, :, None], self.stops[:, :, m0:m1, :, None]
        seen = ((keys >= starts) & (keys < stops)).any(-2)
        return None if bool(seen.all()) else seen


class ListedRows(NamedTuple):
    """The lists of keys of the rows of a segment, in place of `SpanRows`: (batch or 1, heads or 1,
    M, top) numbers of runs of `run` keys.
    """

    lists: Tensor
    run: int

    @classmethod
    def of(
        cls, problem: AttentionProblem, index: Tensor, batch: slice, heads: slice, rows: slice
    ) -> ListedRows:
        """The lists of some sequences, query heads and query rows of a call."""
        is_shared = problem.layout != "dense" or index.shape[0] == 1
        lists = index[slice(None) if is_shared else batch, rows].transpose(1, 2)
        if lists.shape[1] > 1:
            lists = lists.repeat_interleave(problem.group, 1)[:, heads]
        return cls(lists, problem.options.key_run)

    def hulls(self, m0: int, m1: int, start: int, stop: int) -> list[tuple[int, int]]:
        """As `SpanRows.hulls`: at most one interval."""
        index = self.lists[:, :, m0:m1]
        listed = index[(index >= 0) & (index < -(-stop // self.run))]
        if start >= stop or listed.numel() == 0:
            return []
        first = max(start, int(listed.min()) * self.run)
        last = min(stop, (int(listed.max()) + 1) * self.run)
        return [(first, last)] if first < last else []

    def full_ranges(self, m0: int, m1: int) -> list[tuple[int, int]]:
        """As `SpanRows.full_ranges`: none is known."""
        return []

    def visible(self, m0: int, m1: int, n0: int, n1: int) -> Tensor | None:
        """As `SpanRows.visible`."""
        first, last = n0 // self.run, -(-n1 // self.run)
        at = self.lists[:, :, m0:m1].long() - first
        at = torch.where((at >= 0) & (at < last - first), at, last - first)
        # All others mark one more run.
        seen = at.new_zeros((*at.shape[:-1], last - first + 1), dtype=torch.bool)
        seen = seen.scatter_(-1, at, True)[..., :-1].repeat_interleave(self.run, -1)
        seen = seen[..., n0 - first * self.run : n1 - first * self.run]
        return None if bool(seen.all()) else seen


class SegmentMask(NamedTuple):
    """Mask rules, block layout, and spans or lists for the queries and keys of a segment."""

    visibility: Visibility
    layout: BlockLayout | None
    spans: SpanRows | ListedRows | None = None

    def query_tiles(self, rows: int) -> list[tuple[int, int]]:
        """Query tiles ``[m0, m1)`` of at most `rows`, cut at the block mask's tiles as well."""
        # Rows of one tile stand next to each other.
        runs = [(0, self.visibility.M)]
        if self.visibility.rows is not None:
            runs = [(run.row, run.row + run.length) for run in self.visibility.rows.runs]
        step = rows if self.layout is None else self.layout.partial_tiles.shape[1]
        return [
            (m0, min(m0 + rows, block + step, last))
            for first, last in runs
            for block in range(first, last, step)
            for m0 in range(block, min(block + step, last), rows)
        ]

    def key_runs(self, m0: int, m1: int, columns: int) -> Iterator[KeyRun]:
        """The keys that some row of ``[m0, m1)`` sees, in runs of at most `columns`."""
        start, full_stop = self.visibility.key_range(m0)
        full_start, stop = self.visibility.key_range(m1 - 1)
        full = [] if self.spans is None else self.spans.full_ranges(m0, m1)
        for span_start, span_stop, tile in self._seen_spans(m0, m1, start, stop):
            cuts = sorted({span_start, span_stop, full_start, full_stop, *chain(*full)})
            cuts = [c for c in cuts if span_start <= c <= span_stop]
            for cut_start, cut_stop in pairwise(cuts):
                inside = full_start <= cut_start and cut_stop <= full_stop
                for n0 in range(cut_start, cut_stop, columns):
                    n1 = min(n0 + columns, cut_stop)
                    yield KeyRun(n0, n1, self._visible(m0, m1, n0, n1, inside, tile))

    def _seen_spans(
        self, m0: int, m1: int, start: int, stop: int
    ) -> Iterator[tuple[int, int, int | None]]:
        """The parts of `_spans` between which the tile's rows have intervals of keys."""
        seen = [(start, stop)] if self.spans is None else self.spans.hulls(m0, m1, start, stop)
        for seen_start, seen_stop in seen:
            yield from self._spans(m0, seen_start, seen_stop)

    def _spans(self, m0: int, start: int, stop: int) -> Iterator[tuple[int, int, int | None]]:
        """Spans of keys, each with the partial tile that covers it (None if the block mask hides
        no key of the span).
        """
        if self.layout is None or stop <= start:
            if start < stop:
                yield start, stop, None
            return
        BM, BN = self.layout.partial_tiles.shape[1:]
        kinds = self.layout.kinds[m0 // BM]
        full_from: int | None = None  # neighbouring full tiles are joined into one span
        for column in range(start // BN, (stop + BN - 1) // BN):
            tile_start, tile_stop = max(start, column * BN), min(stop, (column + 1) * BN)
            if kinds[column] == FULL:
                full_from = tile_start if full_from is None else full_from
                continue
            if full_from is not None:
                yield full_from, tile_start, None
                full_from = None
            if kinds[column] == PARTIAL:
                yield tile_start, tile_stop, self.layout.partial_index[m0 // BM][column]
        if full_from is not None:
            yield full_from, stop, None

    def _visible(
        self, m0: int, m1: int, n0: int, n1: int, inside: bool, tile: int | None
    ) -> Tensor | None:
        structural = None if inside else self.visibility.dense((m0, m1), (n0, n1))
        if self.spans is not None:
            seen = self.spans.visible(m0, m1, n0, n1)
            if structural is None or seen is None:
                structural = seen if structural is None else structural
            else:
                structural = structural & seen
        if tile is None or self.layout is None:
            return structural
        BM, BN = self.layout.partial_tiles.shape[1:]
        rows, keys = slice(m0 % BM, (m1 - 1) % BM + 1), slice(n0 % BN, (n1 - 1) % BN + 1)
        elements = self.layout.partial_tiles[tile, rows, keys]
        return elements if structural is None else elements & structural


@dataclass(frozen=True)
class Segment:
    """One dense piece of a call: the location of its tensors, and its mask."""

    batch: slice  # sequences
    heads: slice  # query heads
    kv_heads: slice
    query_rows: slice  # in the sequence dimension of q
    key_rows: slice  # in the sequence dimension of k, or of the gathered pages
    cache_row: int | None  # row of k and v, if it is not that of the batch
    pages: Tensor | None  # int64, the pages that hold the keys
    packed_queries: bool
    packed_keys: bool
    mask: SegmentMask
    has_all_queries: bool  # of the call, so that they need no slicing
    has_all_keys: bool

    @property
    def is_whole(self) -> bool:
        """Whether the segment is the whole call, without padding."""
        return self.has_all_queries and self.has_all_keys

    def queries(self, x: Tensor) -> Tensor:
        """(batch, heads, M, head_dim) view of q, out, or their gradients."""
        if self.has_all_queries:
            return x.transpose(1, 2)
        if self.packed_queries:
            return self._apart(x[self.query_rows, self.heads]).transpose(1, 2)
        return x[self.batch, self.query_rows, self.heads].transpose(1, 2)

    def rows(self, lse: Tensor) -> Tensor:
        """(batch, heads, M) view of the log-sum-exp or its gradient."""
        if self.has_all_queries:
            return lse
        if self.packed_queries:
            return self._apart(lse[self.heads, self.query_rows].T).transpose(1, 2)
        return lse[self.batch, self.heads, self.query_rows]

    def columns(self, sums: Tensor) -> Tensor:
        """(batch, heads, N) view of one number for each head and key: (batch, heads, seq_k) or,
        packed, (heads, total_k).
        """
        if self.packed_keys:
            return self._apart(sums[self.heads, self.key_rows].T).transpose(1, 2)
        return sums[self.batch, self.heads, self.key_rows]

    def keys(self, x: Tensor) -> Tensor:
        """(batch, kv_heads, N, head_dim) of k or v: a view, or a gather of the pages."""
        if self.has_all_keys:
            return x.transpose(1, 2)
        if self.pages is not None:
            tokens = x[self.pages, :, self.kv_heads].flatten(0, 1)[self.key_rows]
            return tokens.transpose(0, 1).unsqueeze(0)
        if self.packed_keys:
            return self._apart(x[self.key_rows, self.kv_heads]).transpose(1, 2)
        row = self.batch if self.cache_row is None else slice(self.cache_row, self.cache_row + 1)
        return x[row, self.key_rows, self.kv_heads].transpose(1, 2)

    def _apart(self, tokens: Tensor) -> Tensor:
        """(batch, length, ...) view of packed sequences of equal lengths."""
        count = self.batch.stop - self.batch.start
        return tokens.unflatten(0, (count, tokens.shape[0] // count))

    def add_to_keys(self, total: Tensor, gradient: Tensor) -> None:
        """Add `gradient` (batch, kv_heads, N, head_dim) to the rows that `keys` reads. Segments may
        share keys.
        """
        if self.pages is None:
            self.keys(total).add_(gradient)
            return
        page_size = total.shape[1]
        token = torch.arange(self.key_rows.start, self.key_rows.stop)
        slot = self.pages[token // page_size] * page_size + token % page_size
        flat = total.view(-1, *total.shape[2:])[:, self.kv_heads]
        flat.index_add_(0, slot, gradient[0].transpose(0, 1))

    def per_score(self, bias: Tensor) -> Tensor:
        """(batch or 1, heads or 1, M or 1, N or 1) view of the bias or its gradient."""
        if self.is_whole:
            return bias
        index = [
            whole if size > 1 else slice(None)
            for whole, size in zip(
                (
                    self.batch,
                    self.heads,
                    slice(self.mask.visibility.M),
                    slice(self.mask.visibility.N),
                ),
                bias.shape,
                strict=True,
            )
        ]
        return bias[tuple(index)]


def segments(
    problem: AttentionProblem, operands: Operands, by_key_head: bool = False
) -> Iterable[Segment]:
    """The segments of a call. Lengths are clamped to the sizes of the tensors.

    With `by_key_head`, each one has the rows of one key head of one sequence.
    """
    step = 1 if by_key_head else max(1, MAX_BATCH_HEADS // problem.Hq)
    # Whether sequences may differ in length, offset or mask, so that each one is a segment.
    has_own_mask = problem.block_tile is not None or problem.spans > 0 or problem.has_key_index
    is_ragged = problem.has_lengths or problem.page_size > 0 or has_own_mask
    if problem.layout == "dense" and not is_ragged:
        found: Iterable[Segment] = _dense_segments(problem, step)
    else:
        found = _ragged_segments(problem, operands, step)
    if by_key_head:
        return chain.from_iterable(_of_key_heads(segment, problem.group) for segment in found)
    return found


def _of_key_heads(segment: Segment, group: int) -> Iterator[Segment]:
    """A segment for each key head."""
    first = segment.heads.start
    for kv in range(segment.kv_heads.start, segment.kv_heads.stop):
        heads = slice(max(kv * group, first), min((kv + 1) * group, segment.heads.stop))
        spans, is_whole = segment.mask.spans, heads == segment.heads
        if isinstance(spans, SpanRows) and spans.starts.shape[1] > 1:
            own = slice(heads.start - first, heads.stop - first)
            spans = SpanRows(spans.starts[:, own], spans.stops[:, own])
        yield replace(
            segment,
            heads=heads,
            kv_heads=slice(kv, kv + 1),
            mask=segment.mask._replace(spans=spans),
            has_all_queries=segment.has_all_queries and is_whole,
            has_all_keys=segment.has_all_keys and is_whole,
        )


@memoised(1024)
def _dense_segments(problem: AttentionProblem, step: int) -> tuple[Segment, ...]:
    """`step` batch rows each. They hold no tensor, so equal calls share them."""
    heads, kv_heads = slice(0, problem.Hq), slice(0, problem.Hk)
    batches = (slice(b, min(b + step, problem.B)) for b in range(0, problem.B, step))
    return tuple(
        _Sequence(batch, slice(0, problem.M), slice(0, problem.N)).segment(
            problem, heads, kv_heads, None
        )
        for batch in batches
    )


def _ragged_segments(problem: AttentionProblem, operands: Operands, step: int) -> Iterator[Segment]:
    sequences = _ragged_sequences(problem, operands)
    elsewhere = (
        operands.page_table, operands.cache_batch_idx, operands.tile_kinds, operands.key_index
    )  # fmt: skip
    is_shared = operands.span_starts is None or operands.span_starts.shape[0] == 1
    if all(x is None for x in elsewhere):
        if problem.layout == "dense" and is_shared:
            sequences = _with_equal_lengths(sequences, step)
        # Parts of longer sequences have positions and indices of their own.
        is_whole = operands.q_runs is None and operands.sequences is None
        if problem.layout == "packed" and problem.spans == 0 and is_whole:
            sequences = _adjacent_of_equal_lengths(sequences, step)
    layouts = None if operands.tile_kinds is None else _Layouts.of(operands)
    all_heads = slice(0, problem.Hq), slice(0, problem.Hk), None
    for sequence in sequences:
        b = sequence.batch.start
        for heads, kv_heads, layout in layouts.of_heads(problem, b) if layouts else [all_heads]:
            spans: SpanRows | ListedRows | None = None
            where = sequence.batch, heads, sequence.query_rows
            if operands.key_index is not None:
                spans = ListedRows.of(problem, operands.key_index, *where)
            elif operands.span_starts is not None:
                spans = SpanRows.of(operands, *where, is_packed=problem.layout != "dense")
            yield sequence.segment(problem, heads, kv_heads, layout, spans)


class _Sequence(NamedTuple):
    """The rows of one segment before segments are split by heads."""

    batch: slice
    query_rows: slice
    key_rows: slice
    cache_row: int | None = None
    pages: Tensor | None = None
    positions: tuple[Positions, Positions] | None = None  # of queries and of keys

    def segment(
        self,
        problem: AttentionProblem,
        heads: slice,
        kv_heads: slice,
        layout: BlockLayout | None,
        spans: SpanRows | ListedRows | None = None,
    ) -> Segment:
        M = self.query_rows.stop - self.query_rows.start
        N = self.key_rows.stop - self.key_rows.start
        if problem.layout == "packed":
            count = self.batch.stop - self.batch.start
            M, N = M // count, N // count
        whole_batch = self.batch == slice(0, problem.B) and heads == slice(0, problem.Hq)
        all_keys = self.pages is None and self.cache_row is None and N == problem.N
        return Segment(
            batch=self.batch,
            heads=heads,
            kv_heads=kv_heads,
            query_rows=self.query_rows,
            key_rows=self.key_rows,
            cache_row=self.cache_row,
            pages=self.pages,
            packed_queries=problem.layout != "dense",
            packed_keys=problem.layout == "packed",
            mask=SegmentMask(
                Visibility(problem.options.facts, M, N, *(self.positions or ())), layout, spans
            ),
            has_all_queries=whole_batch and problem.layout == "dense" and M == problem.M,
            has_all_keys=whole_batch and problem.layout != "packed" and all_keys,
        )


def _with_equal_lengths(sequences: Iterable[_Sequence], step: int) -> Iterator[_Sequence]:
    """Join neighbouring sequences that use the same rows of q, k and v, as in a batch of equally
    long generated texts, where one kernel call then serves up to `step` of them.
    """
    by_rows = groupby(sequences, lambda x: (x.batch.start // step, x._replace(batch=slice(0))))
    for _, group in by_rows:
        first, *others = group
        last = others[-1] if others else first
        yield first._replace(batch=slice(first.batch.start, last.batch.stop))


def _adjacent_of_equal_lengths(sequences: Iterable[_Sequence], step: int) -> Iterator[_Sequence]:
    """Join packed sequences of equal lengths that follow one another without a gap, so that one
    kernel call serves up to `step` short ones.
    """
    joined: _Sequence | None = None
    for sequence in sequences:
        if joined is not None:
            count = joined.batch.stop - joined.batch.start
            rows = ((joined.query_rows, sequence.query_rows), (joined.key_rows, sequence.key_rows))
            if count < step and all(
                old.stop == new.start and old.stop - old.start == count * (new.stop - new.start)
                for old, new in rows
            ):
                joined = joined._replace(
                    batch=slice(joined.batch.start, sequence.batch.stop),
                    query_rows=slice(joined.query_rows.start, sequence.query_rows.stop),
                    key_rows=slice(joined.key_rows.start, sequence.key_rows.stop),
                )
                continue
            yield joined
        joined = sequence
    if joined is not None:
        yield joined


def _ragged_sequences(problem: AttentionProblem, operands: Operands) -> Iterator[_Sequence]:
    total_q, total_k = operands.q.shape[0], operands.k.shape[0]
    q_bounds = _bounds(operands.cu_seqlens_q, total_q, problem.B, problem.M)
    k_bounds = _bounds(operands.cu_seqlens_k, total_k, problem.B, problem.N)
    used_q, used_k, leftpad, cache_rows = (
        None if x is None else x.tolist()
        for x in (
            operands.seqused_q,
            operands.seqused_k,
            operands.leftpad_k,
            operands.cache_batch_idx,
        )
    )
    for b in range(problem.B):
        q_start, M = q_bounds[b]
        k_start, N = k_bounds[b]
        M = M if used_q is None else _clamp(used_q[b], M)
        N = N if used_k is None else _clamp(used_k[b], N)
        pad = 0 if leftpad is None else _clamp(leftpad[b], N)
        pages = None
        if operands.page_table is not None:
            count = -(-N // problem.page_size)
            pages = operands.page_table[b, :count].long().clamp(0, operands.k.shape[0] - 1)
        yield _Sequence(
            batch=slice(b, b + 1),
            query_rows=slice(q_start, q_start + M),
            key_rows=slice(k_start + pad, k_start + N),
            cache_row=None if cache_rows is None else _clamp(cache_rows[b], total_k - 1),
            pages=pages,
            positions=None
            if operands.q_runs is None or operands.k_runs is None
            else (_positions(operands.q_runs[b], M), _positions(operands.k_runs[b], N)),
        )


def _bounds(
    cu_seqlens: Tensor | None, total: int, batch: int, longest: int
) -> list[tuple[int, int]]:
    """(first row, length) of every sequence, inside the tensor and at most `longest`."""
    if cu_seqlens is None:
        return [(0, longest)] * batch
    ends = [_clamp(x, total) for x in cu_seqlens.tolist()]
    return [(start, _clamp(stop - start, longest)) for start, stop in pairwise(ends)]


def _positions(runs: Tensor, rows: int) -> Positions:
    """The positions of `rows` rows, from the (runs, 2) tensor of a sequence."""
    used = [(row, position) for row, position in runs.tolist() if row < rows]
    ends = [*(row for row, _ in used), rows][1:]
    pairs = zip(used, ends, strict=True)
    return Positions(tuple(Run(row, position, end - row) for (row, position), end in pairs))


def _clamp(x: int, limit: int) -> int:
    return max(0, min(x, limit))


class _Layouts(NamedTuple):
    """The block mask on the host: nested lists (batch or 1, heads or 1, nM, nN)."""

    kinds: list[list[list[list[int]]]]
    partial_index: list[list[list[list[int]]]]
    partial_tiles: Tensor

    @classmethod
    def of(cls, operands: Operands) -> _Layouts:
        """The block mask of a call with one."""
        kinds, index, tiles = operands.tile_kinds, operands.partial_index, operands.partial_tiles
        assert kinds is not None and index is not None and tiles is not None
        return cls(kinds.tolist(), index.tolist(), tiles)

    def at(self, b: int, h: int) -> BlockLayout:
        """The layout of one (batch, head)."""
        row = b if len(self.kinds) > 1 else 0
        head = h if len(self.kinds[0]) > 1 else 0
        return BlockLayout(self.kinds[row][head], self.partial_index[row][head], self.partial_tiles)

    def of_heads(
        self, problem: AttentionProblem, b: int
    ) -> Iterator[tuple[slice, slice, BlockLayout]]:
        """Query heads, key heads and layout of each segment of a sequence: all heads in one segment
        unless their layouts differ.
        """
        if len(self.kinds[0]) == 1:
            yield slice(0, problem.Hq), slice(0, problem.Hk), self.at(b, 0)
            return
        for h in range(problem.Hq):
            kv = h // problem.group
            yield slice(h, h + 1), slice(kv, kv + 1), self.at(b, h)


class Indices(NamedTuple):
    """The indices of a segment's sequences, heads, queries and keys in the whole call, of which a
    rank of context parallelism has only a part: dropout and score functions count by them.
    """

    batch: Tensor  # (batch,)
    heads: Tensor  # (heads,)
    visibility: Visibility
    shift: int  # position of a query minus its index

    @classmethod
    def of(cls, operands: Operands, options: Options, segment: Segment) -> Indices:
        """The indices of a segment."""
        batch, heads = segment.batch, segment.heads
        visibility = segment.mask.visibility
        found = cls(
            torch.arange(batch.start, batch.stop),
            torch.arange(heads.start, heads.stop) + options.first_head,
            visibility,
            visibility.N - visibility.M,
        )
        if operands.sequences is None:
            return found
        number, shift = operands.sequences[batch.start].tolist()
        return found._replace(batch=torch.tensor([number]), shift=shift)

    def queries(self, m0: int, m1: int) -> Tensor:
        """The indices of the query rows ``[m0, m1)``."""
        return self.visibility.row_positions(m0, m1) - self.shift

    def keys(self, run: KeyRun) -> Tensor:
        """The indices of the keys of a run."""
        return self.visibility.key_positions(run.start, run.stop)
