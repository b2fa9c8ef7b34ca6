"""A consumer of float8 tiles: one warpgroup with 64 rows of the tile of queries.

As `forward/consumer.py`, but Q, K and V are e4m3 and so is P (FlashAttention-3, Shah et al. 2024,
section 3.3). Scales stand outside of the products: those of Q and K multiply S, and the output so
far is kept in the unit of the block of V that was added last.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..forward.consumer import normalisation, pass_blocks, rows_of, store_lse, store_output
from ..shared.channels import first_turn, give_turn, last_turn, wait_for_turn
from ..shared.intrinsics import (
    CONSUMER_ROWS,
    CONSUMER_WARPS,
    FIRST_BARRIER,
    aggregate,
    empty_accumulator,
    left_operand,
    pin,
    row_values,
    show_written,
)
from ..shared.schedule import full_blocks, own_blocks, read_work
from ..shared.softmax import (
    Score,
    linear_scale,
    partial_row_sum,
    pivot_of,
    rescaled,
    rescaled_where_needed,
    scores_log2,
)
from .softmax import (
    WEIGHT_LOG2,
    exponentials,
    masked8,
    packed_weights,
    raised8,
    ratio,
    weights_operand,
)


class Scales(NamedTuple):
    """Factors of the float8 numbers: (B, Hk), or (B, heads, blocks of rows); None is 1."""

    q: Any
    k: Any
    v: Any


@aggregate
class Units:
    """Scales of a tile."""

    score: gl.tensor  # softmax scale times that of Q, and of K where it has one for each head
    k: gl.tensor  # where the scales of its blocks start
    v: gl.tensor

    @gluon.constexpr_function
    def __init__(self, score, k, v):
        self.score = score
        self.k = k
        self.v = v


@aggregate
class Progress:
    """What a consumer carries from block to block."""

    i: gl.tensor  # use of the rings: the last block whose scores are known
    block: gl.tensor  # its number
    p: gl.tensor  # its weights, `packed_weights`
    o: gl.tensor  # (64, BLOCK_DV) output of the blocks before it, in its units
    row_max: gl.tensor  # (64,) or a little less, see `raised8`
    row_sum: gl.tensor  # (64, 4)
    v_unit: gl.tensor  # scale of its values
    k_next: gl.tensor  # scales of the next block, loaded early
    v_next: gl.tensor

    @gluon.constexpr_function
    def __init__(self, i, block, p, o, row_max, row_sum, v_unit, k_next, v_next):
        self.i = i
        self.block = block
        self.p = p
        self.o = o
        self.row_max = row_max
        self.row_sum = row_sum
        self.v_unit = v_unit
        self.k_next = k_next
        self.v_next = v_next


@gluon.jit
def consumer8(
    ME: gl.constexpr, output, channels, scales, sizes, mask, score, cfg: gl.constexpr
):  # fmt: skip
    """Attend tile after tile, until the producer has no more."""
    first_turn(ME, cfg)
    count = 0  # tiles so far
    i = 0  # blocks so far
    channels.work.acquire(count)
    work = read_work(channels.work, count, sizes, cfg)
    while work.begin < work.end:
        o, v_unit, done = attend8(ME, count, i, channels, scales, sizes, work, mask, score, cfg)
        work = read_work(channels.work, count, sizes, cfg)
        scale, lse = weighted_normalisation(ME, done, work, cfg)
        store_lse(ME, lse, output, work, sizes, cfg)
        o = warpgroup_mma_wait(0, deps=[o])
        channels.v.release_operand(done.i)
        i = pass_blocks(ME, done.i + 1, done.block - work.begin, channels, cfg)
        tma.store_wait(0)
        o = rescaled(o, scale * v_unit)
        store_output(ME, o, channels.o, 0, output, work, cfg.BLOCK_DV, cfg)
        channels.work.release(count)
        count += 1
        channels.work.acquire(count)
        work = read_work(channels.work, count, sizes, cfg)
    tma.store_wait(0)
    last_turn(ME, cfg)


@gluon.jit
def weighted_normalisation(ME: gl.constexpr, done, work, cfg: gl.constexpr):
    """`consumer.normalisation` of sums of weights times 2**8."""
    row_max = gl.convert_layout(done.row_max, row_values(cfg.BLOCK_N), assert_trivial=True)
    return normalisation(ME, row_max - WEIGHT_LOG2, done.row_sum, work, None, cfg)


@gluon.jit
def attend8(
    ME: gl.constexpr, count, i, channels, scales, sizes, work, mask, score, cfg: gl.constexpr
):  # fmt: skip
    """Walk over the blocks of keys, from the last to the first: the output, its last product under
    way, its unit, and how far the walk has come."""
    first_row = work.m0 + ME * CONSUMER_ROWS
    last_row = gl.minimum(first_row + CONSUMER_ROWS, work.M) - 1
    begin, end = own_blocks(first_row, last_row, work, mask, cfg)
    full_begin, full_end = full_blocks(first_row, last_row, begin, end, work, mask, cfg)
    rows = rows_of(ME, work, mask, score, cfg)
    units, v_unit = units_of(ME, scales, sizes, work, score, cfg)
    q_use = count * cfg.CONSUMERS + ME
    channels.q.acquire(q_use)
    q = channels.q.tile(q_use).reshape([CONSUMER_ROWS, cfg.BLOCK_D])
    if cfg.Q_IN_REGISTERS:
        q = q.load(left_operand(cfg.BLOCK_N, 8))
    i = pass_blocks(ME, i, work.end - end, channels, cfg)
    now = first_block8(ME, q, i, end - 1, channels, rows, work, units, score, cfg)
    if cfg.Q_IN_REGISTERS:  # a product has used them, so they have arrived
        channels.q.release_operand(q_use)
    # Three phases: masked, full, masked.
    if cfg.HAS_RIGHT:
        now = walk8(ME, now, q, full_end, channels, rows, units, score, True, cfg)
    now = walk8(ME, now, q, full_begin, channels, rows, units, score, False, cfg)
    if cfg.HAS_LEFT:
        now = walk8(ME, now, q, begin, channels, rows, units, score, True, cfg)
    if not cfg.Q_IN_REGISTERS:
        channels.q.release_operand(q_use)
    if cfg.BLOCK_SCALES:
        v_unit = now.v_unit
    return issue_output8(now, channels, cfg), v_unit, now


@gluon.jit
def units_of(ME: gl.constexpr, scales, sizes, work, score, cfg: gl.constexpr):
    """The scales of a tile, and that of V where it has one for each head."""
    unit, v_unit = score.scale, 1.0
    k, v = scales.k, scales.v
    key_heads = sizes.heads // sizes.group
    key_head = (work.b * key_heads + work.h // sizes.group).to(gl.int64)
    if cfg.BLOCK_SCALES:
        query_head = (work.b * sizes.heads + work.h).to(gl.int64)
        query_blocks = gl.cdiv(sizes.M, CONSUMER_ROWS)
        # A consumer past the last row has no scale, nor need of one.
        query_block = gl.minimum(work.m0 // CONSUMER_ROWS + ME, query_blocks - 1)
        unit = unit * gl.load(scales.q + query_head * query_blocks + query_block)
        key_blocks = gl.cdiv(sizes.N, cfg.BLOCK_N)
        k, v = k + key_head * key_blocks, v + key_head * key_blocks
    else:
        if scales.q is not None:
            unit = unit * gl.load(scales.q + key_head)
        if scales.k is not None:
            unit = unit * gl.load(scales.k + key_head)
        if scales.v is not None:
            v_unit = gl.load(scales.v + key_head)
        k, v = unit, unit
    return Units(unit, k, v), v_unit


@gluon.jit
def scales_of(units, block, cfg: gl.constexpr):
    """Scales of K and V of a block; before the first one, of that."""
    k, v = units.score, units.score
    if cfg.BLOCK_SCALES:
        block = gl.maximum(block, 0)
        k, v = gl.load(units.k + block), gl.load(units.v + block)
    return k, v


@gluon.jit
def walk8(
    ME: gl.constexpr, now, q, stop, channels, rows, units, score, MASKED: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Blocks before `now.block`, down to `stop`."""
    for _ in range(now.block - stop):
        now = next_block8(ME, now, q, channels, rows, units, score, MASKED, cfg)
    return now


@gluon.jit
def issue_scores8(q, i, channels, cfg: gl.constexpr):
    """S = Q K^T of block i, under way; its columns in the order of `softmax.py`."""
    k = channels.k.tile(i).reshape([cfg.BLOCK_N, cfg.BLOCK_D]).permute((1, 0))
    return warpgroup_mma(q, k, empty_accumulator(cfg.BLOCK_N, 8), use_acc=False, is_async=True)


@gluon.jit
def issue_output8(now, channels, cfg: gl.constexpr):
    """O += P V of block i, under way."""
    channels.v.acquire(now.i)
    v = channels.v.tile(now.i).reshape([cfg.BLOCK_DV, cfg.BLOCK_N]).permute((1, 0))
    return warpgroup_mma(weights_operand(now.p), v, now.o, is_async=True)


@gluon.jit
def scores8(s, rows, unit, score, cfg: gl.constexpr):
    """From products to scores in base 2, less the factor that comes second."""
    scaled = Score(unit, score.softcap, score.alibi_ptr, score.alibi_batch, score.sink_ptr)
    return scores_log2(s, 0, rows.slope, scaled, cfg), linear_scale(scaled, cfg)


@gluon.jit
def first_block8(
    ME: gl.constexpr, q, i, block, channels, rows, work, units, score, cfg: gl.constexpr
):
    """The block that is visited first, which holds the last keys that its rows see."""
    n0 = block * cfg.BLOCK_N
    k_unit, v_unit = scales_of(units, block, cfg)
    k_next, v_next = scales_of(units, block - 1, cfg)
    channels.k.acquire(i)
    s = issue_scores8(q, i, channels, cfg)
    if cfg.IS_RAGGED:
        channels.v.acquire(i)
        clear_tail8(ME, channels.v.tile(i), work.N - n0, cfg)
    s = warpgroup_mma_wait(0, deps=[s])
    channels.k.release_operand(i)
    s, factor = scores8(s, rows, unit_of(units, k_unit, cfg), score, cfg)
    if cfg.HAS_LEFT or cfg.HAS_RIGHT:  # noqa: SIM114 -- known while compiling
        s = masked8(s, rows.start, rows.stop, n0, cfg)
    elif n0 + cfg.BLOCK_N > work.N:
        s = masked8(s, rows.start, rows.stop, n0, cfg)
    row_max = gl.max(s, 1) * factor
    p = exponentials(s * factor - (pivot_of(row_max, True) - WEIGHT_LOG2)[:, None], True, cfg)
    return Progress(
        i,
        block,
        packed_weights(p, cfg.BLOCK_DV),
        empty_accumulator(cfg.BLOCK_DV, 8),
        row_max,
        partial_row_sum(p),
        v_unit,
        k_next,
        v_next,
    )


@gluon.jit
def unit_of(units, k_unit, cfg: gl.constexpr):
    """What the products of a block are scaled with."""
    unit = units.score
    if cfg.BLOCK_SCALES:
        unit = unit * k_unit
    return unit


@gluon.jit
def next_block8(
    ME: gl.constexpr, now, q, channels, rows, units, score, MASKED: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Scores of the block before `now.block`, and the output of that one."""
    i, block = now.i + 1, now.block - 1
    k_next, v_next = scales_of(units, block - 1, cfg)
    channels.k.acquire(i)
    wait_for_turn(ME, cfg)
    s = issue_scores8(q, i, channels, cfg)
    o = issue_output8(now, channels, cfg)
    give_turn(ME, cfg)
    s = warpgroup_mma_wait(1, deps=[s])
    channels.k.release_operand(i)
    s, factor = scores8(s, rows, unit_of(units, now.k_next, cfg), score, cfg)
    if MASKED:
        s = masked8(s, rows.start, rows.stop, block * cfg.BLOCK_N, cfg)
    row_max = raised8(now.row_max, gl.max(s, 1) * factor)
    if cfg.WAITS == "early":
        pin(row_max)
        o = warpgroup_mma_wait(0, deps=[o])
        channels.v.release_operand(now.i)
    pivot = pivot_of(row_max, MASKED)
    rescale = gl.exp2(now.row_max - pivot)
    p = exponentials(s * factor - (pivot - WEIGHT_LOG2)[:, None], MASKED, cfg)
    row_sum = rescaled(now.row_sum, rescale) + partial_row_sum(p)
    if cfg.WAITS != "early":
        if cfg.WAITS == "late":
            pin(row_sum)
        o = warpgroup_mma_wait(0, deps=[o])
        channels.v.release_operand(now.i)
    if cfg.BLOCK_SCALES:
        rescale = rescale * ratio(now.v_unit, now.v_next)
    p = packed_weights(p, cfg.BLOCK_DV)
    o = rescaled_where_needed(o, rescale)
    return Progress(i, block, p, o, row_max, row_sum, now.v_next, k_next, v_next)


@gluon.constexpr_function
def bytes_of_values(warps):
    """Float8 rows of 128 keys as threads like them: 16 bytes each, neighbours side by side."""
    return gl.BlockedLayout([1, 16], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def clear_tail8(ME: gl.constexpr, v, count, cfg: gl.constexpr):
    """Zero the keys of a block of V from `count` on, which belong to another sequence or to none.

    Their weight is zero, but what memory holds there may be NaN. All consumers write the same
    values, so none waits for another.
    """
    STEP: gl.constexpr = 32
    DIMS: gl.constexpr = cfg.BLOCK_DV
    LAYOUT: gl.constexpr = bytes_of_values(CONSUMER_WARPS)
    v = v.reshape([DIMS, cfg.BLOCK_N])
    if count < cfg.BLOCK_N:
        key = gl.arange(0, cfg.BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        for first in gl.static_range(0, DIMS, STEP):
            part = v.slice(first, STEP)
            x = part.load(LAYOUT).to(gl.int8, bitcast=True)
            x = gl.where((key < count)[None, :], x, gl.zeros_like(x))
            part.store(x.to(v.dtype, bitcast=True))
        show_written(FIRST_BARRIER + cfg.CONSUMERS + ME)
