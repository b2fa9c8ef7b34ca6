"""Which scores of a consumer's block dropout keeps.

`flashtile.dropout` draws one Philox block for four neighbouring keys. Two threads have the scores
of such a group in the forward, where rows are queries, and four threads in the backward, where rows
are keys. Each of them draws its share of the groups, and the threads exchange the results, one bit
for each score: by shuffles in the forward, through shared memory in the backward.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....gpu.dropout import dropout_key, philox_block
from .intrinsics import aggregate


class Dropout(NamedTuple):
    """The random numbers of a call, None without dropout, and the scores that it keeps."""

    rng_ptr: Any  # seed and offset
    last_kept: Any  # the largest word that is kept
    scale: Any = None  # 1 / (1 - p)


@aggregate
class Draws:
    """What decides which scores of one head are kept."""

    key: gl.tensor
    last_kept: gl.tensor
    b: gl.tensor
    h: gl.tensor

    @gluon.constexpr_function
    def __init__(self, key, last_kept, b, h):
        self.key = key
        self.last_kept = last_kept
        self.b = b
        self.h = h


@gluon.jit
def draws_of(b, h, dropout, cfg: gl.constexpr):
    """The draws of a head; numbers that nobody reads without dropout."""
    key, last_kept = b, b
    if cfg.HAS_DROPOUT:
        key = dropout_key(dropout.rng_ptr)
        last_kept = dropout.last_kept.to(gl.uint32, bitcast=True)
    return Draws(key, last_kept, b, h)


# The forward: rows are queries. A thread has two rows and, of every eight keys, two neighbours, so
# it shares the groups of four of both rows with one other thread. Each of them draws those of one
# row.


@gluon.constexpr_function
def groups_of_rows(columns):
    """The layout of groups of four keys, (64 rows, eights, halves of an eight)."""
    eights = [[0, 1 << n, 0] for n in range((columns // 8).bit_length() - 1)]
    lanes = [[8, 0, 0], [0, 0, 1], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout(eights, lanes, warps, [], [64, columns // 8, 2])


@gluon.jit
def kept_keys(m0, n0, draws, COLUMNS: gl.constexpr):
    """The bits of the scores of the 64 queries from `m0` and the keys from `n0`, a multiple of
    four: int32 (64, 4). Word w has the bits 2n and 2n + 1 for the keys 8n + 2w and 8n + 2w + 1.
    """
    gl.static_assert(COLUMNS <= 128)
    LAYOUT: gl.constexpr = groups_of_rows(COLUMNS)
    EIGHTS: gl.constexpr = COLUMNS // 8
    row = m0 + gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    eight = gl.arange(0, EIGHTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    group = n0 // 4 + 2 * eight[None, :, None] + half[None, None, :]
    w0, w1, w2, w3 = philox_block(draws.key, draws.b, draws.h, row[:, None, None], group)
    last = draws.last_kept
    first = (w0 <= last).to(gl.int32) | ((w1 <= last).to(gl.int32) << 1)
    second = (w2 <= last).to(gl.int32) | ((w3 <= last).to(gl.int32) << 1)
    shift = (2 * eight)[None, :, None]
    first, second = gl.sum(first << shift, 1), gl.sum(second << shift, 1)
    return gl.join(first, second).reshape([64, 4])


@gluon.jit
def dropped(p, kept):
    """Zero where the bit of a weight (`kept_keys`) is 0."""
    COLUMNS: gl.constexpr = p.shape[1]
    EIGHTS: gl.constexpr = COLUMNS // 8
    by_eights = p.reshape([64, EIGHTS, 4, 2])
    LAYOUT: gl.constexpr = by_eights.type.layout
    WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    OF_EIGHTS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    OF_PAIRS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    eight = gl.arange(0, EIGHTS, layout=OF_EIGHTS)
    column = gl.arange(0, 2, layout=OF_PAIRS)
    bit = 2 * eight[None, :, None, None] + column[None, None, None, :]
    word = gl.convert_layout(kept, WORDS)[:, None, :, None]
    by_eights = gl.where(((word >> bit) & 1) != 0, by_eights, 0.0)
    return gl.convert_layout(by_eights.reshape(p.shape), p.type.layout, assert_trivial=True)


# The backward: rows are keys. A thread has two rows and, of every eight queries, two neighbours.
# Four threads share the groups of four of these rows and queries; each draws those of one row and
# one query of every eight.


@gluon.constexpr_function
def groups_of_columns(columns):
    """The layout of groups of four keys, (16 groups, eights of queries, queries of an eight)."""
    eights = [[0, 1 << n, 0] for n in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 0, 2], [0, 0, 4], [2, 0, 0], [0, 0, 1], [1, 0, 0]]
    warps = [[4, 0, 0], [8, 0, 0]]
    return gl.DistributedLinearLayout(eights, lanes, warps, [], [16, columns // 8, 8])


@gluon.jit
def kept_queries(m0, n0, draws, COLUMNS: gl.constexpr):
    """The bits of the scores of the 64 keys from `n0`, a multiple of four, and the queries from
    `m0`: int8 (64, 8). Byte c has the bit n for the query 8n + c.
    """
    gl.static_assert(COLUMNS <= 64)
    LAYOUT: gl.constexpr = groups_of_columns(COLUMNS)
    EIGHTS: gl.constexpr = COLUMNS // 8
    group = n0 // 4 + gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    eight = gl.arange(0, EIGHTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    row = m0 + 8 * eight[None, :, None] + column[None, None, :]
    w0, w1, w2, w3 = philox_block(draws.key, draws.b, draws.h, row, group[:, None, None])
    last, shift = draws.last_kept, eight[None, :, None]
    k0 = gl.sum((w0 <= last).to(gl.int32) << shift, 1)
    k1 = gl.sum((w1 <= last).to(gl.int32) << shift, 1)
    k2 = gl.sum((w2 <= last).to(gl.int32) << shift, 1)
    k3 = gl.sum((w3 <= last).to(gl.int32) << shift, 1)
    # In 8 bits: the exchange needs shared memory.
    even = gl.join(k0.to(gl.int8), k2.to(gl.int8))
    odd = gl.join(k1.to(gl.int8), k3.to(gl.int8))
    kept = gl.join(even, odd).reshape([16, 8, 4])
    return kept.permute((0, 2, 1)).reshape([64, 8])


@gluon.jit
def negative_where_dropped(p, kept):
    """P with a negative sign where its bit (`kept_queries`) is 0."""
    COLUMNS: gl.constexpr = p.shape[1]
    EIGHTS: gl.constexpr = COLUMNS // 8
    by_eights = p.reshape([64, EIGHTS, 8])
    LAYOUT: gl.constexpr = by_eights.type.layout
    eight = gl.arange(0, EIGHTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    word = gl.convert_layout(kept, gl.SliceLayout(1, LAYOUT)).to(gl.int32)[:, None, :]
    is_kept = ((word >> eight[None, :, None]) & 1) != 0
    by_eights = gl.where(is_kept, by_eights, -by_eights)
    return gl.convert_layout(by_eights.reshape(p.shape), p.type.layout, assert_trivial=True)
