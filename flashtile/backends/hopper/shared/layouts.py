"""Where the elements of a tile lie, in registers and in shared memory.

A consumer is one warpgroup (four warps) with 64 rows of the tile of queries. wgmma fixes what its
threads hold: in an accumulator a thread has two rows and, of every eight columns, two neighbouring
ones; four threads share a row. An accumulator of scores is, rounded to 16 bits, already the left
operand of the next product, which is how P stays in registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CONSUMER_ROWS = gl.constexpr(64)
CONSUMER_WARPS = gl.constexpr(4)


@gluon.constexpr_function
def accumulator(columns):
    """A float32 tile (64, columns) of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def left_operand(columns):
    """A 16-bit left operand of a product that accumulates (64, columns)."""
    return gl.DotOperandLayout(0, accumulator(columns), 2)


@gluon.constexpr_function
def row_values(columns):
    """One value a row of `accumulator`, (64,)."""
    return gl.SliceLayout(1, accumulator(columns))


@gluon.constexpr_function
def rows_of_heads(columns, warps):
    """16-bit rows as memory likes them: 16 bytes a thread, neighbours side by side."""
    across = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def one_value(warps):
    """A tensor of one element, held by every thread."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def shared_rows(columns):
    """A tile (1, rows, 1, columns) of 16-bit head rows that TMA writes and wgmma
    reads."""
    return gl.NVMMASharedLayout(min(128, 2 * columns), element_bitwidth=16, rank=4)


@gluon.constexpr_function
def shared_value():
    """A tensor of one element in shared memory."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0])
