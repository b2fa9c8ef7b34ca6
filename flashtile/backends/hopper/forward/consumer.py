"""A consumer: one warpgroup with 64 rows of the tile of queries.

FlashAttention-3 (Shah et al. 2024), algorithm 2: a consumer issues the scores of a block together
with the output of the previous block, and computes its exponentials while another warpgroup uses
the tensor cores.

`attend_tiles` is the loop over tiles and `attend` the KV loop. The float8 kernel runs both with its
own arithmetic in place of `Math16`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ....gpu.intrinsics import wait_for_earlier_kernels
from ..shared.channels import await_ping_pong, close_ping_pong, open_ping_pong, pass_ping_pong
from ..shared.dropout import Draws, draws_of, dropped, kept_keys
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
from ..shared.schedule import (
    blocks_after,
    blocks_before,
    first_entry,
    first_seen_key,
    key_of_block,
    list_of,
    marks_of,
    own_blocks,
    read_work,
    seen_by,
)
from ..shared.softmax import (
    SLACK_LOG2,
    alibi_slope,
    as_left_operand,
    distances,
    has_starts,
    lazy_max,
    linear_scale,
    masked,
    masked_by_bits,
    masked_by_intervals,
    own_mask,
    paired,
    partial_row_sum,
    pivot_of,
    rescaled,
    rescaled_where_needed,
    scores_log2,
)
from ..shared.unseen import Kept, clear_rows, has_cleared, kind_of_keys
from .results import normalisation, store_lse, store_output

# The loop that clears values: Triton 3.9, which has this name, spills less if it unrolls it.
IS_UNROLLED = gl.constexpr(hasattr(gluon, "aggregate"))


@aggregate
class Rows:
    """The rows of a consumer, and the keys that they see."""

    number: gl.tensor  # (64,) index in the sequence
    start: gl.tensor  # (64,) visible keys [start, stop), counted from the tile's first key
    stop: gl.tensor
    shift: gl.tensor  # position of row 0, counted likewise
    slope: gl.tensor  # ALiBi, base 2
    entries: gl.tensor  # pointer to the list of blocks
    masks: gl.tensor  # pointer to these rows in the first tile of bits, or in the intervals
    first: gl.tensor  # the first of them
    first_key: gl.tensor  # of the tile
    draws: Draws
    unseen: gl.tensor  # the number of first keys that no query sees, or a pointer to marks of them

    @gluon.constexpr_function
    def __init__(
        self, number, start, stop, shift, slope, entries, masks, first, first_key, draws, unseen
    ):  # fmt: skip
        self.number = number
        self.start = start
        self.stop = stop
        self.shift = shift
        self.slope = slope
        self.entries = entries
        self.masks = masks
        self.first = first
        self.first_key = first_key
        self.draws = draws
        self.unseen = unseen


@aggregate
class Progress:
    """The state of the KV loop."""

    i: gl.tensor  # use of the rings by the last block whose scores are known
    block: gl.tensor  # index of that block
    p: gl.tensor  # (64, BLOCK_N / 2) its weights, `paired`
    o: gl.tensor  # (64, BLOCK_DV) output of the previous blocks
    o_tail: gl.tensor
    rescale: gl.tensor  # (64,) the factor that is not yet applied to that output
    row_max: gl.tensor  # (64,) lazy, see `lazy_max`
    row_sum: gl.tensor  # (64, 4)

    @gluon.constexpr_function
    def __init__(self, i, block, p, o, o_tail, rescale, row_max, row_sum):
        self.i = i
        self.block = block
        self.p = p
        self.o = o
        self.o_tail = o_tail
        self.rescale = rescale
        self.row_max = row_max
        self.row_sum = row_sum


@gluon.jit
def consumer(
    ME: gl.constexpr, output, channels, sizes, mask, score, cfg: gl.constexpr
):  # fmt: skip
    """The consumer of 16-bit tiles."""
    attend_tiles(math16, ME, output, channels, None, sizes, mask, score, cfg)


@gluon.jit
def attend_tiles(
    math_of: gl.constexpr, ME: gl.constexpr, output, channels, scales, sizes, mask, score,
    cfg: gl.constexpr,
):  # fmt: skip
    """Process tiles until there are no more; `math_of` returns the arithmetic of a tile."""
    if cfg.SPANS > 0:
        wait_for_earlier_kernels()  # one of them writes the lists
    open_ping_pong(ME, cfg)
    count = 0  # tiles so far
    i = 0  # blocks so far
    channels.work.acquire(count)
    work = read_work(channels.work, count, sizes, CONSUMER_WARPS, cfg)
    while work.begin < work.end:
        o, o_tail, done, math = attend(
            math_of, ME, count, i, channels, scales, sizes, work, mask, score, cfg
        )
        # Read again, because the KV loop has no registers left for it.
        work = read_work(channels.work, count, sizes, CONSUMER_WARPS, cfg)
        scale, lse = math.normalisation(ME, done, work, score.sink_ptr, cfg)
        store_lse(ME, lse, output, work, sizes, cfg)
        o, o_tail = finished_output(o, o_tail, cfg)
        channels.v.release_operand(done.i)
        i = pass_blocks(ME, done.i + 1, blocks_after(done.block, work, cfg), channels, cfg)
        tma.store_wait(0)
        scale = math.output_scale(scale, done, cfg)
        if cfg.HAS_DROPOUT:
            scale = scale * score.dropout.scale
        o = rescaled(o, scale)
        store_output(ME, o, channels.o, 0, output, work, sizes, cfg.BLOCK_DV, cfg)
        if cfg.TAIL_DV > 0:
            o_tail = rescaled(o_tail, scale)
            store_output(
                ME, o_tail, channels.o_tail, cfg.BLOCK_DV, output, work, sizes, cfg.TAIL_DV, cfg
            )
        if cfg.IS_Q_REUSED:
            tma.store_wait(0)
            channels.q.release(count * cfg.CONSUMERS + ME)
        channels.work.release(count)
        count += 1
        channels.work.acquire(count)
        work = read_work(channels.work, count, sizes, CONSUMER_WARPS, cfg)
    tma.store_wait(0)
    close_ping_pong(ME, cfg)


@gluon.jit
def attend(
    math_of: gl.constexpr, ME: gl.constexpr, count, i, channels, scales, sizes, work, mask, score,
    cfg: gl.constexpr,
):  # fmt: skip
    """The KV loop, in the order of `schedule.visited_block`. Returns the output, whose last product
    is in flight, the state of the loop, and the arithmetic of the tile.
    """
    first_row = work.m0 + ME * CONSUMER_ROWS
    begin, full_begin, full_end, end = own_blocks(first_row, work, sizes, mask, cfg)
    rows = rows_of(ME, work, sizes, mask, score, cfg)
    math = math_of(ME, scales, sizes, work, score, cfg)
    q_use = count * cfg.CONSUMERS + ME
    q, q_tail = queries(q_use, channels, cfg)
    first = begin if cfg.IS_ASCENDING else end - 1
    i = pass_blocks(ME, i, blocks_before(first, work, cfg), channels, cfg)
    now = math.first_block(ME, q, q_tail, i, first, channels, rows, work, score, cfg)
    if cfg.HAS_Q_IN_REGISTERS and not cfg.IS_Q_REUSED:  # a product has read the registers
        channels.q.release_operand(q_use)
    if cfg.IS_ASCENDING:  # only under a plain causal mask, which ends with the masked blocks
        now = key_loop(math, ME, now, q, q_tail, full_end, channels, rows, score, False, cfg)
        now = key_loop(math, ME, now, q, q_tail, end, channels, rows, score, True, cfg)
    else:  # three phases: masked, full, masked
        if cfg.HAS_RIGHT or cfg.HAS_CHUNK or cfg.HAS_LISTS or cfg.HAS_SPAN:
            now = key_loop(math, ME, now, q, q_tail, full_end, channels, rows, score, True, cfg)
        now = key_loop(math, ME, now, q, q_tail, full_begin, channels, rows, score, False, cfg)
        if has_starts(cfg) and not cfg.HAS_LISTS:
            now = key_loop(math, ME, now, q, q_tail, begin, channels, rows, score, True, cfg)
    if not cfg.HAS_Q_IN_REGISTERS and not cfg.IS_Q_REUSED:
        channels.q.release_operand(q_use)
    o, o_tail = math.issue_output(now, channels, cfg)
    return o, o_tail, now, math


@gluon.jit
def key_loop(
    math, ME: gl.constexpr, now, q, q_tail, stop, channels, rows, score, IS_MASKED: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """The blocks that follow `now.block`: up to `stop`, which is excluded, or down to `stop`."""
    count = stop - 1 - now.block if cfg.IS_ASCENDING else now.block - stop
    for _ in range(count):
        now = math.next_block(ME, now, q, q_tail, channels, rows, score, IS_MASKED, cfg)
    return now


@gluon.jit
def queries(q_use, channels, cfg: gl.constexpr):
    """Q and its tail, in registers or in shared memory."""
    channels.q.acquire(q_use)
    q = channels.q.tile(q_use).reshape([CONSUMER_ROWS, cfg.BLOCK_D])
    q_tail = q
    if cfg.TAIL_D > 0:
        q_tail = channels.q.tail(q_use).reshape([CONSUMER_ROWS, cfg.TAIL_D])
    if cfg.HAS_Q_IN_REGISTERS:
        q = q.load(left_operand(cfg.BLOCK_N, cfg.BITS))
        q_tail = q_tail.load(left_operand(cfg.BLOCK_N, cfg.BITS)) if cfg.TAIL_D > 0 else q
    return q, q_tail


@gluon.jit
def pass_blocks(ME: gl.constexpr, i, count, channels, cfg: gl.constexpr):
    """Skip `count` blocks that no row of this consumer sees, starting at use `i`; return the use
    after them.
    """
    for _ in range(count):
        await_ping_pong(ME, cfg)
        pass_ping_pong(ME, cfg)
        channels.k.acquire(i)
        channels.k.release(i)
        channels.v.acquire(i)
        channels.v.release(i)
        i += 1
    return i


@gluon.jit
def rows_of(ME: gl.constexpr, work, sizes, mask, score, cfg: gl.constexpr):
    """The rows of this consumer."""
    number = work.m0 + ME * CONSUMER_ROWS
    number += gl.arange(0, CONSUMER_ROWS, layout=row_values(cfg.BLOCK_N))
    shift = work.N - work.M
    start, stop = seen_by(number, work.b, work.h, work.start_q, work.M, work.N, mask, cfg)
    start, stop, shift = start - work.first_key, stop - work.first_key, shift - work.first_key
    entries, masks = shift, shift
    if cfg.HAS_LISTS:
        index = list_of(work.b, work.h, work.m0, sizes, mask, cfg)
        entries = first_entry(index, sizes, mask, cfg)
    if cfg.HAS_BLOCK_MASK:
        masks = mask.blocks.bits + ME * (CONSUMER_ROWS * cfg.BLOCK_N // 32)
    if cfg.SPANS > 0:
        masks = mask.blocks.intervals + index.to(gl.int64) * (2 * cfg.SPANS * cfg.BLOCK_M)
        masks += ME * CONSUMER_ROWS
    slope = alibi_slope(work.b, work.h, score, cfg)
    draws = draws_of(work.b, work.h, score.dropout, cfg)
    first = work.m0 + ME * CONSUMER_ROWS
    unseen = shift
    if kind_of_keys(cfg) == "marks":
        unseen = marks_of(work.b, work.h, sizes, mask) + work.first_key
    elif kind_of_keys(cfg) == "range":
        unseen = first_seen_key(work.b, work.M, work.N, mask, cfg)
    return Rows(
        number, start, stop, shift, slope, entries, masks, first, work.first_key, draws, unseen
    )  # fmt: skip


@gluon.jit
def issue_scores(q, q_tail, i, channels, cfg: gl.constexpr):
    """Start S = Q K^T of block i."""
    k = channels.k.tile(i).reshape([cfg.BLOCK_N, cfg.BLOCK_D]).permute((1, 0))
    s = warpgroup_mma(q, k, empty_accumulator(cfg.BLOCK_N, cfg.BITS), use_acc=False, is_async=True)
    if cfg.TAIL_D > 0:
        k = channels.k.tail(i).reshape([cfg.BLOCK_N, cfg.TAIL_D]).permute((1, 0))
        s = warpgroup_mma(q_tail, k, s, is_async=True)
    return s


@gluon.jit
def finished_output(o, o_tail, cfg: gl.constexpr):
    """Wait for `issue_output`."""
    if cfg.TAIL_DV > 0:
        o, o_tail = warpgroup_mma_wait(0, deps=[o, o_tail])
    else:
        o = warpgroup_mma_wait(0, deps=[o])
    return o, o_tail


@gluon.jit
def finished_scores(s, n0, own, rows, score, IS_MASKED: gl.constexpr, cfg: gl.constexpr):
    """Scores in base 2 from products, up to the factor `linear_scale`; -inf where masked. `own` is
    from `own_mask`.
    """
    distance = 0
    if cfg.HAS_ALIBI:
        distance = distances(rows.number + rows.shift, n0, s, cfg)
    s = scores_log2(s, distance, rows.slope, score, cfg)
    if IS_MASKED:
        if cfg.SPANS > 0:
            s = masked_by_intervals(s, own, n0, cfg)
        else:
            s = masked(s, rows.start, rows.stop, n0, cfg)
        if cfg.HAS_BLOCK_MASK:
            s = masked_by_bits(s, own)
    return s


@gluon.jit
def kept_scores(n0, rows, cfg: gl.constexpr):
    """Which scores of the keys from `n0`, which counts from the tile's first key, dropout keeps;
    `n0` without dropout.
    """
    kept = n0
    if cfg.HAS_DROPOUT:
        first_key = rows.first_key + n0
        kept = kept_keys(rows.first, first_key, rows.draws, cfg.BLOCK_N, cfg.DROPOUT_BITS)
    return kept


@aggregate
class Math16:
    """The arithmetic of 16-bit tiles."""

    @gluon.constexpr_function
    def __init__(self):
        pass

    @gluon.jit
    def first_block(
        self, ME: gl.constexpr, q, q_tail, i, block, channels, rows, work, score, cfg: gl.constexpr
    ):
        """The first step of the loop."""
        n0, own = key_of_block(block, rows, cfg), own_mask(block, rows, cfg)
        channels.k.acquire(i)
        s = issue_scores(q, q_tail, i, channels, cfg)
        kept = kept_scores(n0, rows, cfg)
        values = kept_values(n0, work.N - work.first_key - n0, rows, cfg)
        KIND: gl.constexpr = kind_of_keys(cfg)
        if cfg.IS_RAGGED or cfg.HAS_HIDDEN_KEYS:
            channels.v.acquire(i)
            clear_values(ME, has_cleared(values, KIND, cfg.BLOCK_N), values, i, channels, cfg)
        s = warpgroup_mma_wait(0, deps=[s])
        channels.k.release_operand(i)
        IS_MASKED: gl.constexpr = cfg.HAS_RIGHT or cfg.HAS_LISTS or has_starts(cfg)
        s = finished_scores(s, n0, own, rows, score, IS_MASKED, cfg)
        if not IS_MASKED:  # noqa: SIM102 -- known while compiling
            if n0 + cfg.BLOCK_N > work.N:
                s = masked(s, rows.start, rows.stop, n0, cfg)
        factor = linear_scale(score, cfg)
        row_max = gl.max(s, 1) * factor
        p = gl.exp2(s * factor - pivot_of(row_max, True)[:, None])
        weights = paired(p, channels.v.tiles.dtype)
        if cfg.HAS_DROPOUT:  # which does not change the row sum
            weights = dropped(weights, kept)
        return Progress(
            i,
            block,
            weights,
            empty_accumulator(cfg.BLOCK_DV),
            empty_accumulator(cfg.TAIL_DV) if cfg.TAIL_DV > 0 else i * 0,
            gl.full([CONSUMER_ROWS], 1.0, gl.float32, row_values(cfg.BLOCK_N)),
            row_max,
            partial_row_sum(p),
        )

    @gluon.jit
    def next_block(
        self, ME: gl.constexpr, now, q, q_tail, channels, rows, score, IS_MASKED: gl.constexpr,
        cfg: gl.constexpr,
    ):  # fmt: skip
        """One step: scores of the block that follows `now.block`, and the output of `now.block`."""
        VALUE_PRODUCTS: gl.constexpr = 1 if cfg.TAIL_DV == 0 else 2
        i, block = now.i + 1, now.block + (1 if cfg.IS_ASCENDING else -1)
        # Loaded before the product, which hides the latency.
        n0, own = key_of_block(block, rows, cfg), own_mask(block, rows, cfg)
        if IS_MASKED and cfg.HAS_HIDDEN_KEYS:
            values = kept_values(n0, n0 * 0 + cfg.BLOCK_N, rows, cfg)
            is_cleared = has_cleared(values, kind_of_keys(cfg), cfg.BLOCK_N)
        channels.k.acquire(i)
        await_ping_pong(ME, cfg)
        s = issue_scores(q, q_tail, i, channels, cfg)
        o, o_tail = self.issue_output(now, channels, cfg)
        pass_ping_pong(ME, cfg)
        kept = kept_scores(n0, rows, cfg)
        s = warpgroup_mma_wait(VALUE_PRODUCTS, deps=[s])
        channels.k.release_operand(i)
        s = finished_scores(s, n0, own, rows, score, IS_MASKED, cfg)
        factor = linear_scale(score, cfg)
        row_max = lazy_max(now.row_max, gl.max(s, 1) * factor, SLACK_LOG2)
        if cfg.WAITS == "early":
            pin(row_max)
            o, o_tail = finished_output(o, o_tail, cfg)
            channels.v.release_operand(now.i)
        pivot = pivot_of(row_max, IS_MASKED)
        rescale = gl.exp2(now.row_max - pivot)
        p = gl.exp2(s * factor - pivot[:, None])
        row_sum = rescaled(now.row_sum, rescale) + partial_row_sum(p)
        if cfg.WAITS != "early":
            if cfg.WAITS == "late":
                pin(row_sum)
            o, o_tail = finished_output(o, o_tail, cfg)
            channels.v.release_operand(now.i)
        p = paired(p, channels.v.tiles.dtype)
        if cfg.HAS_DROPOUT:
            p = dropped(p, kept)
        if IS_MASKED and cfg.HAS_HIDDEN_KEYS:  # here, because the scores need no registers now
            clear_values(ME, is_cleared, values, i, channels, cfg)
        return Progress(i, block, p, o, o_tail, rescale, row_max, row_sum)

    @gluon.jit
    def issue_output(self, now, channels, cfg: gl.constexpr):
        """Start O += P V of the last block."""
        dtype: gl.constexpr = channels.v.tiles.dtype
        channels.v.acquire(now.i)
        o, o_tail = rescaled_where_needed(now.o, now.rescale), now.o_tail
        if cfg.TAIL_DV > 0:
            o_tail = rescaled_where_needed(o_tail, now.rescale)
        v = channels.v.tile(now.i).reshape([cfg.BLOCK_N, cfg.BLOCK_DV])
        o = warpgroup_mma(as_left_operand(now.p, cfg.BLOCK_DV, dtype), v, o, is_async=True)
        if cfg.TAIL_DV > 0:
            v = channels.v.tail(now.i).reshape([cfg.BLOCK_N, cfg.TAIL_DV])
            p = as_left_operand(now.p, cfg.TAIL_DV, dtype)
            o_tail = warpgroup_mma(p, v, o_tail, is_async=True)
        return o, o_tail

    @gluon.jit
    def normalisation(self, ME: gl.constexpr, done, work, sink_ptr, cfg: gl.constexpr):
        """The factor of the output of each row, and its log-sum-exp."""
        return normalisation(ME, done.row_max, done.row_sum, work, sink_ptr, cfg)

    @gluon.jit
    def output_scale(self, scale, done, cfg: gl.constexpr):
        """The factor of the output; 16-bit tiles have no scale of V."""
        return scale


@gluon.jit
def math16(ME: gl.constexpr, scales, sizes, work, score, cfg: gl.constexpr):
    """16-bit tiles have no scales."""
    return Math16()


@gluon.jit
def kept_values(n0, stop, rows, cfg: gl.constexpr):
    """Which values of the block from key `n0` are kept: those of keys that some query sees, before
    key `stop` of the block.
    """
    first, by = n0, n0
    if kind_of_keys(cfg) == "marks":
        by = rows.unseen + n0
    elif kind_of_keys(cfg) == "range":
        first = rows.unseen - n0
    return Kept(first, stop, by)


@gluon.jit
def clear_values(ME: gl.constexpr, is_cleared, kept, i, channels, cfg: gl.constexpr):
    """Zero the rows of block `i` of V that are not `kept`, if there are any."""
    KIND: gl.constexpr = kind_of_keys(cfg)
    if is_cleared:
        channels.v.acquire(i)
        v = channels.v.tile(i).reshape([cfg.BLOCK_N, cfg.BLOCK_DV])
        clear_rows(v, kept, KIND, IS_UNROLLED)
        if cfg.TAIL_DV > 0:
            v = channels.v.tail(i).reshape([cfg.BLOCK_N, cfg.TAIL_DV])
            clear_rows(v, kept, KIND, IS_UNROLLED)
        show_written(FIRST_BARRIER + cfg.CONSUMERS + ME)
