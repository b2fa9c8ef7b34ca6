"""The products of the backward, the parts of tiles that a consumer multiplies, and the recomputed
probabilities.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ..shared.intrinsics import (
    CONSUMER_ROWS,
    accumulator,
    empty_accumulator,
    opaque_zero,
    recast,
    shared_value,
)
from ..shared.softmax import LOG2E, bounds, tanh

# Columns


@gluon.constexpr_function
def own_columns(ME, cfg):
    """Number of columns of dK and dV that a consumer accumulates: all, or those of its half that
    are filled.
    """
    half = cfg.BLOCK_D // 2
    return min(half, cfg.FILLED - ME * half) if cfg.IS_SPLIT else cfg.BLOCK_D


@gluon.constexpr_function
def products_along(cfg):
    """Number of products that cover all columns, each over a power of two of columns."""
    return 1 if cfg.FILLED == cfg.BLOCK_D else 2


# Parts of tiles


@gluon.jit
def rows_tile(channel, i, cfg: gl.constexpr):
    """A block of Q or dO, (BLOCK_M, BLOCK_D)."""
    slot = opaque_zero(i) if channel.SLOTS == 1 else i % channel.SLOTS
    return channel.tiles.index(slot).reshape([cfg.BLOCK_M, cfg.BLOCK_D])


@gluon.jit
def half(ME: gl.constexpr, channel, i, cfg: gl.constexpr):
    """This consumer's columns of `rows_tile`."""
    return rows_tile(channel, i, cfg).slice(ME * cfg.BLOCK_D // 2, own_columns(ME, cfg), dim=1)


@gluon.jit
def queries_of(ME: gl.constexpr, channel, i, cfg: gl.constexpr):
    """The rows of `rows_tile` for this consumer's scores."""
    HALF: gl.constexpr = cfg.BLOCK_M // 2
    rows = rows_tile(channel, i, cfg)
    if cfg.IS_SPLIT:
        rows = rows.slice(ME * HALF, HALF)
    return rows


@gluon.jit
def keys_tile(ME: gl.constexpr, tile, cfg: gl.constexpr):
    """The rows of K or V for this consumer's scores, (64, BLOCK_D)."""
    rows = tile.reshape([cfg.BLOCK_N, cfg.BLOCK_D])
    if not cfg.IS_SPLIT:
        rows = rows.slice(ME * CONSUMER_ROWS, CONSUMER_ROWS)
    return rows


@gluon.jit
def shared_half(ME: gl.constexpr, tiles, i, cfg: gl.constexpr):
    """This consumer's part of P^T or dS^T in shared memory, (BLOCK_N, BLOCK_M)."""
    tile = tiles.index(i % 2)
    if cfg.IS_SPLIT:
        tile = tile.slice(ME * (cfg.BLOCK_M // 2), cfg.BLOCK_M // 2, dim=1)
    else:
        tile = tile.slice(ME * CONSUMER_ROWS, CONSUMER_ROWS)
    return tile


@gluon.jit
def statistic(ME: gl.constexpr, channel, i, cfg: gl.constexpr):
    """The statistic of each row of a block, one for each column of the scores."""
    COLUMNS: gl.constexpr = cfg.BLOCK_M // 2 if cfg.IS_SPLIT else cfg.BLOCK_M
    numbers = recast(channel.tail(i), gl.float32, [cfg.BLOCK_M], shared_value())
    if cfg.IS_SPLIT:
        numbers = numbers.slice(ME * COLUMNS, COLUMNS)
    return numbers.load(gl.SliceLayout(0, accumulator(COLUMNS)))


# Products


@gluon.jit
def multiply_along(keys, rows, start, HAS_START: gl.constexpr, cfg: gl.constexpr):
    """Start `keys` (64, BLOCK_D) times `rows` (., BLOCK_D) transposed."""
    if products_along(cfg) == 1:
        x = warpgroup_mma(keys, rows.permute((1, 0)), start, use_acc=HAS_START, is_async=True)
    else:
        HALF: gl.constexpr = cfg.BLOCK_D // 2
        LAST: gl.constexpr = cfg.FILLED - HALF
        first = rows.slice(0, HALF, dim=1).permute((1, 0))
        last = rows.slice(HALF, LAST, dim=1).permute((1, 0))
        keys_first = keys.slice(0, HALF, dim=1)
        x = warpgroup_mma(keys_first, first, start, use_acc=HAS_START, is_async=True)
        x = warpgroup_mma(keys.slice(HALF, LAST, dim=1), last, x, is_async=True)
    return x


@gluon.jit
def issue_scores(ME: gl.constexpr, k, i, channels, cfg: gl.constexpr):
    """Start S^T = K Q^T of block i."""
    COLUMNS: gl.constexpr = cfg.BLOCK_M // 2 if cfg.IS_SPLIT else cfg.BLOCK_M
    q = queries_of(ME, channels.q, i, cfg)
    return multiply_along(keys_tile(ME, k, cfg), q, empty_accumulator(COLUMNS), False, cfg)


@gluon.jit
def issue_dp(ME: gl.constexpr, v, i, channels, cfg: gl.constexpr):
    """Start dP^T - delta = V dO^T - delta of block i."""
    COLUMNS: gl.constexpr = cfg.BLOCK_M // 2 if cfg.IS_SPLIT else cfg.BLOCK_M
    minus_delta = statistic(ME, channels.dout, i, cfg)
    start = gl.expand_dims(minus_delta, 0).broadcast_to([CONSUMER_ROWS, COLUMNS])
    dout = queries_of(ME, channels.dout, i, cfg)
    return multiply_along(keys_tile(ME, v, cfg), dout, start, True, cfg)


@gluon.jit
def issue_dq(PART: gl.constexpr, k, i, tiles, cfg: gl.constexpr):
    """Start a piece (64, 64) of dQ = dS K, the rows or columns from 64 PART. dS^T is in slot `i %
    2` of `tiles`.
    """
    FIRST: gl.constexpr = PART * CONSUMER_ROWS
    k = k.reshape([cfg.BLOCK_N, cfg.BLOCK_D])
    ds = tiles.index(i % 2)
    if cfg.BLOCK_M == 64:
        k = k.slice(FIRST, CONSUMER_ROWS, dim=1)
    else:
        ds = ds.slice(FIRST, CONSUMER_ROWS, dim=1)
    zero = empty_accumulator(CONSUMER_ROWS)
    return warpgroup_mma(ds.permute((1, 0)), k, zero, use_acc=False, is_async=True)


# P, recomputed from Q K^T and the log-sum-exp.
#
# A block of scores is transposed, (64 keys, columns of queries): in the layout `accumulator`, a
# thread has two keys, and two of every eight queries.


@gluon.jit
def probabilities(s, lse_log2, keys, m0, slope, score, IS_MASKED: gl.constexpr, cfg: gl.constexpr):
    """P of a block, and the factor of dP - delta in dS: P times the derivative of softcap.

    `lse_log2` (columns,) is +inf for rows that saw no key; `m0` is the row of the first column;
    `slope` is ALiBi's slope in base 2.
    """
    if cfg.HAS_SOFTCAP:
        t = tanh(s * (score.scale / score.softcap))
        exponent = t * (score.softcap * LOG2E) - lse_log2[None, :]
    else:
        exponent = s * (score.scale * LOG2E) - lse_log2[None, :]
    if cfg.HAS_ALIBI:
        distance = distances(keys.number - keys.shift - m0, s)
        exponent = exponent - slope * gl.abs(distance).to(gl.float32)
    if IS_MASKED:
        exponent = masked_rows(exponent, -float("inf"), keys.start - m0, keys.stop - m0, cfg)
    p = gl.exp2(exponent)
    factor = p
    if cfg.HAS_SOFTCAP:
        factor = p * (1.0 - t * t)
        if IS_MASKED and cfg.IS_PACKED:  # memory after the last row may contain NaN
            factor = masked_rows(factor, 0.0, keys.start - m0, keys.stop - m0, cfg)
    return p, factor


@gluon.jit
def masked_rows(x, hidden, start, stop, cfg: gl.constexpr):
    """Replace columns of `x` outside their key's [start, stop), both (64,), with `hidden`."""
    COLUMNS: gl.constexpr = x.shape[1]
    by_eights = x.reshape([64, COLUMNS // 8, 8])
    LAYOUT: gl.constexpr = by_eights.type.layout
    eight = eights(COLUMNS, LAYOUT)
    visible = eight >= bounds(start, LAYOUT)
    if cfg.HAS_LEFT or cfg.HAS_CHUNK or cfg.IS_PACKED:
        visible = visible & (eight < bounds(stop, LAYOUT))
    by_eights = gl.where(visible, by_eights, hidden)
    return gl.convert_layout(by_eights.reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def distances(bound, s):
    """Columns minus a bound (64,), in the layout of the scores `s`."""
    COLUMNS: gl.constexpr = s.shape[1]
    LAYOUT: gl.constexpr = s.reshape([64, COLUMNS // 8, 8]).type.layout
    d = eights(COLUMNS, LAYOUT) - bounds(bound, LAYOUT)
    return gl.convert_layout(d.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def eights(COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """(1, COLUMNS / 8, 1): the first query of each eight of a block; see `softmax.eights`."""
    COUNT: gl.constexpr = COLUMNS // 8
    eight = 8 * gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return eight[None, :, None]
