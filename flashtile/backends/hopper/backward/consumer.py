"""A consumer of the backward up to 128 columns: one warpgroup, with half of a tile's keys. With
more columns the registers do not hold dK and dV of 64 keys; see `split_consumer.py`.

A step processes one block of queries, with transposed scores: S^T = K Q^T, dP^T = V dO^T, then
dV += P^T dO, dK += dS^T Q and dQ = dS K. P^T and dS^T stay in the consumer's registers. dS^T also
goes to shared memory, because dQ needs dS^T of both consumers. Each computes half of the rows or
columns of dQ; with a tail, one computes the columns of the tile, the other those of the tail.

The exponentials of a step overlap with dP^T. S^T of the next step overlaps with the end of this
step, and so does the load of its log-sum-exp if registers allow.

dQ of a step is computed in the next step, from a ring of dS^T that both consumers read, so they
need not be in the same step. dQ goes through a ring to the writer or, with cfg.HAS_DQ_IN_REGISTERS,
directly to memory. As in the forward, one thread releases a slot of Q or dO after the last product
that reads it; the statistics of its rows have been used by then.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..shared.dropout import draws_of
from ..shared.intrinsics import (
    CONSUMER_ROWS,
    CONSUMER_WARPS,
    FIRST_BARRIER,
    after_products,
    aggregate,
    arrive_alone,
    copy_to_global,
    left_operand,
    opaque_zero,
    opaque_zeros,
    recast,
    row_values,
    rows_of_heads,
    shared_rows,
    show_written,
    store_float32,
    sync_warps,
    wait_at_barrier,
    wait_cycles,
)
from ..shared.softmax import alibi_slope
from ..shared.unseen import clear_numbers, clear_rows, has_cleared, kind_of_keys, kind_of_rows
from .dq import add_at_once, put_piece
from .part_sums import store_part
from .products import (
    bits_of,
    issue_dp,
    issue_dq,
    issue_scores,
    kept_by_dropout,
    kept_probabilities,
    own_rows,
    probabilities,
    products_along,
    rows_tail,
    rows_tile,
    score_gradient,
    shared_half,
    statistic,
    whole_tile,
)
from .schedule import (
    block_at,
    first_block_of,
    first_seeing_row,
    kept_keys,
    kept_rows,
    key_work,
    listed_blocks,
    next_block,
    own_blocks,
    own_heads,
    rows_to_mask,
    seeing_rows,
)

NO_ROW = gl.constexpr(2**30)


@aggregate
class Keys:
    """The keys of a consumer."""

    number: gl.tensor  # (64,) index in the sequence
    start: gl.tensor  # (64,) rows that see them, [start, stop)
    stop: gl.tensor
    shift: gl.tensor  # position of row 0
    entries: gl.tensor  # pointer to the list of blocks
    masks: gl.tensor  # pointer to the keys of the first tile of bits, or to the rows' intervals
    dead: gl.tensor  # `first_seeing_row`

    @gluon.constexpr_function
    def __init__(self, number, start, stop, shift, entries, masks, dead):
        self.number = number
        self.start = start
        self.stop = stop
        self.shift = shift
        self.entries = entries
        self.masks = masks
        self.dead = dead


@aggregate
class KeySums:
    """dK / scale and dV of this consumer's keys so far."""

    dk: gl.tensor  # (64, BLOCK_D)
    dv: gl.tensor
    dk_tail: gl.tensor  # (64, TAIL_D), or a number if there is no tail
    dv_tail: gl.tensor

    @gluon.constexpr_function
    def __init__(self, dk, dv, dk_tail, dv_tail):
        self.dk = dk
        self.dv = dv
        self.dk_tail = dk_tail
        self.dv_tail = dv_tail


@gluon.jit
def no_sums(i, cfg: gl.constexpr):
    """The sums before the first step."""
    dk_tail = i * 0
    dv_tail = i * 0
    if cfg.TAIL_D > 0:
        dk_tail = opaque_zeros(cfg.TAIL_D)
        dv_tail = opaque_zeros(cfg.TAIL_D)
    return KeySums(opaque_zeros(cfg.BLOCK_D), opaque_zeros(cfg.BLOCK_D), dk_tail, dv_tail)


@gluon.jit
def consumer(
    ME: gl.constexpr, outputs, channels, tile, sizes, at, mask, score, cfg: gl.constexpr
):  # fmt: skip
    """dK and dV of this consumer's half of a tile of keys, and its share of dQ."""
    work = key_work(tile, sizes, at, mask, cfg)
    if work.end > work.begin:
        sums = query_loop(ME, outputs, channels, work, sizes, mask, score, cfg)
        if cfg.IS_PARTED:
            store_parts(ME, sums, outputs, work, sizes, at, cfg)
        else:
            store_gradients(ME, sums, outputs, channels, work, sizes, score.scale, cfg)
        tma.store_wait(0)
    elif cfg.IS_PARTED and work.n0 < work.N:  # the kernel that adds the parts reads all of them
        store_parts(ME, no_sums(work.n, cfg), outputs, work, sizes, at, cfg)
    elif cfg.HAS_LISTS or cfg.RUNS > 0:  # no query sees the tile
        store_gradients(ME, no_sums(work.n, cfg), outputs, channels, work, sizes, score.scale, cfg)
        tma.store_wait(0)


@gluon.jit
def query_loop(ME: gl.constexpr, outputs, channels, work, sizes, mask, score, cfg: gl.constexpr):
    """The loop over this program's query blocks that see the tile, head by head; returns
    `KeySums`.
    """
    channels.k.acquire(0)
    channels.v.acquire(0)
    if cfg.IS_PACKED or cfg.HAS_HIDDEN_KEYS:
        clear_keys(ME, channels, work, sizes, mask, cfg)
    sums = no_sums(work.n, cfg)
    k = own_rows(ME, channels.k, 0, False, cfg)
    v = own_rows(ME, channels.v, 0, cfg.HAS_V_IN_REGISTERS, cfg)
    total = work.stop_step - work.first_step
    gl.assume(total > 0)
    channels.q.acquire(0)
    s = issue_scores(k, 0, channels, cfg)
    lse = statistic(channels.lse, 0, cfg)
    s = warpgroup_mma_wait(0, deps=[s])
    if cfg.STAGGER > 0 and ME == 1:
        wait_cycles(total, cfg.STAGGER)
    # The first slot has the dS of no step, and the dQ that is computed from it is not added.
    arrive_alone(channels.ds.full.index(0))
    sync_warps()  # otherwise the compiler inserts a barrier into the loop
    HAS_MASKED_END: gl.constexpr = cfg.HAS_LEFT or cfg.HAS_CHUNK or cfg.IS_PACKED or cfg.HAS_LISTS
    i = 0
    added = 0  # block of the workspace in the previous step
    first_head, stop_head = own_heads(work, sizes, cfg)
    for g in range(first_head, stop_head):
        h = work.kv_head * sizes.group + g
        base = h * sizes.blocks + work.first_block  # first block of the head in the workspace
        slope = alibi_slope(work.b, h, score, cfg)
        draws = draws_of(work.b, h, score.dropout, cfg)
        listed = listed_blocks(g, work.end - work.begin, work, sizes, mask, cfg)
        keys = keys_of(ME, listed, work, mask, opaque_zero(g), cfg)
        begin, full_begin, full_end, end = own_blocks(g, listed, work, cfg)
        m = first_block_of(begin, end, cfg)
        before, after = end - full_end, full_begin - begin
        if cfg.IS_ASCENDING:
            before, after = after, before
        if cfg.IS_ASCENDING or HAS_MASKED_END:
            for _ in range(before):
                s, lse, sums, added = step(
                    ME, s, lse, sums, added, i, total, m, base, slope, draws, keys, v, outputs,
                    channels, work, score, True, cfg,
                )  # fmt: skip
                i += 1
                m = next_block(m, cfg)
        if cfg.FULL_STAGGER > 0 and ME == 1 and full_begin < full_end:
            wait_cycles(i, cfg.FULL_STAGGER)
        for _ in range(full_begin, full_end):
            s, lse, sums, added = step(
                ME, s, lse, sums, added, i, total, m, base, slope, draws, keys, v, outputs,
                channels, work, score, False, cfg,
            )  # fmt: skip
            i += 1
            m = next_block(m, cfg)
        if (HAS_MASKED_END or not cfg.IS_ASCENDING) and not cfg.HAS_LISTS:
            for _ in range(after):
                s, lse, sums, added = step(
                    ME, s, lse, sums, added, i, total, m, base, slope, draws, keys, v, outputs,
                    channels, work, score, True, cfg,
                )  # fmt: skip
                i += 1
                m = next_block(m, cfg)
    channels.ds.acquire(i)
    dq = issue_dq(ME, whole_tile(channels.k, 0), i, channels.ds.tiles, cfg)
    dq = warpgroup_mma_wait(0, deps=[dq])
    emit_dq(ME, dq, i, added, outputs, channels.staging, cfg)
    return sums


@gluon.jit
def step(
    ME: gl.constexpr, s, lse, sums, added, i, total, m, base, slope, draws, keys, v, outputs,
    channels, work, score, IS_MASKED: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Process one block of queries: add to `sums` and dQ, and compute S^T of the next block."""
    dtype: gl.constexpr = channels.q.tiles.dtype
    zero = opaque_zero(i)
    all_keys = whole_tile(channels.k, zero)
    k = own_rows(ME, channels.k, zero, False, cfg)
    bits = bits_of(m, keys, cfg)
    m = block_at(m, keys.entries, cfg)
    if IS_MASKED and (cfg.IS_PACKED or cfg.HAS_DEAD_ROWS):
        rows = kept_rows(m, keys.dead, channels.lse.index(i % cfg.Q_STAGES), work, cfg)
        clear_queries(ME, channels, i, rows, cfg)
    channels.dout.acquire(i)
    if not cfg.HAS_V_IN_REGISTERS:
        v = own_rows(ME, channels.v, zero, False, cfg)
    dp = issue_dp(v, statistic(channels.delta, i, cfg), i, channels, cfg)
    scale = score.scale
    if cfg.IS_DP_FIRST:
        scale = after_products(scale, i)
    if not cfg.HAS_CARRIED_LSE:
        lse = statistic(channels.lse, i, cfg)
    row = m * cfg.BLOCK_M
    kept = kept_by_dropout(ME, m, draws, work, cfg)
    p, factor = probabilities(
        s, lse, keys, bits, kept, row, slope, scale, score.softcap, IS_MASKED, cfg
    )
    p = kept_probabilities(p, dtype, cfg)
    s, lse, sums = end_of_step(
        ME, p, factor, dp, lse, sums, added, i, total, k, all_keys, outputs, channels, cfg
    )
    added = base + m
    return s, lse, sums, added


@gluon.jit
def end_of_step(
    ME: gl.constexpr, p, factor, dp, lse, sums, added, i, total, k, all_keys, outputs, channels,
    cfg: gl.constexpr,
):  # fmt: skip
    """The part of a step after P, and dQ of the previous step."""
    dtype: gl.constexpr = p.dtype
    PARTS: gl.constexpr = products_along(cfg)
    dv, dv_tail = add_product(p, channels.dout, i, sums.dv, sums.dv_tail, cfg)
    dp = warpgroup_mma_wait(PARTS, deps=[dp])
    minus_delta = factor
    if cfg.HAS_DROPOUT:  # loaded again: all warps have it when they meet, before the release
        minus_delta = statistic(channels.delta, i, cfg)
    ds = score_gradient(factor, dp, minus_delta, cfg).to(dtype)
    dk, dk_tail = add_product(ds, channels.q, i, sums.dk, sums.dk_tail, cfg)
    if cfg.IS_DQ_FIRST:
        channels.ds.acquire(i)
        dq = issue_dq(ME, all_keys, i, channels.ds.tiles, cfg)
    await_empty(channels.ds, i + 1)
    shared_half(ME, channels.ds.tiles, i + 1, cfg).store(ds)
    fence_async_shared()
    if not cfg.IS_DQ_FIRST:
        channels.ds.acquire(i)
    sync_warps()
    arrive_alone(channels.ds.full.index((i + 1) % 2))
    if not cfg.IS_DQ_FIRST:
        dq = issue_dq(ME, all_keys, i, channels.ds.tiles, cfg)
    if PARTS == 1:
        dv = warpgroup_mma_wait(2, deps=[dv])
    else:
        dv, dv_tail = warpgroup_mma_wait(3, deps=[dv, dv_tail])
    channels.dout.release_operand(i)  # dP and dV have read it; delta went into dP
    # After the last block, S^T is computed from old contents of the slot, and nothing reads it.
    acquire_if(channels.q, i + 1, i + 1 < total)
    s = issue_scores(k, i + 1, channels, cfg)
    if PARTS == 1:
        dk, dq = warpgroup_mma_wait(1, deps=[dk, dq])
    else:
        dk, dk_tail, dq = warpgroup_mma_wait(2, deps=[dk, dk_tail, dq])
    channels.ds.release_operand(i)
    if cfg.HAS_CARRIED_LSE:
        lse = statistic(channels.lse, i + 1, cfg)
    channels.q.release_operand(i)  # S^T (a step ago) and dK have read it; lse went into dV
    emit_dq(ME, dq, i, added, outputs, channels.staging, cfg)
    s = warpgroup_mma_wait(0, deps=[s])
    return s, lse, KeySums(dk, dv, dk_tail, dv_tail)


@gluon.jit
def add_product(left, rows, i, x, x_tail, cfg: gl.constexpr):
    """Start adding `left` (64, BLOCK_M), P^T or dS^T, times block `i` of dO or Q to dV or dK."""
    COLUMNS: gl.constexpr = rows.tiles.shape[4]
    operand = gl.convert_layout(left, left_operand(COLUMNS), assert_trivial=True)
    x = warpgroup_mma(operand, rows_tile(rows, i, cfg), x, is_async=True)
    if rows.TAIL > 0:
        operand = gl.convert_layout(left, left_operand(rows.TAIL), assert_trivial=True)
        x_tail = warpgroup_mma(operand, rows_tail(rows, i, cfg), x_tail, is_async=True)
    return x, x_tail


@gluon.jit
def emit_dq(ME: gl.constexpr, dq, i, block, outputs, staging, cfg: gl.constexpr):
    """Add this consumer's half of dQ of step i - 1 to block `block` of the workspace, or pass it to
    the writer.
    """
    if not cfg.HAS_DQ_IN_REGISTERS:
        put_piece(ME, dq, staging, i, cfg)
    elif i > 0:
        add_at_once(ME, dq, block, outputs.workspace, cfg)


@gluon.jit
def keys_of(ME: gl.constexpr, listed, work, mask, zero, cfg: gl.constexpr):
    """The keys of this consumer; no row sees those past the end.

    `zero` is opaque, so that every head computes the keys again; they then need no registers in the
    unmasked loop.
    """
    number = work.n0 + zero + gl.arange(0, CONSUMER_ROWS, layout=row_values(cfg.BLOCK_M))
    number += ME * CONSUMER_ROWS
    shift = work.N - work.M
    rows = rows_to_mask(work.M, cfg)
    start, stop = seeing_rows(number, work.b, rows, shift, mask, cfg)
    real = number < work.N
    masks = shift
    if cfg.HAS_BLOCK_MASK:
        masks = mask.blocks.bits + ME * (CONSUMER_ROWS * cfg.BLOCK_M // 32)
    if cfg.SPANS > 0:
        masks = listed.intervals
    start, stop = gl.where(real, start, NO_ROW), gl.where(real, stop, 0)
    dead = shift
    if cfg.HAS_DEAD_ROWS and not cfg.HAS_LISTS:
        dead = first_seeing_row(work, mask, cfg)
    return Keys(number, start, stop, shift, listed.entries, masks, dead)


@gluon.jit
def await_empty(channel, i):
    """Wait until slot `i` may be written."""
    slot = i % channel.SLOTS
    mbarrier.wait(channel.empty.index(slot), ((i // channel.SLOTS) & 1) ^ 1)


@gluon.jit
def acquire_if(channel, i, there):
    """Wait until slot `i` is full, if `there`."""
    slot = i % channel.SLOTS
    mbarrier.wait(channel.full.index(slot), (i // channel.SLOTS) & 1, pred=there)


# Keys that no query sees, queries that see no key, and rows past the end of a packed sequence


@gluon.jit
def clear_keys(ME: gl.constexpr, channels, work, sizes, mask, cfg: gl.constexpr):
    """Zero the rows of K and V that are not kept; both consumers zero all of them."""
    kept = kept_keys(work, sizes, mask, cfg)
    KIND: gl.constexpr = kind_of_keys(cfg)
    if has_cleared(kept, KIND, cfg.BLOCK_N):
        clear_rows(channels.k.tile(0).reshape([cfg.BLOCK_N, cfg.BLOCK_D]), kept, KIND)
        clear_rows(channels.v.tile(0).reshape([cfg.BLOCK_N, cfg.BLOCK_D]), kept, KIND)
        if cfg.TAIL_D > 0:
            clear_rows(channels.k.tail(0).reshape([cfg.BLOCK_N, cfg.TAIL_D]), kept, KIND)
            clear_rows(channels.v.tail(0).reshape([cfg.BLOCK_N, cfg.TAIL_D]), kept, KIND)
        show_written(FIRST_BARRIER + 1 + ME)


@gluon.jit
def clear_queries(ME: gl.constexpr, channels, i, kept, cfg: gl.constexpr):
    """Zero the rows of a block of Q and dO that are not kept. S^T is masked there, so no consumer
    waits for the other.
    """
    KIND: gl.constexpr = kind_of_rows(cfg)
    if has_cleared(kept, KIND, cfg.BLOCK_M):
        channels.dout.acquire(i)
        clear_rows(rows_tile(channels.q, i, cfg), kept, KIND)
        clear_rows(rows_tile(channels.dout, i, cfg), kept, KIND)
        if cfg.TAIL_D > 0:
            clear_rows(rows_tail(channels.q, i, cfg), kept, KIND)
            clear_rows(rows_tail(channels.dout, i, cfg), kept, KIND)
        if cfg.HAS_DEAD_ROWS:  # with a sink, delta has the gradient of the log-sum-exp
            clear_numbers(channels.delta.index(i % cfg.DO_STAGES), kept, KIND, cfg.BLOCK_M)
        show_written(FIRST_BARRIER + 1 + ME)


# Results


@gluon.jit
def store_parts(ME: gl.constexpr, sums, outputs, work, sizes, at, cfg: gl.constexpr):
    """Store a program's sums for the kernel that adds them."""
    plain = outputs.plain
    store_part(ME, sums.dv, sums.dv_tail, cfg.TAIL_DV, plain.dv, work, sizes, at, cfg)
    store_part(ME, sums.dk, sums.dk_tail, cfg.TAIL_D, plain.dk, work, sizes, at, cfg)


@gluon.jit
def store_gradients(
    ME: gl.constexpr, sums, outputs, channels, work, sizes, scale, cfg: gl.constexpr
):  # fmt: skip
    """Store dK and dV of this consumer's keys."""
    # The other consumer's last products also read the slots of Q and dO, which are overwritten now.
    wait_at_barrier(FIRST_BARRIER, 256)
    dv, dk, plain = outputs.dv, outputs.dk, outputs.plain
    store_gradient(ME, sums.dv, False, channels.dout, dv, plain.dv, cfg.DV, work, sizes, cfg)
    if cfg.TAIL_D > 0:
        tail = sums.dv_tail
        store_gradient(ME, tail, True, channels.dout, dv, plain.dv, cfg.DV, work, sizes, cfg)
    x = sums.dk * scale
    store_gradient(ME, x, False, channels.q, dk, plain.dk, cfg.D, work, sizes, cfg)
    if cfg.TAIL_D > 0:
        x_tail = sums.dk_tail * scale
        store_gradient(ME, x_tail, True, channels.q, dk, plain.dk, cfg.D, work, sizes, cfg)


@gluon.jit
def store_gradient(
    ME: gl.constexpr, x, IS_TAIL: gl.constexpr, channel, described, ptr, DIM: gl.constexpr, work,
    sizes, cfg: gl.constexpr,
):  # fmt: skip
    """Store this consumer's half of dK or dV, or its tail, through the ring of `channel`: by TMA,
    which clips at the end of the tensor, or by the threads if another sequence may follow.
    """
    slots = channel.tails if IS_TAIL else channel.tiles
    desc = described.tails if IS_TAIL else described.tiles
    COLUMNS: gl.constexpr = cfg.TAIL_D if IS_TAIL else cfg.BLOCK_D
    FIRST: gl.constexpr = cfg.BLOCK_D if IS_TAIL else 0
    TILES: gl.constexpr = channel.SLOTS * cfg.BLOCK_M // CONSUMER_ROWS
    shape: gl.constexpr = [TILES, 1, CONSUMER_ROWS, 1, COLUMNS]
    tile = recast(slots, slots.dtype, shape, shared_rows(COLUMNS)).index(ME)
    row = work.n0 + ME * CONSUMER_ROWS
    store_rows(x, tile, row, FIRST, desc, ptr, DIM, work, sizes, cfg)


@gluon.jit
def store_rows(
    x, tile, row, COLUMN: gl.constexpr, desc, ptr, DIM: gl.constexpr, work, sizes,
    cfg: gl.constexpr,
):  # fmt: skip
    """Store `x` (64, columns) at `row` and COLUMN of dK or dV; rounded values go through `tile`."""
    start, N, head = work.start_k, work.N, work.kv_head
    if cfg.IS_PARTIAL:
        store_float32(x, ptr, row, COLUMN, DIM, start, N, head, sizes.heads)
    else:
        COLUMNS: gl.constexpr = x.shape[1]
        rows = tile.reshape([CONSUMER_ROWS, COLUMNS])
        rows.store(x.to(tile.dtype))
        if cfg.IS_PACKED:
            LAYOUT: gl.constexpr = rows_of_heads(COLUMNS, CONSUMER_WARPS)
            x = rows.load(LAYOUT)
            offs = row + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
            dims = COLUMN + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
            offsets = (start + offs).to(gl.int64) * desc.strides[1]
            offsets = gl.multiple_of(offsets + head.to(gl.int64) * desc.strides[2], [1, 8])
            gl.store(ptr + offsets + dims, x, mask=(offs < N) & (dims < DIM))
        else:
            fence_async_shared()
            copy_to_global(desc, [work.b, row, head, COLUMN], tile)
