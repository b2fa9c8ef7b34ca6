"""Where the elements of float8 tiles lie.

The left operand of a float8 product and the accumulator of the product before it do not agree: of
16 columns a thread has 2t, 2t + 1, 2t + 8 and 2t + 9 as accumulator, and 4t to 4t + 3 as operand.
Keys are therefore laid down in shared memory so that the former columns of S belong to the latter
keys. TMA does that: it takes 16 rows of K as (a, t, b), row 2a + 4t + b, in this order.
Then a thread's weights already are its part of P, with the keys of V in their own order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Rows of K that are laid down together, as groups of (2, 4, 2).
KEY_GROUP = gl.constexpr(16)


@gluon.constexpr_function
def accumulator8(columns):
    """A float32 tile (64, columns) of one warpgroup that products of float8 numbers add to."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.constexpr_function
def left_operand8(columns):
    """A float8 left operand of a product that accumulates (64, columns)."""
    return gl.DotOperandLayout(0, accumulator8(columns), 4)


@gluon.constexpr_function
def row_values8(columns):
    """One value a row of `accumulator8`, (64,)."""
    return gl.SliceLayout(1, accumulator8(columns))


@gluon.constexpr_function
def shared_rows8(columns, rank):
    """A tile of float8 rows of `columns` that TMA writes and wgmma reads."""
    return gl.NVMMASharedLayout(min(128, columns), element_bitwidth=8, rank=rank)


@gluon.constexpr_function
def bytes_of_values(warps):
    """Float8 rows of 128 keys as threads like them: 16 bytes each, neighbours side by side."""
    return gl.BlockedLayout([1, 16], [4, 8], [warps, 1], [1, 0])
