"""Which scores of a consumer's block dropout keeps.

A Philox block has the random numbers of 16 scores (`flashtile.dropout`). In the forward, where rows
are queries, one thread has all of them. In the backward, where rows are keys, two threads of each
warp have two of them each: the threads divide the blocks among themselves and exchange one bit for
each score through shared memory.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....gpu.dropout import BLOCK_KEYS, LOWER_BITS, dropout_key, random_words
from .intrinsics import aggregate


class Dropout(NamedTuple):
    """The random numbers of a call, None without dropout, and the scores that it keeps."""

    rng_ptr: Any  # seed and offset
    first_kept: Any  # the least number that is kept
    scale: Any = None  # 1 / `dropout.keep_rate`


@aggregate
class Draws:
    """What decides which scores of one head are kept."""

    key: gl.tensor
    first_kept: gl.tensor  # in both halves
    b: gl.tensor
    h: gl.tensor

    @gluon.constexpr_function
    def __init__(self, key, first_kept, b, h):
        self.key = key
        self.first_kept = first_kept
        self.b = b
        self.h = h


@gluon.jit
def draws_of(b, h, dropout, cfg: gl.constexpr):
    """The draws of a head; numbers that nobody reads without dropout."""
    key, first_kept = b, b
    if cfg.HAS_DROPOUT:
        key = dropout_key(dropout.rng_ptr)
        first_kept = dropout.first_kept * 0x10001
    return Draws(key, first_kept, b, h)


@gluon.constexpr_function
def _comparison(BITS, IS_ODD):
    """Assembly: in which halves of $0 the numbers of two neighbouring scores are at least those of
    $3. The numbers are two bytes of the word $1 or, of 16 bits, these bytes and those of $2.

    As float16, numbers of 8 bits are subnormal, and those of 16 bits may be anything until the
    minimum with $3.
    """
    if BITS == 8:
        numbers = f"prmt.b32 numbers, $1, 0, {('0x4140', '0x4342')[IS_ODD]};"
    else:
        numbers = f"prmt.b32 numbers, $1, $2, {('0x1504', '0x3726')[IS_ODD]};"
        numbers += " min.u16x2 numbers, numbers, $3;"
    return f"{{ .reg .b32 numbers; {numbers} set.ge.u32.f16x2 $0, numbers, $3; }}"


@gluon.jit
def kept_pairs(draws, queries, groups, BITS: gl.constexpr):
    """For the Philox blocks of `queries` and `groups`, of shape (...), which scores are kept: int32
    (..., 2, 2, 2), a pair of neighbouring keys of each of eight eights, a half for each key with
    all its bits 1 or 0.
    """
    words = random_words(draws.key, draws.b, draws.h, queries, groups)
    lower = words
    if BITS == 16:
        lower = random_words(draws.key, draws.b, draws.h, queries, groups + LOWER_BITS)
    EVEN: gl.constexpr = _comparison(BITS, False)
    ODD: gl.constexpr = _comparison(BITS, True)
    operands = [words, lower, draws.first_kept]
    even = gl.inline_asm_elementwise(
        EVEN, "=r,r,r,r", operands, dtype=gl.int32, is_pure=True, pack=1
    )
    odd = gl.inline_asm_elementwise(ODD, "=r,r,r,r", operands, dtype=gl.int32, is_pure=True, pack=1)
    return gl.join(even, odd)


# The forward: rows are queries. A thread has two rows and, of every eight keys, two neighbours.


@gluon.constexpr_function
def blocks_of_rows(blocks):
    """The layout of Philox blocks, (64 rows, blocks of keys, pairs of every eight keys)."""
    registers = [[8, 0, 0], *([0, 1 << n, 0] for n in range(blocks.bit_length() - 1))]
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, blocks, 4]
    )


@gluon.jit
def kept_keys(m0, n0, draws, COLUMNS: gl.constexpr, BITS: gl.constexpr):
    """Which scores of the 64 queries from `m0` and the keys from `n0`, a multiple of 64, are kept:
    int32 (64, COLUMNS / 2), halves as in `kept_pairs`.
    """
    BLOCKS: gl.constexpr = COLUMNS // BLOCK_KEYS
    LAYOUT: gl.constexpr = blocks_of_rows(BLOCKS)
    row = m0 + gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    group = n0 // BLOCK_KEYS * 4 + 4 * block[None, :, None] + pair[None, None, :]
    kept = kept_pairs(draws, row[:, None, None], group, BITS)
    return kept.permute((0, 1, 3, 4, 5, 2)).reshape([64, COLUMNS // 2])


@gluon.jit
def dropped(pairs, kept):
    """`paired` weights, zero where `kept_keys` is."""
    return pairs & gl.convert_layout(kept, pairs.type.layout, assert_trivial=True)


# The backward: rows are keys. A thread has two rows and, of every eight queries, two neighbours. It
# draws the Philox blocks of one pair of keys and two neighbouring queries.


@gluon.constexpr_function
def blocks_of_columns(columns):
    """The layout of Philox blocks, (pairs of every eight keys, pairs of queries, queries)."""
    lanes = [[0, 1 << n, 0] for n in range(5)]
    return gl.DistributedLinearLayout(
        [[0, 0, 1]], lanes, [[1, 0, 0], [2, 0, 0]], [], [4, columns // 2, 2]
    )


@gluon.jit
def kept_queries(m0, n0, draws, COLUMNS: gl.constexpr, BITS: gl.constexpr):
    """The bits of the scores of the 64 keys from `n0`, a multiple of 64, and the queries from `m0`:
    int32 (4, COLUMNS / 2), of a pair of every eight keys and a pair of queries. Bit 16k + 8q + e is
    1 if key k of the pair in the e-th eight is kept for query q of the other.
    """
    gl.static_assert(COLUMNS == 64)
    LAYOUT: gl.constexpr = blocks_of_columns(COLUMNS)
    pair = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    two = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    query = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    row = m0 + 2 * two[None, :, None] + query[None, None, :]
    group = n0 // BLOCK_KEYS * 4 + pair[:, None, None]
    kept = kept_pairs(draws, row, group, BITS).reshape([4, COLUMNS // 2, 16])
    BIT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, kept.type.layout))
    bit = 0x10001 << gl.arange(0, 16, layout=BIT)
    return gl.xor_sum(kept & bit[None, None, :], 2)


@gluon.constexpr_function
def words_of(LAYOUT):
    """The layout of shifted words, (4 warps, 4 pairs, 2 keys, columns / 2), from LAYOUT, that of
    scores, (4 warps, 2 eights of a warp, 4 pairs, 2 keys, columns / 2, 2 queries).
    """
    return gl.SliceLayout(1, gl.SliceLayout(5, LAYOUT))


@gluon.jit
def negative_where_dropped(p, kept):
    """P with a negative sign where its bit (`kept_queries`) is 0.

    A thread shifts its words once, so that the bits that it tests are constants.
    """
    COLUMNS: gl.constexpr = p.shape[1]
    by_pairs = p.reshape([4, 2, 4, 2, COLUMNS // 2, 2])
    LAYOUT: gl.constexpr = by_pairs.type.layout
    SHIFTED: gl.constexpr = words_of(LAYOUT)
    WORDS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, SHIFTED))
    OF_KEYS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, SHIFTED))
    OF_BITS: gl.constexpr = gl.SliceLayout(
        0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, LAYOUT)))
    )
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, OF_KEYS))
    key = gl.arange(0, 2, layout=gl.SliceLayout(0, OF_KEYS))
    shift = (2 * warp[:, None] + 16 * key[None, :])[:, None, :, None]
    words = gl.convert_layout(kept, WORDS)[None, :, None, :] >> shift
    eight = gl.arange(0, 2, layout=gl.SliceLayout(1, OF_BITS))
    query = gl.arange(0, 2, layout=gl.SliceLayout(0, OF_BITS))
    bit = 1 << (eight[:, None] + 8 * query[None, :])
    is_kept = (words[:, None, :, :, :, None] & bit[None, :, None, None, None, :]) != 0
    by_pairs = gl.where(is_kept, by_pairs, -by_pairs)
    return gl.convert_layout(by_pairs.reshape(p.shape), p.type.layout, assert_trivial=True)
