"""Where queries and keys stand in their sequence, when the tensors hold only parts of it.

The positions of `flashtile.masks` on the GPU: a few runs describe the positions of a sequence's
rows, which increase from row to row. What a query sees is therefore an interval of rows of k, and
kernels compute it once for each tile; their loops over tiles know rows only. Without runs
(`cfg.RUNS` is 0) query i stands at i + N - M and key j at j, which costs nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arguments import Corners


@triton.jit
def query_positions(rows, positions, cfg: tl.constexpr):
    """The positions of the queries `rows`, of any shape."""
    if cfg.RUNS > 0:
        p = positions_of(rows, runs_of(positions.at.q_runs, positions.b, cfg), cfg)
    else:
        p = rows + positions.shift
    return p


@triton.jit
def key_positions(keys, positions, cfg: tl.constexpr):
    """The positions of `keys`, of any shape."""
    if cfg.RUNS > 0:
        j = positions_of(keys, runs_of(positions.at.k_runs, positions.b, cfg), cfg)
    else:
        j = keys
    return j


@triton.jit
def queries_before(p, positions, M, cfg: tl.constexpr):
    """The first query row at position `p` or later. May be outside of [0, M] without runs."""
    if cfg.RUNS > 0:
        row = rows_before(p, runs_of(positions.at.q_runs, positions.b, cfg), M, cfg)
    else:
        row = p - positions.shift
    return row


@triton.jit
def keys_before(p, positions, N, cfg: tl.constexpr):
    """The first key at position `p` or later. May be outside of [0, N] without runs."""
    if cfg.RUNS > 0:
        key = rows_before(p, runs_of(positions.at.k_runs, positions.b, cfg), N, cfg)
    else:
        key = p
    return key


@triton.jit
def indices_of_queries(b, h, rows, positions, cfg: tl.constexpr):
    """The indices of a sequence, heads and queries in the whole call, which dropout and score
    functions use."""
    if positions.at.numbers is not None:
        shift = tl.load(positions.at.numbers + 2 * b + 1)
        queries = query_positions(rows, positions, cfg) - shift
        b = tl.load(positions.at.numbers + 2 * b)
        h = h + positions.at.first_head
    elif cfg.RUNS > 0:
        queries = query_positions(rows, positions, cfg) - positions.shift
    else:
        queries = rows
    return b, h, queries


@triton.jit
def indices_of_scores(b, h, rows, keys, positions, cfg: tl.constexpr):
    """`indices_of_queries` with keys: what a score function gets beside the score."""
    b, h, queries = indices_of_queries(b, h, rows, positions, cfg)
    return b, h, queries, key_positions(keys, positions, cfg)


@triton.jit
def corners_of_scores(b, h, corners, positions, cfg: tl.constexpr):
    """The least and the greatest index of a tile's queries and keys, as `indices_of_scores` numbers
    them."""
    _, _, first_row, first_key = indices_of_scores(
        b, h, corners.first_row, corners.first_key, positions, cfg
    )
    _, _, last_row, last_key = indices_of_scores(
        b, h, corners.last_row, corners.last_key, positions, cfg
    )
    return Corners(first_row, last_row, first_key, last_key)


@triton.jit
def runs_of(runs_ptr, b, cfg: tl.constexpr):
    """The runs of sequence `b`: `cfg.RUNS` pairs of first row and position."""
    return runs_ptr + b.to(tl.int64) * (2 * cfg.RUNS)


@triton.jit
def positions_of(rows, runs_ptr, cfg: tl.constexpr):
    """`Positions.at`; the first run begins at row 0, and unused ones after the last row."""
    RUNS: tl.constexpr = cfg.RUNS
    p = rows + tl.load(runs_ptr + 1)
    for run in tl.static_range(1, RUNS):
        first = tl.load(runs_ptr + 2 * run)
        p = tl.where(rows >= first, rows - first + tl.load(runs_ptr + 2 * run + 1), p)
    return p


@triton.jit
def rows_before(p, runs_ptr, count, cfg: tl.constexpr):
    """`Positions.below`, for a sequence of `count` rows."""
    RUNS: tl.constexpr = cfg.RUNS
    total = p * 0
    for run in tl.static_range(RUNS):
        stop = count
        if run + 1 < RUNS:
            stop = tl.minimum(tl.load(runs_ptr + 2 * run + 2), count)
        length = tl.maximum(stop - tl.load(runs_ptr + 2 * run), 0)
        total += tl.minimum(tl.maximum(p - tl.load(runs_ptr + 2 * run + 1), 0), length)
    return total
