"""Where queries and keys stand in their sequence, when the tensors hold only parts of it.

`flashtile.positions` on the GPU: a few runs describe the positions of a sequence's rows, which
increase from row to row. What a query sees is therefore an interval of rows of k, and the rows that
see a key are an interval of rows of q. They are computed once for each tile, before its loop, which
knows rows only. Without runs (cfg.RUNS is 0) query i stands at i + N - M and key j at j, which
costs nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def query_positions(rows, p, b, mask, cfg: gl.constexpr):
    """The positions of the queries `rows`, a number or several; `p` without runs."""
    if cfg.RUNS > 0:
        p = positions_of(rows, runs_of(mask.q_runs, b, cfg), cfg)
    return p


@gluon.jit
def key_positions(keys, b, mask, cfg: gl.constexpr):
    """The positions of `keys`."""
    p = keys
    if cfg.RUNS > 0:
        p = positions_of(keys, runs_of(mask.k_runs, b, cfg), cfg)
    return p


@gluon.jit
def queries_before(p, b, M, shift, mask, cfg: gl.constexpr):
    """The first query at position `p` or later; without runs, row 0 is at `shift`, and the query
    may be outside of [0, M].
    """
    if cfg.RUNS > 0:
        row = rows_before(p, runs_of(mask.q_runs, b, cfg), M, cfg)
    else:
        row = p - shift
    return row


@gluon.jit
def queries_between(p, size, b, M, shift, mask, cfg: gl.constexpr):
    """The queries [start, stop) at the positions [p, p + size), as `queries_before`."""
    start = queries_before(p, b, M, shift, mask, cfg)
    if cfg.RUNS > 0:
        stop = queries_before(p + size, b, M, shift, mask, cfg)
    else:
        stop = start + size
    return start, stop


@gluon.jit
def keys_before(p, b, N, mask, cfg: gl.constexpr):
    """The first key at position `p` or later; without runs, it may be outside of [0, N]."""
    key = p
    if cfg.RUNS > 0:
        key = rows_before(p, runs_of(mask.k_runs, b, cfg), N, cfg)
    return key


@gluon.jit
def runs_of(runs_ptr, b, cfg: gl.constexpr):
    """The runs of sequence `b`: cfg.RUNS pairs of first row and position."""
    return runs_ptr + b * (2 * cfg.RUNS)


@gluon.jit
def positions_of(rows, runs_ptr, cfg: gl.constexpr):
    """`Positions.at`; the first run begins at row 0, and unused ones after every row."""
    RUNS: gl.constexpr = cfg.RUNS
    p = rows + gl.load(runs_ptr + 1)
    for run in gl.static_range(1, RUNS):
        first = gl.load(runs_ptr + 2 * run)
        p = gl.where(rows >= first, rows - first + gl.load(runs_ptr + 2 * run + 1), p)
    return p


@gluon.jit
def rows_before(p, runs_ptr, count, cfg: gl.constexpr):
    """`Positions.below`, for a sequence of `count` rows."""
    RUNS: gl.constexpr = cfg.RUNS
    total = p * 0
    for run in gl.static_range(RUNS):
        stop = count
        if run + 1 < RUNS:
            stop = gl.minimum(gl.load(runs_ptr + 2 * run + 2), count)
        length = gl.maximum(stop - gl.load(runs_ptr + 2 * run), 0)
        inside = gl.maximum(p - gl.load(runs_ptr + 2 * run + 1), 0)
        total += gl.minimum(inside, length)
    return total
