"""Masks that are data: spans and block masks.

With spans (`flashtile.masks.Spans`), a query sees the union of a few intervals of keys. A tile of
queries reads the intervals of its rows once. Their extremes bound the tiles of keys that some row
sees, and those that all rows see, which are not masked. So no list of tiles is needed, and the hole
between two intervals is skipped. A tile of keys is seen by queries at any positions, so dK and dV
visit the tiles of a list, as all kernels do under a block mask. Without spans (`cfg.SPANS` is 0),
they cost nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.kernel import kernel
from .arguments import UNSPECIALISED, Lengths, Mask, Sequence
from .tiles import (
    block_mask_start,
    key_span,
    list_row,
    masked_tile,
    query_span,
    tile_phases,
    visible_keys,
)


@triton.jit
def load_intervals(data, sequence, h, rows, inside, cfg: tl.constexpr):
    """((starts, stops), ...) of the queries `rows`, of any shape: within [0, N], and (N, 0) for
    empty intervals and for rows that are not `inside`.
    """
    SPANS: tl.constexpr = cfg.SPANS
    intervals = ()
    if SPANS > 0:
        b, h, N = sequence.b.to(tl.int64), h.to(tl.int64), sequence.N
        row = (sequence.start_q + rows).to(tl.int64)
        starts = data.starts + b * data.starts_batch + h * data.starts_head
        starts += row * data.starts_row
        stops = data.stops + b * data.stops_batch + h * data.stops_head
        stops += row * data.stops_row
        for r in tl.static_range(SPANS):
            # The shape of `rows`.
            start = tl.load(starts + r * data.starts_interval, mask=inside, other=0)
            stop = tl.load(stops + r * data.stops_interval, mask=inside, other=0)
            start = tl.maximum(start, 0)
            stop = tl.minimum(stop, N)
            is_empty = start >= stop
            interval = tl.where(is_empty, N, start), tl.where(is_empty, 0, stop)
            # Triton knows no starred elements; mypy, no tuples of a length that cfg decides.
            intervals = intervals + (interval,)  # type: ignore[assignment]  # noqa: RUF005
    return intervals


@triton.jit
def in_spans(keys, visible, intervals, cfg: tl.constexpr):
    """`visible`, and in one of the intervals."""
    SPANS: tl.constexpr = cfg.SPANS
    if SPANS > 0:
        seen = (keys >= intervals[0][0]) & (keys < intervals[0][1])
        for r in tl.static_range(1, SPANS):
            seen = seen | ((keys >= intervals[r][0]) & (keys < intervals[r][1]))
        visible = visible & seen
    return visible


@triton.jit
def extremes(interval, inside, N, AXIS: tl.constexpr):
    """Least start and stop, greatest start and stop, over the rows that are `inside`."""
    start, stop = interval
    return (
        tl.min(start, AXIS),
        tl.min(tl.where(inside, stop, N), AXIS),
        tl.max(tl.where(inside, start, 0), AXIS),
        tl.max(stop, AXIS),
    )


# Tiles of keys of one tile of queries: ranges of tiles, each cut as `tile_phases` does.


@triton.jit
def key_ranges(
    first_start, first_stop, last_start, last_stop, intervals, inside, N, cfg: tl.constexpr
):
    """The ranges of tiles that some row sees: one, or two disjoint ones if rows have several
    intervals, of the first intervals and of all others.

    The four bounds are those of the mask rules, as for `tile_phases`.
    """
    SPANS: tl.constexpr = cfg.SPANS
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    if SPANS == 0:
        if cfg.IS_INVARIANT and (cfg.HAS_LEFT or cfg.HAS_CHUNK):
            # All tiles are masked: those before the full ones would come after them.
            first_stop, last_start = first_start, first_start
        ranges = (tile_phases(first_start, first_stop, last_start, last_stop, BLOCK_N),)
    else:
        a, b, c, d = extremes(intervals[0], inside, N, None)
        first = tile_phases(
            tl.maximum(first_start, a), tl.minimum(first_stop, b), tl.maximum(last_start, c),
            tl.minimum(last_stop, d), BLOCK_N,
        )  # fmt: skip
        ranges = (first,)
        if SPANS > 1:
            a, b, c, d = extremes(intervals[1], inside, N, None)
            for r in tl.static_range(2, SPANS):
                least, _, _, greatest = extremes(intervals[r], inside, N, None)
                a = tl.minimum(a, least)
                d = tl.maximum(d, greatest)
            second = tile_phases(
                tl.maximum(first_start, a), tl.minimum(first_stop, b), tl.maximum(last_start, c),
                tl.minimum(last_stop, d), BLOCK_N,
            )  # fmt: skip
            is_behind = second[0] >= first[0]
            ranges = (  # type: ignore[assignment]  # a tuple of a length that cfg decides
                within_tiles(first, tl.where(is_behind, 0, second[3]), first[3]),
                within_tiles(second, tl.where(is_behind, first[3], 0), second[3]),
            )
    return ranges


@triton.jit
def within_tiles(phases, first, last):
    """The part of a range of tiles that is within [first, last)."""
    begin, full_begin, full_end, end = phases
    return (
        tl.minimum(tl.maximum(begin, first), last),
        tl.minimum(tl.maximum(full_begin, first), last),
        tl.minimum(tl.maximum(full_end, first), last),
        tl.minimum(tl.maximum(end, first), last),
    )


@triton.jit
def step_counts(ranges, cfg: tl.constexpr):
    """How many tiles of the ranges are full, and how many are masked."""
    begin, full_begin, full_end, end = ranges[0]
    full_count = full_end - full_begin
    masked_count = end - begin - full_count
    if cfg.SPANS > 1:
        begin, full_begin, full_end, end = ranges[1]
        full_count += full_end - full_begin
        masked_count += end - begin - (full_end - full_begin)
    return full_count, masked_count


@triton.jit
def listed_steps(lists, sequence, h, tile, tiles, cfg: tl.constexpr):
    """How many tiles a block mask's list of a tile of queries has that are full, and how many that
    are masked; and pointers to the first ones of both.
    """
    capacity = tl.cdiv(sequence.lengths.N, cfg.BLOCK_N)
    counts, listed = list_row(lists, sequence, h, tile, tiles, capacity)
    return tl.load(counts), tl.load(counts + 1), (listed, listed + capacity - 1)


@triton.jit
def steps_of_queries(lists, sequence, h, tile, tiles, rows, intervals, mask, cfg: tl.constexpr):
    """The KV loop of a tile of queries: how many tiles are full, how many are masked, and their
    ranges or, with a block mask, pointers to their list.
    """
    if cfg.MASK_TILE_M > 0:
        full_count, masked_count, steps = listed_steps(lists, sequence, h, tile, tiles, cfg)
    else:
        first = tile * cfg.BLOCK_M
        last = tl.minimum(first + cfg.BLOCK_M, sequence.M) - 1
        first_start, first_stop = visible_keys(first, sequence, mask, cfg)
        last_start, last_stop = visible_keys(last, sequence, mask, cfg)
        inside, N = rows < sequence.M, sequence.N
        steps = key_ranges(
            first_start, first_stop, last_start, last_stop, intervals, inside, N, cfg
        )
        full_count, masked_count = step_counts(steps, cfg)
    return full_count, masked_count, steps


@triton.jit
def full_tile_of(i, steps, cfg: tl.constexpr):
    """The tile of step `i` over the full tiles."""
    if cfg.MASK_TILE_M > 0:
        tile = tl.load(steps[0] + i)
    else:
        _, full_begin, full_end, _ = steps[0]
        tile = full_begin + i
        if cfg.SPANS > 1:
            count = full_end - full_begin
            tile = tl.where(i < count, tile, steps[1][1] + i - count)
    return tile


@triton.jit
def masked_tile_of(i, steps, cfg: tl.constexpr):
    """The tile of step `i` over the masked tiles."""
    if cfg.MASK_TILE_M > 0:
        tile = tl.load(steps[1] - i)
    else:
        begin, full_begin, full_end, end = steps[0]
        tile = masked_tile(i, begin, full_begin, full_end)
        if cfg.SPANS > 1:
            count = end - begin - (full_end - full_begin)
            begin, full_begin, full_end, _ = steps[1]
            tile = tl.where(i < count, tile, masked_tile(i - count, begin, full_begin, full_end))
    return tile


@triton.jit
def span_kind(m0, m1, n0, n1, data, sequence, h, cfg: tl.constexpr):
    """(any visible, all visible) in the tiles [m0, m1) x [n0, n1), by the spans only. "All" needs
    one interval of every row that holds the whole tile; other tiles are masked.
    """
    SPANS: tl.constexpr = cfg.SPANS
    # (tiles, BLOCK_M)
    rows = m0[:, None] + tl.arange(0, cfg.BLOCK_M)[None, :]
    inside = rows < m1[:, None]
    intervals = load_intervals(data, sequence, h, rows, inside, cfg)
    any_seen = (m0 + n0) < 0
    all_seen = (m0 + n0) < 0
    for r in tl.static_range(SPANS):
        least_start, least_stop, greatest_start, greatest_stop = extremes(
            intervals[r], inside, sequence.N, 1
        )
        any_seen = any_seen | ((least_start < n1) & (greatest_stop > n0))
        all_seen = all_seen | ((greatest_start <= n0) & (least_stop >= n1))
    return any_seen, all_seen


# Lists of tiles: which tiles of a block mask to visit: a compact list for every tile of queries (or
# of keys, for dK and dV).
#
# The tiles of a kernel need not have the size of the block mask's tiles. The block mask and the
# mask rules together make a tile empty, full or partial: empty tiles are in no list, and full tiles
# are not masked.


@triton.jit
def block_mask_kind(m0, m1, n0, n1, kind_offs, mask, cfg: tl.constexpr):
    """(any visible, all visible) in the tiles [m0, m1) x [n0, n1), by the block mask only."""
    ROWS: tl.constexpr = cfg.MASK_COVER_M
    COLUMNS: tl.constexpr = cfg.MASK_COVER_N
    any_seen = (m0 + n0) < 0
    all_seen = (m0 + n0) >= 0
    for i in range(ROWS):
        row = m0 // cfg.MASK_TILE_M + i
        for j in range(COLUMNS):
            column = n0 // cfg.MASK_TILE_N + j
            covered = (row * cfg.MASK_TILE_M < m1) & (column * cfg.MASK_TILE_N < n1)
            inside = covered & (row < mask.rows) & (column < mask.columns)
            kind = tl.load(
                mask.data.kinds + kind_offs + row * mask.columns + column, mask=inside, other=0
            )
            any_seen = any_seen | (kind != 0)
            all_seen = all_seen & ((kind == 1) | (covered == 0))
    return any_seen, all_seen


@kernel(*UNSPECIALISED)
def list_tiles_kernel(
    lists, lengths: Lengths, mask: Mask, cfg: tl.constexpr, IS_BY_KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Write one row of `lists`: the tiles that one tile of queries (IS_BY_KEYS: of keys) visits, in
    ascending order.
    """
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    list_heads = 1 + lists.has_heads * (lengths.heads - 1)
    capacity = tl.cdiv(lengths.M, BLOCK_M) if IS_BY_KEYS else tl.cdiv(lengths.N, BLOCK_N)
    own_tile = tl.program_id(1)
    h = tl.program_id(0) % list_heads
    b = tl.program_id(0) // list_heads
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    sequence = Sequence(b, start_q, M, start_k, N, lengths)
    kind_offs = block_mask_start(mask, lengths, b, h)
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + own_tile
    full_count = own_tile * 0
    masked_count = own_tile * 0
    for chunk in range(0, capacity, CHUNK):
        # (CHUNK,)
        other_tile = chunk + tl.arange(0, CHUNK)
        if IS_BY_KEYS:
            m0 = other_tile * BLOCK_M
            n0 = other_tile * 0 + own_tile * BLOCK_N
        else:
            m0 = other_tile * 0 + own_tile * BLOCK_M
            n0 = other_tile * BLOCK_N
        m1 = tl.minimum(m0 + BLOCK_M, M)
        n1 = tl.minimum(n0 + BLOCK_N, N)
        exists = (m0 < M) & (n0 < N)
        first_start, first_stop = visible_keys(m0, sequence, mask, cfg)
        last_start, last_stop = visible_keys(m1 - 1, sequence, mask, cfg)
        if cfg.MASK_TILE_M > 0:
            any_seen, all_seen = block_mask_kind(m0, m1, n0, n1, kind_offs, mask, cfg)
        else:
            any_seen, all_seen = exists, exists
        if cfg.SPANS > 0:
            any_in_spans, all_in_spans = span_kind(m0, m1, n0, n1, mask.data, sequence, h, cfg)
            any_seen, all_seen = any_seen & any_in_spans, all_seen & all_in_spans
        visited = exists & any_seen & (n1 > first_start) & (n0 < last_stop)
        whole = (m0 + BLOCK_M <= M) & (n0 + BLOCK_N <= N)
        full = visited & all_seen & whole & (last_start <= n0) & (n1 <= first_stop)
        masked = visited & (full == 0)
        full_index = full_count + tl.cumsum(full.to(tl.int32), 0) - 1
        masked_index = capacity - masked_count - tl.cumsum(masked.to(tl.int32), 0)
        tiles = lists.tiles + row * capacity
        tl.store(tiles + full_index, other_tile, mask=full)
        tl.store(tiles + masked_index, other_tile, mask=masked)
        full_count += tl.sum(full.to(tl.int32), 0)
        masked_count += tl.sum(masked.to(tl.int32), 0)
    tl.store(lists.counts + 2 * row, full_count)
    tl.store(lists.counts + 2 * row + 1, masked_count)
