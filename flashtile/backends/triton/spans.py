"""Masks as spans: a query sees the union of a few intervals of keys (`flashtile.masks.Spans`).

A tile of queries reads the intervals of its rows once. Their extremes bound the tiles of keys that
some row sees, and those that all rows see, which are not masked. So no list of tiles is needed, and
the hole between two intervals is skipped. A tile of keys is seen by queries at any positions, so dK
and dV visit the tiles of a list (`block_lists.py`).

Without spans (`cfg.SPANS` is 0), nothing here costs anything.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import masked_tile, tile_phases


@triton.jit
def load_intervals(data, b, h, start_q, rows, inside, N, cfg: tl.constexpr):
    """((starts, stops), ...) of the queries `rows`, of any shape, which begin at row `start_q` of
    the tensors: within [0, N], and (N, 0) for empty intervals and for rows that are not `inside`.
    """
    SPANS: tl.constexpr = cfg.SPANS
    intervals = ()
    if SPANS > 0:
        b, h, row = b.to(tl.int64), h.to(tl.int64), (start_q + rows).to(tl.int64)
        starts = data.starts + b * data.starts_batch + h * data.starts_head
        starts += row * data.starts_row
        stops = data.stops + b * data.stops_batch + h * data.stops_head
        stops += row * data.stops_row
        for r in tl.static_range(SPANS):
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
        ranges = (tile_phases(first_start, first_stop, last_start, last_stop, BLOCK_N),)
    else:
        a, b, c, d = extremes(intervals[0], inside, N, None)
        first = tile_phases(
            tl.maximum(first_start, a), tl.minimum(first_stop, b),
            tl.maximum(last_start, c), tl.minimum(last_stop, d), BLOCK_N,
        )  # fmt: skip
        ranges = (first,)
        if SPANS > 1:
            a, b, c, d = extremes(intervals[1], inside, N, None)
            for r in tl.static_range(2, SPANS):
                least, _, _, greatest = extremes(intervals[r], inside, N, None)
                a = tl.minimum(a, least)
                d = tl.maximum(d, greatest)
            second = tile_phases(
                tl.maximum(first_start, a), tl.minimum(first_stop, b),
                tl.maximum(last_start, c), tl.minimum(last_stop, d), BLOCK_N,
            )  # fmt: skip
            is_behind = second[0] >= first[0]
            ranges = (  # type: ignore[assignment]  # a tuple of a length that cfg decides
                from_tile(first, tl.where(is_behind, 0, second[3])),
                from_tile(second, tl.where(is_behind, first[3], 0)),
            )
    return ranges


@triton.jit
def from_tile(phases, tile):
    """The part of a range of tiles that begins at `tile` or later."""
    begin, full_begin, full_end, end = phases
    return (
        tl.maximum(begin, tile),
        tl.maximum(full_begin, tile),
        tl.maximum(full_end, tile),
        tl.maximum(end, tile),
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
def full_tile_of(i, ranges, cfg: tl.constexpr):
    """The tile of step `i` over the full tiles."""
    _, full_begin, full_end, _ = ranges[0]
    tile = full_begin + i
    if cfg.SPANS > 1:
        count = full_end - full_begin
        tile = tl.where(i < count, tile, ranges[1][1] + i - count)
    return tile


@triton.jit
def masked_tile_of(i, ranges, cfg: tl.constexpr):
    """The tile of step `i` over the masked tiles."""
    begin, full_begin, full_end, end = ranges[0]
    tile = masked_tile(i, begin, full_begin, full_end)
    if cfg.SPANS > 1:
        count = end - begin - (full_end - full_begin)
        begin, full_begin, full_end, _ = ranges[1]
        tile = tl.where(i < count, tile, masked_tile(i - count, begin, full_begin, full_end))
    return tile


@triton.jit
def span_kind(m0, m1, n0, n1, data, b, h, start_q, N, cfg: tl.constexpr):
    """(any visible, all visible) in the tiles [m0, m1) x [n0, n1), by the spans only. "All" needs
    one interval of every row that holds the whole tile; other tiles are masked.
    """
    SPANS: tl.constexpr = cfg.SPANS
    # (tiles, BLOCK_M)
    rows = m0[:, None] + tl.arange(0, cfg.BLOCK_M)[None, :]
    inside = rows < m1[:, None]
    intervals = load_intervals(data, b, h, start_q, rows, inside, N, cfg)
    any_seen = (m0 + n0) < 0
    all_seen = (m0 + n0) < 0
    for r in tl.static_range(SPANS):
        least_start, least_stop, greatest_start, greatest_stop = extremes(
            intervals[r], inside, N, 1
        )
        any_seen = any_seen | ((least_start < n1) & (greatest_stop > n0))
        all_seen = all_seen | ((greatest_start <= n0) & (least_stop >= n1))
    return any_seen, all_seen
