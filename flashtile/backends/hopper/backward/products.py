"""The products of the backward, the parts of tiles that a consumer multiplies, and the recomputed
probabilities.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ....gpu.intrinsics import tanh
from ..shared.dropout import kept_queries, negative_where_dropped
from ..shared.intrinsics import (
    CONSUMER_ROWS,
    accumulator,
    empty_accumulator,
    left_operand,
    opaque_zero,
    recast,
    shared_value,
)
from ..shared.softmax import LOG2E, bounds, load_bits, masked_by_bits
from .schedule import entry_size


@gluon.constexpr_function
def products_along(cfg):
    """Number of products that cover all columns of K, each over a power of two of columns."""
    return 1 if cfg.TAIL_D == 0 else 2


# Parts of tiles


class Tile(NamedTuple):
    """A tile of K or V in shared memory."""

    tile: Any  # (1, BLOCK_N, 1, columns)
    tail: Any  # (1, BLOCK_N, 1, columns of the tail), or `tile` again


@gluon.jit
def whole_tile(channel, zero):
    """K or V of the program; `zero` is opaque in a loop."""
    return Tile(channel.tiles.index(zero), channel.tails.index(zero))


@gluon.jit
def rows_tile(channel, i, cfg: gl.constexpr):
    """A block of Q or dO, (BLOCK_M, columns)."""
    COLUMNS: gl.constexpr = channel.tiles.shape[4]
    slot = opaque_zero(i) if channel.SLOTS == 1 else i % channel.SLOTS
    return channel.tiles.index(slot).reshape([cfg.BLOCK_M, COLUMNS])


@gluon.jit
def rows_tail(channel, i, cfg: gl.constexpr):
    """The tail of `rows_tile`, (BLOCK_M, columns)."""
    return channel.tail(i).reshape([cfg.BLOCK_M, channel.TAIL])


@gluon.jit
def keys_tile(ME: gl.constexpr, tile, cfg: gl.constexpr):
    """The rows of a tile of K or V, or of a tail, for this consumer's scores, (64, columns)."""
    rows = tile.reshape([cfg.BLOCK_N, tile.shape[3]])
    return rows.slice(ME * CONSUMER_ROWS, CONSUMER_ROWS)


@gluon.jit
def shared_half(ME: gl.constexpr, tiles, i, cfg: gl.constexpr):
    """This consumer's part of dS^T in shared memory, (64, BLOCK_M)."""
    return tiles.index(i % 2).slice(ME * CONSUMER_ROWS, CONSUMER_ROWS)


@gluon.jit
def statistic(slots, i, cfg: gl.constexpr):
    """The statistic of each row of a block, one for each column of the scores."""
    SLOTS: gl.constexpr = slots.shape[0]
    numbers = recast(slots.index(i % SLOTS), gl.float32, [cfg.BLOCK_M], shared_value())
    return numbers.load(gl.SliceLayout(0, accumulator(cfg.BLOCK_M)))


# Products


@gluon.constexpr_function
def piece_columns(cfg):
    """Columns of dQ that a consumer computes in a step up to 128 columns; the second one computes
    the tail, if there is one.
    """
    return 64 if cfg.TAIL_D > 0 else cfg.BLOCK_M * cfg.BLOCK_D // 128


@gluon.jit
def multiply_along(keys, channel, i, start, HAS_START: gl.constexpr, cfg: gl.constexpr):
    """Start `keys`, a consumer's rows of K or V, times block `i` of Q or dO transposed; with
    HAS_START, the product is added to `start`.
    """
    rows = rows_tile(channel, i, cfg).permute((1, 0))
    x = warpgroup_mma(keys.tile, rows, start, use_acc=HAS_START, is_async=True)
    if channel.TAIL > 0:
        rows = rows_tail(channel, i, cfg).permute((1, 0))
        x = warpgroup_mma(keys.tail, rows, x, is_async=True)
    return x


@gluon.jit
def own_rows(
    ME: gl.constexpr, channel, zero, IS_LOADED: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """The rows of K or V and of its tail for this consumer's scores, in registers or in shared
    memory; `zero` is as in `whole_tile`.
    """
    both = whole_tile(channel, zero)
    tile = keys_tile(ME, both.tile, cfg)
    tail = keys_tile(ME, both.tail, cfg)
    if IS_LOADED:
        tile = tile.load(left_operand(cfg.BLOCK_M))
        tail = tail.load(left_operand(cfg.BLOCK_M)) if channel.TAIL > 0 else tile
    return Tile(tile, tail)


@gluon.jit
def issue_scores(k, i, channels, cfg: gl.constexpr):
    """Start S^T = K Q^T of block i; `k` is from `own_rows`."""
    return multiply_along(k, channels.q, i, empty_accumulator(cfg.BLOCK_M), False, cfg)


@gluon.jit
def issue_dp(v, minus_delta, i, channels, cfg: gl.constexpr):
    """Start dP^T - delta = V dO^T - delta of block i; `v` is from `own_rows`, `minus_delta` a
    `statistic`.
    """
    start = gl.expand_dims(minus_delta, 0).broadcast_to([CONSUMER_ROWS, cfg.BLOCK_M])
    return multiply_along(v, channels.dout, i, start, True, cfg)


@gluon.jit
def issue_dq(PART: gl.constexpr, k, i, tiles, cfg: gl.constexpr):
    """Start a piece of dQ = dS K: (64, `piece_columns`), number PART along the rows or columns, or
    (64, TAIL_D), the tail's columns. dS^T is in slot `i % 2` of `tiles`.
    """
    COLUMNS: gl.constexpr = piece_columns(cfg)
    columns = k.tile.reshape([cfg.BLOCK_N, cfg.BLOCK_D])
    ds = tiles.index(i % 2)
    if cfg.BLOCK_M > 64:
        ds = ds.slice(PART * CONSUMER_ROWS, CONSUMER_ROWS, dim=1)
    elif PART * COLUMNS < cfg.BLOCK_D:
        columns = columns.slice(PART * COLUMNS, COLUMNS, dim=1)
    else:
        columns = k.tail.reshape([cfg.BLOCK_N, cfg.TAIL_D])
    zero = empty_accumulator(columns.shape[1])
    return warpgroup_mma(ds.permute((1, 0)), columns, zero, use_acc=False, is_async=True)


# P, recomputed from Q K^T and the log-sum-exp.
#
# A block of scores is transposed, (64 keys, columns of queries): in the layout `accumulator`, a
# thread has two keys, and two of every eight queries.


@gluon.jit
def probabilities(
    s, lse_log2, keys, bits, kept, m0, slope, scale, softcap, IS_MASKED: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """P of a block, and the factor of dP - delta in dS: P times the derivative of softcap. Both are
    negative where dropout drops P.

    `lse_log2` (columns,) is +inf for rows that saw no key; `m0` is the row of the first column;
    `slope` is ALiBi's slope in base 2; `bits` are those of a block mask, and `kept` of dropout.
    """
    if cfg.HAS_SOFTCAP:
        t = tanh(s * (scale / softcap))
        exponent = t * (softcap * LOG2E) - lse_log2[None, :]
    else:
        exponent = s * (scale * LOG2E) - lse_log2[None, :]
    if cfg.HAS_ALIBI:
        distance = distances(keys.number - keys.shift - m0, s)
        exponent = exponent - slope * gl.abs(distance).to(gl.float32)
    if IS_MASKED:
        if cfg.SPANS > 0:
            exponent = masked_by_intervals(exponent, keys, m0, cfg)
        else:
            exponent = masked_rows(exponent, -float("inf"), keys.start - m0, keys.stop - m0, cfg)
        if cfg.HAS_BLOCK_MASK:
            exponent = masked_by_bits(exponent, bits)
    p = gl.exp2(exponent)
    if cfg.HAS_DROPOUT:
        p = negative_where_dropped(p, kept)
    factor = p
    if cfg.HAS_SOFTCAP:
        factor = p * (1.0 - t * t)
        if IS_MASKED and cfg.IS_PACKED:  # memory after the last row may contain NaN
            factor = masked_rows(factor, 0.0, keys.start - m0, keys.stop - m0, cfg)
    return p, factor


@gluon.jit
def kept_by_dropout(ME: gl.constexpr, m, draws, work, cfg: gl.constexpr):
    """The bits of the scores of block `m` and a consumer's keys that dropout keeps; `m` without
    dropout.
    """
    kept = m
    if cfg.HAS_DROPOUT:
        n0 = work.n0 + ME * CONSUMER_ROWS
        kept = kept_queries(m * cfg.BLOCK_M, n0, draws, cfg.BLOCK_M, cfg.DROPOUT_BITS)
    return kept


@gluon.jit
def kept_probabilities(p, dtype: gl.constexpr, cfg: gl.constexpr):
    """P from `probabilities`, rounded; zero where dropout drops it."""
    if cfg.HAS_DROPOUT:
        p = gl.maximum(p, 0.0, tl.PropagateNan.ALL)
    return p.to(dtype)


@gluon.jit
def score_gradient(factor, dp, minus_delta, cfg: gl.constexpr):
    """dS = |factor| (dP - delta), with the factor of `probabilities`; where that is negative,
    dropout dropped P, and dP counts as zero. `minus_delta` is (columns,).
    """
    if cfg.HAS_DROPOUT:
        dp = gl.where(factor < 0.0, minus_delta[None, :], dp)
        factor = gl.abs(factor)
    return factor * dp


@gluon.jit
def bits_of(position, keys, cfg: gl.constexpr):
    """The bits of a position of the list of a block mask, for the keys of this consumer."""
    bits = position
    if cfg.HAS_BLOCK_MASK:
        tile = gl.load(keys.entries + (entry_size(cfg) * position + 1)).to(gl.int64)
        bits = load_bits(keys.masks + tile * (cfg.BLOCK_N * cfg.BLOCK_M // 32), cfg.BLOCK_M)
    return bits


@gluon.jit
def masked_by_intervals(x, keys, m0, cfg: gl.constexpr):
    """-inf where a key is in no interval of the query of its column; `m0` is the first query."""
    SPANS: gl.constexpr = cfg.SPANS
    COLUMNS: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = x.type.layout
    ptr = keys.masks + 2 * SPANS * m0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    key = gl.convert_layout(keys.number, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
    visible = (key >= gl.load(ptr)[None, :]) & (key < gl.load(ptr + COLUMNS)[None, :])
    for r in gl.static_range(1, SPANS):
        start, stop = gl.load(ptr + 2 * r * COLUMNS), gl.load(ptr + (2 * r + 1) * COLUMNS)
        visible = visible | ((key >= start[None, :]) & (key < stop[None, :]))
    return gl.where(visible, x, -float("inf"))


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
