"""Keys that no query of their sequence sees, and queries that see no key, may hold anything.

Their weight is zero, but zero times NaN is NaN. So their rows in shared memory are zeroed before a
product sums over them: in the forward those of V, in the backward those of K, V, Q and dO. Rows
past the end of a packed sequence, which belong to another one or to none, are cleared likewise.
Consumers that share a tile write the same values, so they need not wait for each other.

The mask rules hide the first keys of a sequence, or its first queries see nothing. A block mask and
spans may hide any key: before the kernel, each key gets a mark. A query that sees no key has the
log-sum-exp +inf in the backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .... import block_tiles
from .intrinsics import (
    CONSUMER_WARPS,
    opaque_zero,
    recast,
    rows_of_heads,
    shared_rows,
    shared_value,
)

SPARE_MARKS = gl.constexpr(block_tiles.SPARE_MARKS)


class Kept(NamedTuple):
    """The rows of a tile that are not cleared. A constant KIND says which they are:

    - "stop": those before `stop`;
    - "range": those of [first, stop);
    - "marks": those before `stop` whose mark, an int32 at the pointer `by`, is 0;
    - "lse": those before `stop` whose log-sum-exp, in `by` (1, rows) in shared memory, is not +inf.
    """

    first: Any
    stop: Any
    by: Any


@gluon.constexpr_function
def kind_of_keys(cfg):
    """How a kernel knows the keys that some query sees."""
    kind = "stop"
    if cfg.HAS_HIDDEN_KEYS:
        kind = "marks" if cfg.HAS_LISTS or getattr(cfg, "HAS_SPAN", False) else "range"
    return kind


@gluon.constexpr_function
def kind_of_rows(cfg):
    """How the backward knows the queries that see some key."""
    kind = "stop"
    if cfg.HAS_DEAD_ROWS:
        kind = "lse" if cfg.HAS_LISTS else "range"
    return kind


@gluon.constexpr_function
def every_warp(rows):
    """One number for each row, all of them in each warp: a reduction needs no shared memory."""
    return gl.BlockedLayout([rows // 32], [32], [4], [0])


@gluon.jit
def has_cleared(kept, KIND: gl.constexpr, ROWS: gl.constexpr):
    """Whether some of ROWS rows are cleared."""
    found = kept.stop < ROWS
    if KIND == "range":
        found = found | (kept.first > 0)
    elif KIND == "marks":
        row = gl.arange(0, ROWS, layout=every_warp(ROWS))
        found = found | (gl.max(gl.load(kept.by + row), 0) > 0)
    elif KIND == "lse":
        found = found | (gl.max(numbers(kept.by, ROWS).load(every_warp(ROWS)), 0) == float("inf"))
    return found


@gluon.jit
def numbers(slot, ROWS: gl.constexpr):
    """Statistics (1, ROWS) in shared memory as (ROWS,)."""
    return recast(slot, gl.float32, [ROWS], shared_value())


@gluon.jit
def is_kept(i, kept, KIND: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Which of the COUNT rows from `i * COUNT` on are kept."""
    row = i * COUNT + gl.arange(0, COUNT, layout=LAYOUT)
    keep = row < kept.stop
    if KIND == "range":
        keep = keep & (row >= kept.first)
    elif KIND == "marks":
        keep = keep & (gl.load(kept.by + row) == 0)
    elif KIND == "lse":
        shape: gl.constexpr = [kept.by.shape[1] // COUNT, COUNT]
        lse = recast(kept.by, gl.float32, shape, shared_value()).index(i).load(LAYOUT)
        keep = keep & (lse < float("inf"))
    return keep


@gluon.jit
def clear_rows(x, kept, KIND: gl.constexpr, IS_UNROLLED: gl.constexpr = False):
    """Zero the rows of the tile `x` (rows, columns) that are not kept.

    Unless the loop IS_UNROLLED, the compiler does not know its length: registers for many rows at
    once would make the loop over blocks spill, although few blocks need them.
    """
    WIDTH: gl.constexpr = x.shape[1] if x.shape[1] < 64 else 64
    LAYOUT: gl.constexpr = rows_of_heads(WIDTH, CONSUMER_WARPS)
    COUNT: gl.constexpr = 1024 // WIDTH  # rows at a time: 16 bytes for each thread
    PARTS: gl.constexpr = x.shape[0] // COUNT
    PIECES: gl.constexpr = x.shape[1] // WIDTH
    SHARED: gl.constexpr = shared_rows(WIDTH, rank=2)
    # Shared memory has 64 columns of all rows, then the next ones.
    pieces = recast(x, x.dtype, [PIECES, x.shape[0], WIDTH], SHARED)
    first = 0 if IS_UNROLLED else opaque_zero(kept.stop)
    for i in range(first, PARTS * PIECES):
        parts = recast(pieces.index(i // PARTS), x.dtype, [PARTS, COUNT, WIDTH], SHARED)
        part = parts.index(i % PARTS)
        old = part.load(LAYOUT)
        keep = is_kept(i % PARTS, kept, KIND, COUNT, gl.SliceLayout(1, LAYOUT))
        part.store(gl.where(keep[:, None], old, gl.zeros_like(old)))


@gluon.jit
def clear_numbers(slot, kept, KIND: gl.constexpr, ROWS: gl.constexpr):
    """Zero the statistics of the rows that are not kept."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [CONSUMER_WARPS], [0])
    own = numbers(slot, ROWS)
    old = own.load(LAYOUT)
    keep = is_kept(0, kept, KIND, ROWS, LAYOUT)
    own.store(gl.where(keep, old, gl.zeros_like(old)))
