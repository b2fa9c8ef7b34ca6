"""The forward kernel: FlashAttention-3 (Shah et al. 2024), algorithm 2.

A persistent program has three kinds of roles: a producer warp copies, consumer warpgroups multiply
(warp specialisation), each with 64 rows of the tile of queries, and for sequences of different
lengths a scheduler warp looks up the tiles. A consumer issues the scores of a block together with
the output of the previous block, and computes its exponentials while another warpgroup uses the
tensor cores.

`attend_tiles` is the loop over tiles and `attend` the KV loop. The float8 kernel runs both with its
own arithmetic in place of `Math16`.

The barriers, with C consumers. Use `i` of a ring is in slot `i % SLOTS` and has the parity of its
round, `i // SLOTS`: a wait for full passes it, a wait for empty the other one.

| barrier | who arrives | who waits | use |
|---|---|---|---|
| q full | TMA | consumer c | tile * C + c |
| q empty | consumer c: its rows, or the output in their place, are read | producer | as above |
| k, v full | TMA | all consumers | blocks so far |
| k, v empty | one thread of each consumer, after the product | producer | as above |
| work full | producer; with cfg.IS_RAGGED the scheduler | the other roles | tiles so far |
| work empty | these roles, when they are done with the tile | who sends it | as above |
| FIRST_BARRIER + c | the consumer before c: ping-pong | consumer c | each block of a tile |
| FIRST_BARRIER + C + c | all warps of consumer c | the same: rows of V are cleared | |
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....gpu.intrinsics import wait_for_earlier_kernels
from ..shared.pipeline import (
    CONSUMER_ROWS,
    CONSUMER_WARPS,
    FIRST_BARRIER,
    Described,
    aggregate,
    await_ping_pong,
    close_ping_pong,
    copy_to_global,
    copy_to_shared,
    empty_accumulator,
    left_operand,
    log2,
    make_channel,
    make_queue,
    open_ping_pong,
    pass_ping_pong,
    pin,
    row_values,
    rows_of_heads,
    run_roles,
    shared_rows,
    show_written,
    store_float32,
)
from ..shared.schedule import (
    NUMBERS,
    WORK_NUMBERS,
    Kept,
    Mask,
    Sizes,
    batch_of,
    blocks_after,
    blocks_before,
    clear_rows,
    entry_size,
    first_entry,
    first_seen_key,
    has_cleared,
    key_of_block,
    kind_of_keys,
    list_of,
    marks_of,
    next_number,
    own_blocks,
    put_work,
    read_work,
    retire,
    seen_by,
    visited_block,
    work_of,
)
from ..shared.softmax import (
    LN2,
    LOG2E,
    NO_WEIGHT,
    SLACK_LOG2,
    Draws,
    Dropout,
    Place,
    Score,
    alibi_slope,
    as_left_operand,
    draws_of,
    dropped,
    exponents,
    has_starts,
    kept_keys,
    lazy_max,
    linear_scale,
    masked,
    masked_by_bits,
    masked_by_intervals,
    own_mask,
    paired,
    partial_logarithms,
    partial_row_sum,
    pivot_of,
    rescaled,
    rescaled_where_needed,
    scores_log2,
    whole_row_sum,
)

# The loop that clears values: Triton 3.9, which has this name, spills less if it unrolls it.
IS_UNROLLED = gl.constexpr(hasattr(gluon, "aggregate"))


@aggregate
class Rows:
    """The rows of a consumer, and the keys that they see."""

    b: gl.tensor
    h: gl.tensor
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
        self, b, h, start, stop, shift, slope, entries, masks, first, first_key, draws,
        unseen,
    ):  # fmt: skip
        self.b = b
        self.h = h
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
    p: gl.tensor  # (64, BLOCK_N / 2) its weights, `paired`; of the last block (64, KEYS / 2)
    o: gl.tensor  # (64, BLOCK_DV) output of the previous blocks
    o_tail: gl.tensor
    rescale: gl.tensor  # (64,) the factor that is not yet applied to that output
    row_max: gl.tensor  # (64,) lazy, see `lazy_max`
    row_sum: gl.tensor  # (64, 4)
    largest: gl.tensor  # (64,) the largest score; not read without HAS_STATISTICS
    logarithms: gl.tensor  # (64, 4) sums of p log2 p; not read without HAS_ENTROPY

    @gluon.constexpr_function
    def __init__(self, i, block, p, o, o_tail, rescale, row_max, row_sum, largest, logarithms):
        self.i = i
        self.block = block
        self.p = p
        self.o = o
        self.o_tail = o_tail
        self.rescale = rescale
        self.row_max = row_max
        self.row_sum = row_sum
        self.largest = largest
        self.logarithms = logarithms


@gluon.jit
def consumer(
    ME: gl.constexpr, output, channels, sizes, mask, score, cfg: gl.constexpr
):  # fmt: skip
    """The consumer of 16-bit tiles."""
    attend_tiles(math16, gl.to_tensor(ME), output, channels, None, sizes, mask, score, cfg)


@gluon.jit
def attend_tiles(
    math_of: gl.constexpr, me, output, channels, scales, sizes, mask, score, cfg: gl.constexpr
):  # fmt: skip
    """Process tiles until there are no more; `math_of` returns the arithmetic of a tile."""
    if cfg.SPANS > 0:
        wait_for_earlier_kernels()  # one of them writes the lists
    open_ping_pong(me, cfg)
    count = 0  # tiles so far
    i = 0  # blocks so far
    channels.work.acquire(count)
    work = read_work(channels.work, count, sizes, CONSUMER_WARPS, cfg)
    while work.begin < work.end:
        o, o_tail, done, math = attend(
            math_of, me, count, i, channels, scales, sizes, work, mask, score, cfg
        )
        # Read again, because the KV loop has no registers left for it.
        work = read_work(channels.work, count, sizes, CONSUMER_WARPS, cfg)
        scale, lse = math.normalisation(me, done, work, score.sink_ptr, cfg)
        store_number(me, lse, output.lse_ptr, work, sizes, cfg)
        if cfg.HAS_STATISTICS:
            store_number(me, done.largest * LN2, output.largest_ptr, work, sizes, cfg)
        if cfg.HAS_ENTROPY:
            entropy = entropy_of(done, scale, score.sink_ptr, cfg)
            store_number(me, entropy, output.entropy_ptr, work, sizes, cfg)
        o, o_tail = finished_output(o, o_tail, cfg)
        channels.v.release_operand(done.i)
        i = pass_blocks(me, done.i + 1, blocks_after(done.block, work, cfg), channels, cfg)
        tma.store_wait(0)
        scale = math.output_scale(scale, done, cfg)
        if cfg.HAS_DROPOUT:
            scale = scale * score.dropout.scale
        o = rescaled(o, scale)
        store_output(me, o, channels.o, 0, output, work, sizes, cfg.BLOCK_DV, cfg)
        if cfg.TAIL_DV > 0:
            o_tail = rescaled(o_tail, scale)
            store_output(
                me, o_tail, channels.o_tail, cfg.BLOCK_DV, output, work, sizes, cfg.TAIL_DV, cfg
            )
        if cfg.IS_Q_REUSED:
            tma.store_wait(0)
            channels.q.release(count * cfg.CONSUMERS + me)
        channels.work.release(count)
        count += 1
        channels.work.acquire(count)
        work = read_work(channels.work, count, sizes, CONSUMER_WARPS, cfg)
    tma.store_wait(0)
    close_ping_pong(me, cfg)


@gluon.jit
def attend(
    math_of: gl.constexpr, me, count, i, channels, scales, sizes, work, mask, score,
    cfg: gl.constexpr,
):  # fmt: skip
    """The KV loop, in the order of `schedule.visited_block`. Returns the output, whose last product
    is in flight, the state of the loop, and the arithmetic of the tile.
    """
    first_row = work.m0 + me * CONSUMER_ROWS
    begin, full_begin, full_end, end = own_blocks(first_row, work, sizes, mask, cfg)
    rows = rows_of(me, work, sizes, mask, score, cfg)
    math = math_of(me, scales, sizes, work, score, cfg)
    q_use = count * cfg.CONSUMERS + me
    q, q_tail = queries(q_use, channels, cfg)
    first = begin if cfg.IS_ASCENDING else end - 1
    i = pass_blocks(me, i, blocks_before(first, work, cfg), channels, cfg)
    now = math.first_block(me, q, q_tail, i, first, channels, rows, work, score, cfg)
    if cfg.LAST_KEYS < cfg.BLOCK_N:  # `now.p` has fewer columns than in the loop
        now = math.next_block(me, now, q, q_tail, channels, rows, score, False, cfg)
    if cfg.HAS_Q_IN_REGISTERS and not cfg.IS_Q_REUSED:  # a product has read the registers
        channels.q.release_operand(q_use)
    if cfg.IS_ASCENDING:  # only under a plain causal mask, which ends with the masked blocks
        now = key_loop(math, me, now, q, q_tail, full_end, channels, rows, score, False, cfg)
        now = key_loop(math, me, now, q, q_tail, end, channels, rows, score, True, cfg)
    else:  # three phases: masked, full, masked
        if cfg.HAS_RIGHT or cfg.HAS_CHUNK or cfg.HAS_LISTS or cfg.HAS_SPAN:
            now = key_loop(math, me, now, q, q_tail, full_end, channels, rows, score, True, cfg)
        now = key_loop(math, me, now, q, q_tail, full_begin, channels, rows, score, False, cfg)
        if has_starts(cfg) and not cfg.HAS_LISTS:
            now = key_loop(math, me, now, q, q_tail, begin, channels, rows, score, True, cfg)
    if not cfg.HAS_Q_IN_REGISTERS and not cfg.IS_Q_REUSED:
        channels.q.release_operand(q_use)
    o, o_tail = math.issue_output(now, channels, cfg)
    return o, o_tail, now, math


@gluon.jit
def key_loop(
    math, me, now, q, q_tail, stop, channels, rows, score, IS_MASKED: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """The blocks that follow `now.block`: up to `stop`, which is excluded, or down to `stop`."""
    count = stop - 1 - now.block if cfg.IS_ASCENDING else now.block - stop
    for _ in range(count):
        now = math.next_block(me, now, q, q_tail, channels, rows, score, IS_MASKED, cfg)
    return now


@gluon.jit
def queries(q_use, channels, cfg: gl.constexpr):
    """Q and its tail, in registers or in shared memory."""
    channels.q.acquire(q_use)
    # (64, BLOCK_D), and (64, TAIL_D)
    q = channels.q.tile(q_use).reshape([CONSUMER_ROWS, cfg.BLOCK_D])
    q_tail = q
    if cfg.TAIL_D > 0:
        q_tail = channels.q.tail(q_use).reshape([CONSUMER_ROWS, cfg.TAIL_D])
    if cfg.HAS_Q_IN_REGISTERS:
        q = q.load(left_operand(cfg.BLOCK_N, cfg.BITS))
        q_tail = q_tail.load(left_operand(cfg.BLOCK_N, cfg.BITS)) if cfg.TAIL_D > 0 else q
    return q, q_tail


@gluon.jit
def pass_blocks(me, i, count, channels, cfg: gl.constexpr):
    """Skip `count` blocks that no row of this consumer sees, starting at use `i`; return the use
    after them.
    """
    for _ in range(count):
        await_ping_pong(me, cfg)
        pass_ping_pong(me, cfg)
        channels.k.acquire(i)
        channels.k.release(i)
        channels.v.acquire(i)
        channels.v.release(i)
        i += 1
    return i


@gluon.jit
def rows_of(me, work, sizes, mask, score, cfg: gl.constexpr):
    """The rows of this consumer."""
    number = work.m0 + me * CONSUMER_ROWS
    number += gl.arange(0, CONSUMER_ROWS, layout=row_values(cfg.BLOCK_N))
    shift = work.N - work.M
    start, stop = seen_by(number, work.b, work.h, work.start_q, work.M, work.N, mask, cfg)
    start, stop, shift = start - work.first_key, stop - work.first_key, shift - work.first_key
    entries, masks = shift, shift
    if cfg.HAS_LISTS:
        index = list_of(work.b, work.h, work.m0, sizes, mask, cfg)
        entries = first_entry(index, sizes, mask, cfg)
    if cfg.HAS_BLOCK_MASK:
        masks = mask.blocks.bits + me * (CONSUMER_ROWS * cfg.BLOCK_N // 32)
    if cfg.SPANS > 0:
        masks = mask.blocks.intervals + index.to(gl.int64) * (2 * cfg.SPANS * cfg.BLOCK_M)
        masks += me * CONSUMER_ROWS
    slope = alibi_slope(work.b, work.h, score, cfg)
    draws = draws_of(work.b, work.h, score.dropout, cfg)
    first = work.m0 + me * CONSUMER_ROWS
    unseen = shift
    if kind_of_keys(cfg) == "marks":
        unseen = marks_of(work.b, work.h, sizes, mask) + work.first_key
    elif kind_of_keys(cfg) == "range":
        unseen = first_seen_key(work.b, work.M, work.N, mask, cfg)
    return Rows(
        work.b, work.h, start, stop, shift, slope, entries, masks, first, work.first_key,
        draws, unseen,
    )  # fmt: skip


@gluon.jit
def issue_scores(
    q, q_tail, i, channels, FIRST: gl.constexpr, KEYS: gl.constexpr, cfg: gl.constexpr
):
    """Start S = Q K^T of KEYS keys of block i, from key FIRST of the block."""
    # (64, BLOCK_D) @ (BLOCK_D, KEYS) -> (64, KEYS)
    k = channels.k.tile(i).reshape([cfg.BLOCK_N, cfg.BLOCK_D])
    k = some_rows(k, FIRST, KEYS).permute((1, 0))
    s = warpgroup_mma(q, k, empty_accumulator(KEYS, cfg.BITS), use_acc=False, is_async=True)
    if cfg.TAIL_D > 0:
        # (64, TAIL_D) @ (TAIL_D, KEYS) -> (64, KEYS)
        k = channels.k.tail(i).reshape([cfg.BLOCK_N, cfg.TAIL_D])
        k = some_rows(k, FIRST, KEYS).permute((1, 0))
        s = warpgroup_mma(q_tail, k, s, is_async=True)
    return s


@gluon.jit
def add_output(o, o_tail, p, i, channels, FIRST: gl.constexpr, cfg: gl.constexpr):
    """Start O += P V of the keys from FIRST of block i that the weights `p` belong to."""
    KEYS: gl.constexpr = 2 * p.shape[1]
    dtype: gl.constexpr = channels.v.tiles.dtype
    # (64, KEYS) @ (KEYS, BLOCK_DV) -> (64, BLOCK_DV)
    v = some_rows(channels.v.tile(i).reshape([cfg.BLOCK_N, cfg.BLOCK_DV]), FIRST, KEYS)
    o = warpgroup_mma(as_left_operand(p, cfg.BLOCK_DV, dtype), v, o, is_async=True)
    if cfg.TAIL_DV > 0:
        # (64, KEYS) @ (KEYS, TAIL_DV) -> (64, TAIL_DV)
        v = some_rows(channels.v.tail(i).reshape([cfg.BLOCK_N, cfg.TAIL_DV]), FIRST, KEYS)
        o_tail = warpgroup_mma(as_left_operand(p, cfg.TAIL_DV, dtype), v, o_tail, is_async=True)
    return o, o_tail


@gluon.constexpr_function
def power_of_two(count):
    """The largest power of two up to `count`: tiles have no other sizes."""
    return 1 << (count.bit_length() - 1)


@gluon.jit
def some_rows(tile, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """COUNT rows of a tile in shared memory, from row FIRST."""
    if tile.shape[0] > COUNT:
        tile = tile.slice(FIRST, COUNT)
    return tile


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
    place = Place(rows.b, rows.h, rows.first, rows.first_key + n0)
    s = scores_log2(s, place, rows.shift + rows.first_key, rows.slope, score, cfg)
    if IS_MASKED:
        if cfg.SPANS > 0:
            s = masked_by_intervals(s, own, n0, cfg)
        else:
            s = masked(s, rows.start, rows.stop, n0, cfg)
        if cfg.HAS_BLOCK_MASK:
            s = masked_by_bits(s, own)
    return s


@gluon.jit
def as_rows_of(x, values):
    """One value for each row, (64,), in the layout that belongs to the accumulator `x`."""
    return gl.convert_layout(values, gl.SliceLayout(1, x.type.layout), assert_trivial=True)


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
    def first_block(self, me, q, q_tail, i, block, channels, rows, work, score, cfg: gl.constexpr):
        """The first step of the loop."""
        n0, own = key_of_block(block, rows, cfg), own_mask(block, rows, cfg)
        KEYS: gl.constexpr = power_of_two(cfg.LAST_KEYS)
        REST: gl.constexpr = cfg.LAST_KEYS - KEYS  # keys of the block after these
        channels.k.acquire(i)
        # (64, KEYS), and (64, REST)
        s = issue_scores(q, q_tail, i, channels, 0, KEYS, cfg)
        if REST > 0:
            s_rest = issue_scores(q, q_tail, i, channels, KEYS, REST, cfg)
        kept = kept_scores(n0, rows, cfg)
        values = kept_values(n0, work.N - work.first_key - n0, rows, cfg)
        KIND: gl.constexpr = kind_of_keys(cfg)
        if cfg.IS_RAGGED or cfg.HAS_HIDDEN_KEYS:
            channels.v.acquire(i)
            clear_values(me, has_cleared(values, KIND, cfg.BLOCK_N), values, i, channels, cfg)
        if REST > 0:
            s, s_rest = warpgroup_mma_wait(0, deps=[s, s_rest])
        else:
            s = warpgroup_mma_wait(0, deps=[s])
        channels.k.release_operand(i)
        IS_MASKED: gl.constexpr = cfg.HAS_RIGHT or cfg.HAS_LISTS or has_starts(cfg)
        s = finished_scores(s, n0, own, rows, score, IS_MASKED, cfg)
        if not IS_MASKED:  # noqa: SIM102 -- known while compiling
            if n0 + KEYS > work.N:
                s = masked(s, rows.start, rows.stop, n0, cfg)
        factor = linear_scale(score, cfg)
        # (64,)
        row_max = gl.max(s, 1) * factor
        if REST > 0:
            s_rest = finished_scores(s_rest, n0 + KEYS, own, rows, score, True, cfg)
            row_max = gl.maximum(row_max, as_rows_of(s, gl.max(s_rest, 1) * factor))
        pivot = pivot_of(row_max, True)
        # (64, KEYS)
        exponent = exponents(s, factor, pivot, True, cfg)
        p = gl.exp2(exponent)
        weights = paired(p, channels.v.tiles.dtype)
        if cfg.HAS_DROPOUT:  # which does not change the row sum
            weights = dropped(weights, kept)
        # (64, BLOCK_DV), (64, TAIL_DV)
        o = empty_accumulator(cfg.BLOCK_DV)
        o_tail = empty_accumulator(cfg.TAIL_DV) if cfg.TAIL_DV > 0 else i * 0
        # The layouts of the loop, which other widths only name differently.
        SUMS: gl.constexpr = partial_row_sum(empty_accumulator(cfg.BLOCK_N)).type.layout
        row_sum = gl.convert_layout(partial_row_sum(p), SUMS, assert_trivial=True)
        largest, logarithms = i * 0, i * 0
        if cfg.HAS_STATISTICS:
            largest = gl.convert_layout(row_max, row_values(cfg.BLOCK_N), assert_trivial=True)
        if cfg.HAS_ENTROPY:
            logarithms = partial_logarithms(p, exponent)
            logarithms = gl.convert_layout(logarithms, SUMS, assert_trivial=True)
        if REST > 0:
            # (64, REST)
            exponent = exponents(s_rest, factor, as_rows_of(s_rest, pivot), True, cfg)
            p = gl.exp2(exponent)
            row_sum += gl.convert_layout(partial_row_sum(p), SUMS, assert_trivial=True)
            if cfg.HAS_ENTROPY:
                more = partial_logarithms(p, exponent)
                logarithms += gl.convert_layout(more, SUMS, assert_trivial=True)
            channels.v.acquire(i)
            p = paired(p, channels.v.tiles.dtype)
            o, o_tail = add_output(o, o_tail, p, i, channels, KEYS, cfg)
            o, o_tail = finished_output(o, o_tail, cfg)
        return Progress(
            i,
            block,
            weights,
            o,
            o_tail,
            gl.full([CONSUMER_ROWS], 1.0, gl.float32, row_values(cfg.BLOCK_N)),
            gl.convert_layout(row_max, row_values(cfg.BLOCK_N), assert_trivial=True),
            row_sum,
            largest,
            logarithms,
        )

    @gluon.jit
    def next_block(
        self, me, now, q, q_tail, channels, rows, score, IS_MASKED: gl.constexpr,
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
        await_ping_pong(me, cfg)
        # (64, BLOCK_N), (64, BLOCK_DV), (64, TAIL_DV)
        s = issue_scores(q, q_tail, i, channels, 0, cfg.BLOCK_N, cfg)
        o, o_tail = self.issue_output(now, channels, cfg)
        pass_ping_pong(me, cfg)
        kept = kept_scores(n0, rows, cfg)
        s = warpgroup_mma_wait(VALUE_PRODUCTS, deps=[s])
        channels.k.release_operand(i)
        s = finished_scores(s, n0, own, rows, score, IS_MASKED, cfg)
        factor = linear_scale(score, cfg)
        # (64,)
        seen_max = gl.max(s, 1) * factor
        row_max = lazy_max(now.row_max, seen_max, SLACK_LOG2)
        if cfg.WAITS == "early":
            pin(row_max)
            o, o_tail = finished_output(o, o_tail, cfg)
            channels.v.release_operand(now.i)
        pivot = pivot_of(row_max, IS_MASKED or cfg.SCORE_MOD is not None)
        rescale = gl.exp2(now.row_max - pivot)
        # (64, BLOCK_N)
        exponent = exponents(s, factor, pivot, IS_MASKED, cfg)
        p = gl.exp2(exponent)
        # (64, 4)
        row_sum = rescaled(now.row_sum, rescale) + partial_row_sum(p)
        largest, logarithms = now.largest, now.logarithms
        if cfg.HAS_STATISTICS:
            largest = gl.maximum(largest, seen_max)
        if cfg.HAS_ENTROPY:
            drop = gl.maximum(now.row_max - pivot, NO_WEIGHT)
            # (64, 4)
            logarithms = rescaled(logarithms + rescaled(now.row_sum, drop), rescale)
            more = partial_logarithms(p, exponent)
            logarithms += gl.convert_layout(more, row_sum.type.layout, assert_trivial=True)
        if cfg.WAITS != "early":
            if cfg.WAITS == "late":
                pin(row_sum)
            o, o_tail = finished_output(o, o_tail, cfg)
            channels.v.release_operand(now.i)
        p = paired(p, channels.v.tiles.dtype)
        if cfg.HAS_DROPOUT:
            p = dropped(p, kept)
        if IS_MASKED and cfg.HAS_HIDDEN_KEYS:  # here, because the scores need no registers now
            clear_values(me, is_cleared, values, i, channels, cfg)
        return Progress(
            i, block, p, o, o_tail, rescale, row_max, row_sum, largest, logarithms
        )  # fmt: skip

    @gluon.jit
    def issue_output(self, now, channels, cfg: gl.constexpr):
        """Start O += P V of the last block."""
        channels.v.acquire(now.i)
        o, o_tail = rescaled_where_needed(now.o, now.rescale), now.o_tail
        if cfg.TAIL_DV > 0:
            o_tail = rescaled_where_needed(o_tail, now.rescale)
        return add_output(o, o_tail, now.p, now.i, channels, 0, cfg)

    @gluon.jit
    def normalisation(self, me, done, work, sink_ptr, cfg: gl.constexpr):
        """The factor of the output of each row, and its log-sum-exp."""
        return normalisation(me, done.row_max, done.row_sum, work, sink_ptr, cfg)

    @gluon.jit
    def output_scale(self, scale, done, cfg: gl.constexpr):
        """The factor of the output; 16-bit tiles have no scale of V."""
        return scale


@gluon.jit
def math16(me, scales, sizes, work, score, cfg: gl.constexpr):
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
def clear_values(me, is_cleared, kept, i, channels, cfg: gl.constexpr):
    """Zero the rows of block `i` of V that are not `kept`, if there are any."""
    KIND: gl.constexpr = kind_of_keys(cfg)
    if is_cleared:
        channels.v.acquire(i)
        v = channels.v.tile(i).reshape([cfg.BLOCK_N, cfg.BLOCK_DV])
        clear_rows(v, kept, KIND, IS_UNROLLED)
        if cfg.TAIL_DV > 0:
            v = channels.v.tail(i).reshape([cfg.BLOCK_N, cfg.TAIL_DV])
            clear_rows(v, kept, KIND, IS_UNROLLED)
        show_written(FIRST_BARRIER + cfg.CONSUMERS + me)


# Results: the output of a consumer's rows, their log-sum-exp and statistics


class Output(NamedTuple):
    """The destinations of the results."""

    desc: Any  # Described
    ptr: Any
    lse_ptr: Any
    largest_ptr: Any = None  # with HAS_STATISTICS
    entropy_ptr: Any = None


@gluon.jit
def normalisation(me, row_max, row_sum, work, sink_ptr, cfg: gl.constexpr):
    """The factor of the output of each row, and its log-sum-exp; 0 and -inf for padding rows and
    for rows that saw no key.
    """
    # (64,)
    rows = work.m0 + me * CONSUMER_ROWS
    rows += gl.arange(0, CONSUMER_ROWS, layout=row_values(cfg.BLOCK_N))
    # (64, 4) -> (64,)
    row_sum = whole_row_sum(row_sum, cfg)
    weight = 1.0
    if sink_ptr is not None:  # a key of logit `sink` whose value is zero
        sink = gl.load(sink_ptr + work.h).to(gl.float32) * LOG2E
        with_sink = gl.maximum(row_max, sink)
        pivot = pivot_of(with_sink, True)
        weight = gl.exp2(row_max - pivot)
        row_sum = row_sum * weight + gl.exp2(sink - pivot)
        row_max = with_sink
    seen = (row_sum != 0.0) & (rows < work.M)  # NaN was seen
    safe_sum = gl.where(seen, row_sum, 1.0)
    lse = gl.where(seen, (row_max + log2(safe_sum)) * LN2, -float("inf"))
    return gl.where(seen, weight / safe_sum, 0.0), lse


@gluon.jit
def entropy_of(done, scale, sink_ptr, cfg: gl.constexpr):
    """The entropy of each row in nats; `scale` is from `normalisation`.

    A sink is one more outcome. The choice between it and the keys has an entropy, and the keys have
    theirs with the probability `share`.
    """
    # (64, 4) -> (64,)
    row_sum = whole_row_sum(done.row_sum, cfg)
    safe_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
    entropy = (log2(safe_sum) - whole_row_sum(done.logarithms, cfg) / safe_sum) * LN2
    if sink_ptr is not None:
        share = scale * row_sum
        entropy = share * entropy + information(share) + information(1.0 - share)
    return entropy


@gluon.jit
def information(p):
    """-p ln p; 0 of 0, and of what rounding makes less."""
    return -p * log2(gl.where(p > 0.0, p, 1.0)) * LN2


@gluon.jit
def store_number(me, x, ptr, work, sizes, cfg: gl.constexpr):
    """Store a number of each row, into (B, Hq, M) or, packed, (Hq, total_q)."""
    rows = work.m0 + me * CONSUMER_ROWS
    rows += gl.arange(0, CONSUMER_ROWS, layout=row_values(cfg.BLOCK_N))
    if not cfg.IS_PACKED:
        offset = (work.b * sizes.heads + work.h).to(gl.int64) * sizes.M
    else:
        offset = work.h.to(gl.int64) * sizes.total_q + work.start_q
    gl.store(ptr + offset + rows, x, mask=rows < work.M)


@gluon.jit
def store_output(
    me, o, tiles, COLUMN: gl.constexpr, output, work, sizes, COLUMNS: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Store the output's columns from COLUMN, rounded or, of a partial problem, in float32."""
    if cfg.IS_PARTIAL:
        row = work.m0 + me * CONSUMER_ROWS
        start, M, heads = work.start_q, work.M, sizes.heads
        store_float32(o, output.ptr, row, COLUMN, cfg.DV, start, M, work.h, heads)
    else:
        store_rounded(me, o, tiles, COLUMN, output, work, COLUMNS, cfg)


@gluon.jit
def store_rounded(
    me, o, tiles, COLUMN: gl.constexpr, output, work, COLUMNS: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Store the output's columns from COLUMN, through shared memory: by TMA, which clips at the end
    of the tensor, or by the threads if a sequence can end before it.
    """
    row = work.m0 + me * CONSUMER_ROWS
    tile = tiles.index(me)
    tile.reshape([CONSUMER_ROWS, COLUMNS]).store(o.to(tiles.dtype))
    fence_async_shared()  # TMA will read the tile, or overwrite it with the next queries
    if cfg.IS_RAGGED:
        LAYOUT: gl.constexpr = rows_of_heads(COLUMNS, CONSUMER_WARPS)
        # (64, COLUMNS)
        x = tile.reshape([CONSUMER_ROWS, COLUMNS]).load(LAYOUT)
        offs = row + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
        dims = COLUMN + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        strides = output.desc.tiles.strides  # of (batch, row, head, dim)
        offsets = (work.start_q + offs).to(gl.int64) * strides[1] + work.h.to(gl.int64) * strides[2]
        if not cfg.IS_PACKED:
            offsets += work.b.to(gl.int64) * strides[0]
        # Rows start at multiples of 16 bytes, as TMA requires.
        offsets = gl.multiple_of(offsets, [1, 8])
        gl.store(output.ptr + offsets + dims, x, mask=(offs < work.M) & (dims < cfg.DV))
    elif COLUMN == 0:
        copy_to_global(output.desc.tiles, [work.b, row, work.h, 0], tile)
    else:
        copy_to_global(output.desc.tails, [work.b, row, work.h, COLUMN], tile)


# Shared memory and its barriers


class Channels(NamedTuple):
    """Everything in shared memory."""

    q: Any  # a slot for each consumer, or two
    k: Any
    v: Any
    o: Any  # plain tiles, one for each consumer
    o_tail: Any
    work: Any  # the tiles of queries, and the keys that they see


@gluon.jit
def make_tiles(
    dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """COUNT tiles, and COUNT tails if there is a tail."""
    tiles = gl.allocate_shared_memory(dtype, [COUNT, 1, ROWS, 1, COLUMNS], shared_rows(COLUMNS))
    tails = tiles
    if TAIL > 0:
        tails = gl.allocate_shared_memory(dtype, [COUNT, 1, ROWS, 1, TAIL], shared_rows(TAIL))
    return tiles, tails


@gluon.jit
def make_channels(dtype: gl.constexpr, cfg: gl.constexpr):
    """Allocate the rings and set up their barriers."""
    C: gl.constexpr = cfg.CONSUMERS
    ROWS: gl.constexpr = CONSUMER_ROWS
    q, q_tail = make_tiles(dtype, cfg.Q_SLOTS, ROWS, cfg.BLOCK_D, cfg.TAIL_D)
    o, o_tail = q, q_tail
    if not cfg.IS_Q_REUSED:
        o, o_tail = make_tiles(dtype, C, ROWS, cfg.BLOCK_DV, cfg.TAIL_DV)
    k, k_tail = make_tiles(dtype, cfg.STAGES, cfg.BLOCK_N, cfg.BLOCK_D, cfg.TAIL_D)
    v, v_tail = make_tiles(dtype, cfg.STAGES, cfg.BLOCK_N, cfg.BLOCK_DV, cfg.TAIL_DV)
    channels = Channels(
        make_channel(q, q_tail, cfg.Q_SLOTS, 1),
        make_channel(k, k_tail, cfg.STAGES, C),
        make_channel(v, v_tail, cfg.STAGES, C),
        o,
        o_tail,
        make_queue(2, WORK_NUMBERS, C + 1 if cfg.IS_RAGGED else C),
    )
    fence_async_shared()
    return channels


# The scheduler


@gluon.jit
def scheduler(counter_ptr, channels, sizes, at, mask, cfg: gl.constexpr):
    """If sequences can be shorter than the tensors, take tiles until there are no more, and send
    them to the other roles: one tile ahead, so that no load waits for lengths. Otherwise the
    producer takes tiles, as late as it can: long tiles should go to programs that are idle.
    """
    if cfg.IS_RAGGED:
        wait_for_earlier_kernels()  # one of them writes the list
        count = 0  # tiles so far
        work = send_work(gl.program_id(0), count, channels, sizes, at, mask, cfg)
        while work.begin < work.end:
            count += 1
            channels.work.await_empty(count)  # before, a tile would be taken two tiles ahead
            number = next_number(counter_ptr)
            work = send_work(number, count, channels, sizes, at, mask, cfg)
        retire(counter_ptr)


@gluon.jit
def send_work(number, count, channels, sizes, at, mask, cfg: gl.constexpr):
    """Send the tile of index `number`, the program's tile `count`, and return its work."""
    work = work_of(number, sizes, at, mask, cfg)
    put_work(channels.work, count, work, cfg)
    return work


# The producer


@gluon.constexpr_function
def producer_registers(cfg):
    """More where a block is many copies: what the producer spills moves registers of consumers."""
    if cfg.PAGE_SIZE == 0:
        return 24
    return 40 if cfg.PAGE_BOX < 32 and cfg.CONSUMERS == 2 else 32


@gluon.jit
def producer(q, k, v, counter_ptr, channels, sizes, at, mask, cfg: gl.constexpr):
    """Load all tiles of this program."""
    load_tiles(load_blocks, q, k, v, counter_ptr, channels, sizes, at, mask, cfg)


@gluon.jit
def load_tiles(
    load_keys: gl.constexpr, q, k, v, counter_ptr, channels, sizes, at, mask, cfg: gl.constexpr
):  # fmt: skip
    """For each tile of this program, load the queries and, with `load_keys`, the blocks of keys and
    values.
    """
    count = 0  # tiles so far
    i = 0  # blocks so far
    if cfg.IS_RAGGED:
        channels.work.acquire(count)
        work = read_work(channels.work, count, sizes, 1, cfg)
    else:
        if cfg.SPANS > 0:
            wait_for_earlier_kernels()  # one of them writes the lists
        work = send_work(gl.program_id(0), count, channels, sizes, at, mask, cfg)
    while work.begin < work.end:
        load_queries(q, count, channels, work, at, cfg)
        i = load_keys(k, v, i, channels, work, sizes, at, mask, cfg)
        count += 1
        if cfg.IS_RAGGED:
            channels.work.release(count - 1)
            channels.work.acquire(count)
            work = read_work(channels.work, count, sizes, 1, cfg)
        else:
            number = next_number(counter_ptr)
            work = send_work(number, count, channels, sizes, at, mask, cfg)
    if not cfg.IS_RAGGED:
        retire(counter_ptr)


@gluon.jit
def load_queries(q, count, channels, work, at, cfg: gl.constexpr):
    """Load the queries of a tile: a slot for each consumer."""
    batch = batch_of(work.b, at.cu_seqlens_q)
    CONSUMERS: gl.constexpr = cfg.CONSUMERS
    for c in gl.static_range(CONSUMERS):
        use = count * CONSUMERS + c
        row = work.start_q + work.m0 + c * CONSUMER_ROWS
        load_tile(q, channels.q, use, ((batch, row),), work.h, cfg.BLOCK_D, cfg.TAIL_D)


@gluon.jit
def load_blocks(k, v, i, channels, work, sizes, at, mask, cfg: gl.constexpr):
    """Load K and V of the tile; return the number of blocks so far."""
    batch = batch_of(work.b, at.cu_seqlens_k)
    if at.cache_batch_idx is not None:
        batch = gl.load(at.cache_batch_idx + work.b).to(gl.int32)
    head = work.h // sizes.group
    for j in range(work.end - work.begin):
        block = visited_block(j, work, cfg)
        row = work.start_k + work.first_key
        if cfg.HAS_LISTS:
            number = list_of(work.b, work.h, work.m0, sizes, mask, cfg)
            row += gl.load(first_entry(number, sizes, mask, cfg) + entry_size(cfg) * block)
        else:
            row += block * cfg.BLOCK_N
        boxes = ((batch, row),)
        if cfg.PAGE_SIZE > 0:
            boxes = boxes_in_pages(block, work, sizes, at, cfg)
        load_tile(k, channels.k, i, boxes, head, cfg.BLOCK_D, cfg.TAIL_D)
        load_tile(v, channels.v, i, boxes, head, cfg.BLOCK_DV, cfg.TAIL_DV)
        i += 1
    return i


@gluon.jit
def boxes_in_pages(block, work, sizes, at, cfg: gl.constexpr):
    """(page, row of it) of each box of a block of keys. Boxes past the end are copies of the last
    one: the table need not have an entry for them.
    """
    COUNT: gl.constexpr = cfg.BLOCK_N // cfg.PAGE_BOX
    OF_PAGE: gl.constexpr = cfg.PAGE_SIZE // cfg.PAGE_BOX
    table = at.page_table + work.b.to(gl.int64) * sizes.total_k
    last = (gl.maximum(work.N, 1) - 1) // cfg.PAGE_BOX
    boxes = ()
    for n in gl.static_range(COUNT):
        box = gl.minimum(block * COUNT + n, last)
        page = gl.load(table + box // OF_PAGE).to(gl.int32)
        boxes += ((page, box % OF_PAGE * cfg.PAGE_BOX),)  # type: ignore[assignment]  # it grows
    return boxes


@gluon.jit
def load_tile(x, channel, i, boxes, head, COLUMNS: gl.constexpr, TAIL: gl.constexpr):
    """Start the copy of `boxes`, (batch, first row) of each, into slot `i`, one below the other;
    zeros outside of the tensor.
    """
    COUNT: gl.constexpr = len(boxes)
    BYTES: gl.constexpr = COUNT * x.tiles.block_type.nbytes * (COLUMNS + TAIL) // COLUMNS
    full = channel.acquire_empty(i, BYTES)
    for n in gl.static_range(COUNT):
        batch, row = boxes[n]
        tile = box_of(channel.tile(i), n, COUNT)
        copy_to_shared(x.tiles, [batch, row, head, 0], full, tile)
        if TAIL > 0:
            tail = box_of(channel.tail(i), n, COUNT)
            copy_to_shared(x.tails, [batch, row, head, COLUMNS], full, tail)


@gluon.jit
def box_of(tile, N: gl.constexpr, COUNT: gl.constexpr):
    """Box N of the COUNT boxes of a tile."""
    if COUNT > 1:
        tile = tile.slice(N * (tile.shape[1] // COUNT), tile.shape[1] // COUNT, 1)
    return tile


# The kernel


@gluon.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, q_tail_desc, k_tail_desc, v_tail_desc, o_tail_desc, out_ptr,
    lse_ptr, counter_ptr, at, pointers, B, M, N, total_q, total_k, heads, group, swizzle, tiles,
    left, right, chunk, alibi_batch, scale, softcap, first_kept, drop_scale, blocks,
    cfg: gl.constexpr,
):  # fmt: skip
    """Output, log-sum-exp and statistics of every tile."""
    sizes = Sizes(B, M, N, total_q, total_k, heads, group, swizzle, tiles)
    mask = Mask(left, right, chunk, blocks, at.q_runs, at.k_runs)
    dropout = Dropout(pointers.rng_state, first_kept, drop_scale)
    score = Score(
        scale, softcap, pointers.alibi_slopes, alibi_batch, pointers.sink, dropout,
        pointers.captured, pointers.captured_integers,
    )  # fmt: skip
    q, k, v = (
        Described(q_desc, q_tail_desc),
        Described(k_desc, k_tail_desc),
        Described(v_desc, v_tail_desc),
    )
    output = Output(
        Described(o_desc, o_tail_desc), out_ptr, lse_ptr, pointers.largest, pointers.entropy
    )  # fmt: skip
    channels = make_channels(q_desc.dtype, cfg)
    run_roles(
        [
            (consumer, (0, output, channels, sizes, mask, score, cfg)),
            (consumer, (1, output, channels, sizes, mask, score, cfg)),
            (consumer, (2, output, channels, sizes, mask, score, cfg)),
        ][: cfg.CONSUMERS],
        [
            (producer, (q, k, v, counter_ptr, channels, sizes, at, mask, cfg)),
            (scheduler, (counter_ptr, channels, sizes, at, mask, cfg)),
        ],
        producer_registers(cfg),
    )
