"""Online softmax on a block of scores: what one consumer does between its two products.

A block of scores is (64, BLOCK_N). Scores, maxima and the log-sum-exp are in base 2 (suffix
`_log2`): the hardware's exponential is 2**x. A row sum stays spread over the four threads that
share the row, (64, 4), until the tile is done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .intrinsics import halves, left_operand, multiply_unless_one, round_to_pair, row_values

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

# A row's maximum stays while scores exceed it by no more than this, in base 2. Weights are then up
# to 2**8, far inside of float16; as fractions of the row sum they are rounded as before.
SLACK_LOG2 = gl.constexpr(8.0)


class Pointers(NamedTuple):
    """Tensors that some calls have."""

    alibi_slopes: Tensor | None
    sink: Tensor | None


class Score(NamedTuple):
    """What turns a product into a score in base 2, and a score beside those of the keys."""

    scale: Any
    softcap: Any
    alibi_ptr: Any
    alibi_batch: Any
    sink_ptr: Any


@gluon.jit
def tanh(x):
    """tanh to about one rounding: a polynomial near zero (Moshier, Cephes), exponentials
    elsewhere."""
    z = x * x
    near = -5.70498872745e-3 * z + 2.06390887954e-2
    near = near * z - 5.37397155531e-2
    near = near * z + 1.33314422036e-1
    near = near * z - 3.33332819422e-1
    near = near * z * x + x
    far = 1.0 - 2.0 / (gl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return gl.where(gl.abs(x) < 0.625, near, far)


@gluon.jit
def scores_log2(s, distance, slope, score, cfg: gl.constexpr):
    """Scores in base 2 from q k^T: scale, then softcap, then ALiBi.

    Where nothing but a positive scale applies (cfg.IS_LINEAR) `s` comes back as it is: the scale is
    then multiplied inside the exponential (`linear_scale`). `distance`: row position less key.
    """
    if not cfg.IS_LINEAR:
        if cfg.HAS_SOFTCAP:
            s = tanh(s * (score.scale / score.softcap)) * (score.softcap * LOG2E)
        else:
            s = s * (score.scale * LOG2E)
        if cfg.HAS_ALIBI:
            s = s - slope * gl.abs(distance).to(gl.float32)
    return s


@gluon.jit
def linear_scale(score, cfg: gl.constexpr):
    """What is left to multiply `scores_log2` with."""
    if cfg.IS_LINEAR:
        factor = score.scale * LOG2E
    else:
        factor = 1.0
    return factor


@gluon.jit
def alibi_slope(b, h, score, cfg: gl.constexpr):
    """The slope of a head, in base 2; 0 without ALiBi."""
    slope = 0.0
    if cfg.HAS_ALIBI:
        slope = gl.load(score.alibi_ptr + b * score.alibi_batch + h) * LOG2E
    return slope


@gluon.jit
def distances(position, n0, s, cfg: gl.constexpr):
    """Positions (64,) less the keys [n0, n0 + BLOCK_N), laid out as the scores `s`."""
    LAYOUT: gl.constexpr = s.reshape([64, cfg.BLOCK_N // 8, 8]).type.layout
    d = bounds(position - n0, LAYOUT) - eights(LAYOUT, cfg)
    return gl.convert_layout(d.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def masked(s, start, stop, n0, cfg: gl.constexpr):
    """-inf where a key of [n0, n0 + BLOCK_N) is outside of its row's [start, stop), both (64,)."""
    by_eights = s.reshape([64, cfg.BLOCK_N // 8, 8])
    LAYOUT: gl.constexpr = by_eights.type.layout
    eight = eights(LAYOUT, cfg)
    visible = eight < bounds(stop - n0, LAYOUT)
    if cfg.HAS_LEFT or cfg.HAS_CHUNK:
        visible = visible & (eight >= bounds(start - n0, LAYOUT))
    by_eights = gl.where(visible, by_eights, -float("inf"))
    return gl.convert_layout(by_eights.reshape(s.shape), s.type.layout, assert_trivial=True)


# A key's number in a block is split in a multiple of eight, of which every thread has all, and a
# place inside of the eight. The first is a constant in each register's comparison, and the second
# is added to the row's side: hardly any registers for numbers of keys.


@gluon.jit
def eights(LAYOUT: gl.constexpr, cfg: gl.constexpr):
    """(1, BLOCK_N / 8, 1): where the eights of a block of keys start."""
    COUNT: gl.constexpr = cfg.BLOCK_N // 8
    eight = 8 * gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return eight[None, :, None]


@gluon.jit
def bounds(bound, LAYOUT: gl.constexpr):
    """A bound on keys (64,) as one on eights, by place inside of them: (64, 1, 8)."""
    bound = gl.convert_layout(bound, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    return bound[:, None, None] - column[None, None, :]


@gluon.jit
def lazy_max(row_max, seen, SLACK_LOG2: gl.constexpr):
    """The maximum of a row, raised to the largest score `seen` only when it is more than SLACK_LOG2
    behind. Any number near the maximum serves: what is summed is divided by a sum against the same
    number."""
    return gl.where(seen - row_max > SLACK_LOG2, seen, row_max)


@gluon.jit
def pivot_of(row_max, IS_MASKED: gl.constexpr):
    """What the exponents are taken against: while a row has seen no key, -inf less -inf would be
    NaN."""
    pivot = row_max
    if IS_MASKED:
        pivot = gl.where(row_max == -float("inf"), 0.0, row_max)
    return pivot


@gluon.jit
def partial_row_sum(p):
    """Sums inside of each thread: (64, columns) -> (64, 4)."""
    COLUMNS: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([64, COLUMNS // 8, 4, 2]), 3), 1)


@gluon.jit
def rescaled(x, factor):
    """Rows of `x` times `factor` (64,)."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.convert_layout(factor, LAYOUT, assert_trivial=True)[:, None]


@gluon.jit
def rescaled_where_needed(x, factor):
    """`rescaled`, for factors that are mostly one: a warp with no other multiplies nothing."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    factor = gl.convert_layout(factor, LAYOUT, assert_trivial=True)
    return multiply_unless_one(x, factor[:, None].broadcast_to(x.shape))


@gluon.jit
def paired(p, dtype: gl.constexpr):
    """P in 16 bits, two neighbours in an int32: (64, columns) -> (64, columns / 2).

    Between two steps of a loop the compiler would take 16-bit numbers apart, one a register.
    """
    COLUMNS: gl.constexpr = p.shape[1]
    low, high = gl.split(p.reshape([64, COLUMNS // 2, 2]))
    return round_to_pair(low, high, dtype)


@gluon.jit
def as_left_operand(pairs, COLUMNS: gl.constexpr, dtype: gl.constexpr):
    """`paired` P as the product that accumulates (64, COLUMNS) takes it, still in registers."""
    low, high = halves(pairs, dtype)
    p = gl.join(low, high).reshape([64, 2 * pairs.shape[1]])
    return gl.convert_layout(p, left_operand(COLUMNS), assert_trivial=True)


@gluon.jit
def whole_row_sum(row_sum, cfg: gl.constexpr):
    """(64, 4) -> (64,)."""
    return gl.convert_layout(gl.sum(row_sum, 1), row_values(cfg.BLOCK_N))
