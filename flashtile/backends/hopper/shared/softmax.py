"""Online softmax on a block of scores, which a consumer computes between its two products, and
dropout.

A block of scores is (64, BLOCK_N). Scores, maxima and the log-sum-exp are in base 2 (suffix
`_log2`), because the hardware's exponential is 2**x. A row sum is kept as four partial sums, one in
each thread that shares the row, (64, 4), until the end of the tile.
"""

from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....gpu.dropout import BLOCK_KEYS, LOWER_BITS, dropout_key, random_words
from ....gpu.intrinsics import tanh_of_scores
from ....gpu.score_source import Corners
from .pipeline import (
    aggregate,
    empty_accumulator,
    halves,
    left_operand,
    multiply_unless_one,
    round_to_pair,
    row_values,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

# Lazy row max: the maximum of a row rises only when a score exceeds it by more than this, in base
# 2. Weights are then at most 2**8, well within float16, and their relative rounding errors are the
# same.
SLACK_LOG2 = gl.constexpr(8.0)

# An exponent whose power of two is 0, and whose product with 0 is 0, too.
NO_WEIGHT = gl.constexpr(-1000.0)


class Pointers(NamedTuple):
    """Optional tensors of a call."""

    alibi_slopes: Tensor | None
    sink: Tensor | None
    rng_state: Tensor | None  # with dropout
    # What a score function captures: (n,) float32 or float64, and (n,) int64.
    captured: Tensor | None = None
    captured_integers: Tensor | None = None
    # With HAS_STATISTICS, results shaped as the log-sum-exp.
    largest: Tensor | None = None
    entropy: Tensor | None = None


class Score(NamedTuple):
    """The rule that turns a product into a score in base 2, the sink, an additional score, and
    which probabilities are dropped.
    """

    scale: Any
    softcap: Any
    alibi_ptr: Any
    alibi_batch: Any
    sink_ptr: Any
    dropout: Any  # `dropout.Dropout`, or None
    captured: Any = None  # as in `Pointers`
    captured_integers: Any = None


@gluon.jit
def scores_log2(s, place, shift, slope, score, cfg: gl.constexpr):
    """Scores in base 2 from q k^T, up to the factor `linear_scale`: scale, then softcap, then a
    score function, then ALiBi. `place`: `Place`; `shift`: position of row 0, as key.
    """
    # The shape of `s`: (64, columns).
    if cfg.HAS_SOFTCAP:
        s = tanh_of_scores(s * (score.scale / score.softcap))
    if cfg.SCORE_MOD is not None:
        s = modified(s * last_scale(score, cfg), place, shift, score, False, cfg)
    if cfg.HAS_ALIBI:
        s = with_alibi(s * last_factor(score, cfg), slope, place, shift, False)
    elif not leaves_factor(cfg):  # the scale may be negative
        s = s * last_factor(score, cfg)
    return s


@gluon.constexpr_function
def leaves_factor(cfg):
    """Whether `scores_log2` leaves its last factor, which is positive, to the exponential."""
    is_positive = cfg.HAS_SOFTCAP or cfg.IS_LINEAR or cfg.SCORE_MOD is not None
    return is_positive and not cfg.HAS_ALIBI


@gluon.jit
def last_scale(score, cfg: gl.constexpr):
    """The factor of a score's product, or of its tanh."""
    return score.softcap if cfg.HAS_SOFTCAP else score.scale


@gluon.jit
def last_factor(score, cfg: gl.constexpr):
    """The last factor of a score in base 2, before ALiBi."""
    if cfg.SCORE_MOD is not None:
        factor = LOG2E
    else:
        factor = last_scale(score, cfg) * LOG2E
    return factor


@gluon.jit
def linear_scale(score, cfg: gl.constexpr):
    """The positive factor that `scores_log2` leaves to the exponential, where it costs nothing."""
    factor = 1.0
    if leaves_factor(cfg):
        factor = last_factor(score, cfg)
    return factor


# Score functions, printed by `gpu/score_source.py`. They compute on scores as (4 warps, 2 rows of a
# thread, 8 rows of a warp, columns / 8, 8 columns).
#
# The two rows of a thread are 8 apart, as are neighbouring eights. So j - i is one number for each
# column of an eight, plus a multiple of 8, which is a constant in each register. Registers of a
# diagonal have the same constant: what a function computes from j - i is computed once for them.


class Place(NamedTuple):
    """Where a block of scores is in the call."""

    b: Any
    h: Any
    first_row: Any
    first_column: Any


@gluon.jit
def by_threads(s):
    """Scores (64, columns) as a score function gets them."""
    return s.reshape([4, 2, 8, s.shape[1] // 8, 8])


@gluon.constexpr_function
def axis(LAYOUT, dim):
    """The layout of indices along one dimension of scores `by_threads`."""
    for other in (4, 3, 2, 1, 0):
        if other != dim:
            LAYOUT = gl.SliceLayout(other, LAYOUT)
    return LAYOUT


@gluon.jit
def indices_of(s, place, IS_TRANSPOSED: gl.constexpr):
    """i, j, both less the same number, which makes one of them a constant in each register, j - i,
    this in float32, and the corners of scores `by_threads`; rows are queries and columns keys, or
    the other way round.
    """
    LAYOUT: gl.constexpr = s.type.layout
    COUNT: gl.constexpr = s.shape[3]
    warp = gl.arange(0, 4, layout=axis(LAYOUT, 0))[:, None, None, None, None]
    second = gl.arange(0, 2, layout=axis(LAYOUT, 1))[None, :, None, None, None]
    row = gl.arange(0, 8, layout=axis(LAYOUT, 2))[None, None, :, None, None]
    eight = gl.arange(0, COUNT, layout=axis(LAYOUT, 3))[None, None, None, :, None]
    column = gl.arange(0, 8, layout=axis(LAYOUT, 4))[None, None, None, None, :]
    first = place.first_column + column
    rows, columns = place.first_row + (16 * warp + row) + 8 * second, first + 8 * eight
    last_row, last_column = place.first_row + 63, place.first_column + 8 * COUNT - 1
    if IS_TRANSPOSED:
        ahead = place.first_row + (16 * warp + row) - first
        steps = 8 * (second - eight)
        corners = Corners(place.first_column, last_column, place.first_row, last_row)
        i, j, i0, j0 = columns, rows, 8 * eight, rows - first
    else:
        ahead = first - place.first_row - (16 * warp + row)
        steps = 8 * (eight - second)
        corners = Corners(place.first_row, last_row, place.first_column, last_column)
        i, j, i0, j0 = rows, columns, rows - first, 8 * eight
    distance = ahead.to(gl.float32) + steps.to(gl.float32)
    return i, j, i0, j0, ahead + steps, distance, corners


@gluon.jit
def modified(s, place, shift, score, IS_TRANSPOSED: gl.constexpr, cfg: gl.constexpr):
    """The score function of scaled products; `shift` is the position of row 0, as key."""
    given = by_threads(s)
    i, j, i0, j0, d, distance, corners = indices_of(given, place, IS_TRANSPOSED)
    # The shape of `by_threads`.
    x = cfg.SCORE_MOD(
        given, place.b, place.h, i, j, i0, j0, d, distance, shift, corners, score.captured,
        score.captured_integers,
    )  # fmt: skip
    return gl.convert_layout(x.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def modified_gradient(s, g, place, shift, score, cfg: gl.constexpr):
    """`g` times the derivative of `modified`; rows are keys."""
    given = by_threads(s)
    i, j, i0, j0, d, distance, corners = indices_of(given, place, True)
    # The shape of `by_threads`.
    x = cfg.SCORE_GRADIENT(
        given, place.b, place.h, i, j, i0, j0, d, distance, shift, corners, by_threads(g),
        score.captured, score.captured_integers,
    )  # fmt: skip
    return gl.convert_layout(x.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def alibi_slope(b, h, score, cfg: gl.constexpr):
    """The slope of a head, in base 2; 0 without ALiBi."""
    slope = 0.0
    if cfg.HAS_ALIBI:
        slope = gl.load(score.alibi_ptr + b * score.alibi_batch + h).to(gl.float32) * LOG2E
    return slope


@gluon.jit
def with_alibi(s, slope, place, shift, IS_TRANSPOSED: gl.constexpr):
    """Scores in base 2 less `slope` times the distance of their key from the position of their
    query, which is its row plus `shift`.
    """
    if IS_TRANSPOSED:
        place = Place(place.b, place.h, place.first_row - shift, place.first_column)
    else:
        place = Place(place.b, place.h, place.first_row + shift, place.first_column)
    given = by_threads(s)
    x = given - slope * gl.abs(indices_of(given, place, IS_TRANSPOSED)[5])
    return gl.convert_layout(x.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.constexpr_function
def has_starts(cfg):
    """Whether the visible keys of a row may start after the first key."""
    return cfg.HAS_LEFT or cfg.HAS_CHUNK or cfg.HAS_SPAN


@gluon.jit
def masked(s, start, stop, n0, cfg: gl.constexpr):
    """-inf where a key, from `n0` on, is outside its row's [start, stop), both (64,)."""
    COLUMNS: gl.constexpr = s.shape[1]
    # (64, COLUMNS / 8, 8)
    by_eights = s.reshape([64, COLUMNS // 8, 8])
    LAYOUT: gl.constexpr = by_eights.type.layout
    eight = eights(COLUMNS, LAYOUT)
    visible = eight < bounds(stop - n0, LAYOUT)
    if has_starts(cfg):
        visible = visible & (eight >= bounds(start - n0, LAYOUT))
    by_eights = gl.where(visible, by_eights, -float("inf"))
    return gl.convert_layout(by_eights.reshape(s.shape), s.type.layout, assert_trivial=True)


# Bits of a block mask: rows and columns of the scores, which are queries and keys in the forward,
# keys and queries in the backward.


@gluon.constexpr_function
def words_of(LAYOUT):
    """The layout of shifted words, (64, columns / 32, 4 pairs), from LAYOUT, that of scores, (64,
    columns / 32, 4 eights, 4 pairs, 2 columns).
    """
    return gl.SliceLayout(2, gl.SliceLayout(4, LAYOUT))


@gluon.jit
def load_bits(ptr, COLUMNS: gl.constexpr):
    """A bit for each score of a block, 1 where the query sees the key: int32 (64, COLUMNS / 32)."""
    WORDS: gl.constexpr = COLUMNS // 32
    scores = empty_accumulator(COLUMNS).reshape([64, WORDS, 4, 4, 2])
    LAYOUT: gl.constexpr = gl.SliceLayout(2, words_of(scores.type.layout))
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(ptr + row[:, None] * WORDS + word[None, :])


@gluon.jit
def masked_by_bits(s, words):
    """-inf where the bit of a score (`load_bits`) is 0.

    A thread has two columns of every eight. It shifts its words once, so that the bits that it
    tests are constants.
    """
    COLUMNS: gl.constexpr = s.shape[1]
    # (64, words, eights, pairs, 2)
    by_words = s.reshape([64, COLUMNS // 32, 4, 4, 2])
    LAYOUT: gl.constexpr = by_words.type.layout
    SHIFTED: gl.constexpr = words_of(LAYOUT)
    EIGHTS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, LAYOUT)))
    PAIRS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, SHIFTED)))
    eight = gl.arange(0, 4, layout=gl.SliceLayout(0, EIGHTS))
    column = gl.arange(0, 2, layout=gl.SliceLayout(0, PAIRS))
    # (64, words, pairs)
    words = words[:, :, None] >> (2 * pair)[None, None, :]
    bit = 8 * eight[None, None, :, None, None] + column[None, None, None, None, :]
    visible = (words[:, :, None, :, None] >> bit) & 1
    by_words = gl.where(visible != 0, by_words, -float("inf"))
    return gl.convert_layout(by_words.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def load_intervals(ptr, cfg: gl.constexpr):
    """The visible keys of the rows of this consumer: ((start, stop), ...), each (64,)."""
    SPANS: gl.constexpr = cfg.SPANS
    ptr += gl.arange(0, 64, layout=row_values(cfg.BLOCK_N))
    intervals = ()
    for r in gl.static_range(SPANS):
        # (64,)
        start = gl.load(ptr + 2 * r * cfg.BLOCK_M)
        stop = gl.load(ptr + (2 * r + 1) * cfg.BLOCK_M)
        # Gluon knows no starred elements; mypy, no tuples of a length that cfg decides.
        intervals = intervals + ((start, stop),)  # type: ignore[assignment]  # noqa: RUF005
    return intervals


@gluon.jit
def masked_by_intervals(s, intervals, n0, cfg: gl.constexpr):
    """-inf where a key of [n0, n0 + BLOCK_N) is in none of its row's `intervals`."""
    SPANS: gl.constexpr = cfg.SPANS
    # (64, BLOCK_N / 8, 8)
    by_eights = s.reshape([64, cfg.BLOCK_N // 8, 8])
    LAYOUT: gl.constexpr = by_eights.type.layout
    eight = eights(cfg.BLOCK_N, LAYOUT)
    visible = in_interval(eight, intervals[0], n0, LAYOUT)
    for r in gl.static_range(1, SPANS):
        visible = visible | in_interval(eight, intervals[r], n0, LAYOUT)
    by_eights = gl.where(visible, by_eights, -float("inf"))
    return gl.convert_layout(by_eights.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def in_interval(eight, interval, n0, LAYOUT: gl.constexpr):
    """Whether the keys of a block are in their row's [start, stop)."""
    start, stop = interval
    return (eight >= bounds(start - n0, LAYOUT)) & (eight < bounds(stop - n0, LAYOUT))


@gluon.jit
def own_mask(block, rows, cfg: gl.constexpr):
    """What masks the rows of this consumer besides the mask rules: the bits of entry `block` of the
    list of a block mask, or the intervals of spans.
    """
    own = block
    if cfg.HAS_BLOCK_MASK:
        tile = gl.load(rows.entries + 2 * block + 1).to(gl.int64)
        own = load_bits(rows.masks + tile * (cfg.BLOCK_M * cfg.BLOCK_N // 32), cfg.BLOCK_N)
    if cfg.SPANS > 0:
        own = load_intervals(rows.masks, cfg)
    return own


# The index of a key in a block is split into a multiple of eight, all of which every thread holds,
# and a column within the eight. The first is a constant in the comparison of each register; the
# second is subtracted from the row's bound. So key indices need hardly any registers.


@gluon.jit
def eights(COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """(1, COLUMNS / 8, 1): the first column of each eight of a block."""
    COUNT: gl.constexpr = COLUMNS // 8
    eight = 8 * gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return eight[None, :, None]


@gluon.jit
def bounds(bound, LAYOUT: gl.constexpr):
    """Convert a bound on keys (64,) to a bound on `eights` for each column: (64, 1, 8)."""
    bound = gl.convert_layout(bound, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    return bound[:, None, None] - column[None, None, :]


@gluon.jit
def lazy_max(row_max, seen, SLACK_LOG2: gl.constexpr):
    """The lazy row maximum: it becomes the largest score `seen` only if that exceeds it by more
    than SLACK_LOG2. Any number near the maximum works, because output and row sum are relative to
    the same number.
    """
    return gl.where(seen - row_max > SLACK_LOG2, seen, row_max)


@gluon.jit
def pivot_of(row_max, IS_MASKED: gl.constexpr):
    """The number to subtract from the scores: `row_max`, or 0 while a row has seen no key, because
    -inf minus -inf is NaN.
    """
    pivot = row_max
    if IS_MASKED:
        pivot = gl.where(row_max == -float("inf"), 0.0, row_max)
    return pivot


@gluon.jit
def partial_row_sum(p):
    """Sums within each thread: (64, columns) -> (64, 4)."""
    COLUMNS: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([64, COLUMNS // 8, 4, 2]), 3), 1)


@gluon.jit
def exponents(s, factor, pivot, IS_MASKED: gl.constexpr, cfg: gl.constexpr):
    """The base-2 logarithms of the weights of scores (64, columns)."""
    x = s * factor - pivot[:, None]
    if IS_MASKED and cfg.HAS_ENTROPY:  # 0 times -inf would be NaN
        x = gl.maximum(x, NO_WEIGHT, tl.PropagateNan.ALL)
    return x


@gluon.jit
def partial_logarithms(p, exponent):
    """Sums of p log2 p within each thread, of p = 2**exponent: (64, columns) -> (64, 4)."""
    COLUMNS: gl.constexpr = p.shape[1]
    x = (p * exponent).reshape([64, COLUMNS // 8, 4, 2]).permute([0, 2, 1, 3])
    return gl.sum(x.reshape([64, 4, COLUMNS // 4]), 2)


@gluon.jit
def rescaled(x, factor):
    """Rows of `x` times `factor` (64,)."""
    # (64, columns) * (64, 1)
    LAYOUT: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.convert_layout(factor, LAYOUT, assert_trivial=True)[:, None]


@gluon.jit
def rescaled_where_needed(x, factor):
    """`rescaled` for factors that are mostly one: a warp whose factors are all one skips it."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    factor = gl.convert_layout(factor, LAYOUT, assert_trivial=True)
    return multiply_unless_one(x, factor[:, None].broadcast_to(x.shape))


@gluon.jit
def paired(p, dtype: gl.constexpr):
    """P in 16 bits, two neighbours in an int32: (64, columns) -> (64, columns / 2).

    The compiler would use one register for each 16-bit loop variable.
    """
    COLUMNS: gl.constexpr = p.shape[1]
    low, high = gl.split(p.reshape([64, COLUMNS // 2, 2]))
    return round_to_pair(low, high, dtype)


@gluon.jit
def as_left_operand(pairs, COLUMNS: gl.constexpr, dtype: gl.constexpr):
    """`paired` P as the left operand of a product that accumulates (64, COLUMNS), in registers."""
    # (64, columns / 2) -> (64, columns)
    low, high = halves(pairs, dtype)
    p = gl.join(low, high).reshape([64, 2 * pairs.shape[1]])
    return gl.convert_layout(p, left_operand(COLUMNS), assert_trivial=True)


@gluon.jit
def whole_row_sum(row_sum, cfg: gl.constexpr):
    """Add up the partial sums of a row: (64, 4) -> (64,)."""
    return gl.convert_layout(gl.sum(row_sum, 1), row_values(cfg.BLOCK_N))


# Which scores of a consumer's block dropout keeps.
#
# A Philox block has the random numbers of 16 scores (`flashtile.dropout`). In the forward, where
# rows are queries, one thread has all of them. In the backward, where rows are keys, two threads of
# each warp have two of them each: the threads divide the blocks among themselves and exchange one
# bit for each score through shared memory.


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
    # (64, BLOCKS, 4, 2, 2, 2) -> (64, COLUMNS / 2)
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
    # (4, COLUMNS / 2, 2, 2, 2, 2) -> (4, COLUMNS / 2, 16)
    kept = kept_pairs(draws, row, group, BITS).reshape([4, COLUMNS // 2, 16])
    BIT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, kept.type.layout))
    bit = 0x10001 << gl.arange(0, 16, layout=BIT)
    return gl.xor_sum(kept & bit[None, None, :], 2)


@gluon.constexpr_function
def layout_of_words(LAYOUT):
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
    # (warps, eights, pairs, 2, COLUMNS / 2, 2)
    by_pairs = p.reshape([4, 2, 4, 2, COLUMNS // 2, 2])
    LAYOUT: gl.constexpr = by_pairs.type.layout
    SHIFTED: gl.constexpr = layout_of_words(LAYOUT)
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
