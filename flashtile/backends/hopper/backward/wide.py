"""The consumers of tiles of 128 keys with 192 columns, and values of 64 or 128.

As with 64 keys (`consumer.py`), one consumer has the values and one the keys. A step processes one
half of the keys after the other, so that registers hold the scores of 64 keys beside dV or dK of
128. A part of dK does not fit beside the rest: the tail of the second half, which the value
consumer adds up. The key consumer computes dQ, 64 columns at a time, and stages them while products
for dK run.

P and dS^T pass through shared memory, from where products read them. Neither has a barrier that
says that its tile is empty:

- P of step i + 1 is stored after dS^T of step i is full, and the key consumer has read P by then.
- dS^T of step i + 1 is stored after P of step i + 1 is full, and the value consumer has completed
  its products of step i by then.

A tile of 128 keys needs half as many additions to dQ and loads of Q and dO as two tiles of 64, and
the L2 cache limits those. The plan has them for calls that need no more registers than these.
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

from ..shared.pipeline import (
    CONSUMER_ROWS,
    FIRST_BARRIER,
    Channel,
    accumulator,
    aggregate,
    arrive_alone,
    opaque_zero,
    opaque_zeros,
    recast,
    sync_warps,
    wait_at_barrier,
)
from ..shared.softmax import Place, alibi_slope, draws_of
from .consumer import (
    acquire_if,
    ends_masked,
    issue_columns_of_dq,
    issue_dp,
    issue_scores,
    keys_of,
    own_rows,
    probabilities,
    rows_tail,
    rows_tile,
    score_gradient,
    statistic,
    store_rows,
    whole_tile,
)
from .dq import PIECE_ROWS, part_start, piece_layout, start_additions, store_pieces
from .schedule import first_block_of, key_work, listed_blocks, next_block, own_blocks, own_heads


@gluon.constexpr_function
def is_wide(cfg):
    """Whether two consumers, for values and for keys, have 128 keys."""
    return cfg.IS_SPLIT and cfg.BLOCK_N == 128


@gluon.jit
def make_halves(tiles):
    """P of a step, with a full barrier for each half of the keys."""
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(full.index(1), count=1)
    return Channel(tiles, tiles, full, full, 1)


@gluon.jit
def make_pieces(workspace):
    """Two pieces of dQ on their way to memory."""
    return gl.allocate_shared_memory(gl.float32, [2, PIECE_ROWS, 256], workspace.layout)


@gluon.jit
def half_of(HALF: gl.constexpr, channel, zero):
    """P^T or dS^T of half of the keys, (64, BLOCK_M)."""
    return channel.tiles.index(zero).slice(HALF * CONSUMER_ROWS, CONSUMER_ROWS)


@aggregate
class Sums:
    """What a consumer adds up: dV or dK of both halves of the keys, (64, columns), and the tail of
    dK, (64, TAIL_D): the value consumer has that of the second half.
    """

    first: gl.tensor
    second: gl.tensor
    tail: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first, second, tail):
        self.first = first
        self.second = second
        self.tail = tail


# The value consumer


@gluon.jit
def wide_value_consumer(outputs, channels, tile, sizes, at, mask, score, cfg: gl.constexpr):
    """dV of a tile of keys, and the tail of dK of half of them."""
    work = key_work(tile, sizes, at, mask, cfg)
    zeros = opaque_zeros(cfg.BLOCK_DV)
    sums = Sums(zeros, zeros, opaque_zeros(cfg.TAIL_D))
    if work.end > work.begin:
        sums = wide_value_loop(sums, channels, work, sizes, mask, score, cfg)
        # The key consumer has read dO, and this one Q.
        wait_at_barrier(FIRST_BARRIER, 256)
    dv, dk, plain = outputs.dv, outputs.dk, outputs.plain
    if cfg.IS_PARTED:
        if work.n0 < work.N:  # the kernel that adds the parts reads all of them
            start = part_start(cfg.BLOCK_DV, plain.dv, work, sizes, at, cfg)
            put_part(0, sums.first, start, 0, cfg)
            put_part(1, sums.second, start, 0, cfg)
            start = part_start(cfg.BLOCK_D + cfg.TAIL_D, plain.dk, work, sizes, at, cfg)
            put_part(1, sums.tail, start, cfg.BLOCK_D, cfg)
    elif work.end > work.begin:
        slots, tails = channels.dout.tiles, channels.q.tails
        store_half(0, sums.first, slots, 0, dv.tiles, cfg.DV, work, sizes, cfg)
        store_half(1, sums.second, slots, 0, dv.tiles, cfg.DV, work, sizes, cfg)
        tail = sums.tail * score.scale
        store_half(1, tail, tails, cfg.BLOCK_D, dk.tails, cfg.D, work, sizes, cfg)
    tma.store_wait(0)


@gluon.jit
def wide_value_loop(
    sums, channels, work, sizes, mask, score, cfg: gl.constexpr
):  # fmt: skip
    """The loop over this program's query blocks that see the tile, head by head."""
    channels.k.acquire(0)
    total = work.stop_step - work.first_step
    gl.assume(total > 0)
    channels.q.acquire(0)
    # (64, BLOCK_M)
    s = issue_scores(own_rows(0, channels.k, 0, False, cfg), 0, channels, cfg)
    s = warpgroup_mma_wait(0, deps=[s])
    i = 0
    first_head, stop_head = own_heads(work, sizes, cfg)
    for g in range(first_head, stop_head):
        h = work.kv_head * sizes.group + g
        slope = alibi_slope(work.b, h, score, cfg)
        draws = draws_of(work.b, h, score.dropout, cfg)
        listed = listed_blocks(g, work.end - work.begin, work, sizes, mask, cfg)
        begin, full_begin, full_end, end = own_blocks(g, listed, work, cfg)
        m = first_block_of(begin, end, cfg)
        if ends_masked(cfg):
            for _ in range(full_end, end):
                s, sums = wide_value_step(
                    s, sums, i, total, m, slope, draws, listed, channels, work, mask, score,
                    True, cfg,
                )  # fmt: skip
                i += 1
                m = next_block(m, cfg)
        for _ in range(full_begin, full_end):
            s, sums = wide_value_step(
                s, sums, i, total, m, slope, draws, listed, channels, work, mask, score,
                False, cfg,
            )  # fmt: skip
            i += 1
            m = next_block(m, cfg)
        for _ in range(begin, full_begin):
            s, sums = wide_value_step(
                s, sums, i, total, m, slope, draws, listed, channels, work, mask, score,
                True, cfg,
            )  # fmt: skip
            i += 1
            m = next_block(m, cfg)
    return sums


@gluon.jit
def wide_value_step(
    s, sums, i, total, m, slope, draws, listed, channels, work, mask, score,
    IS_MASKED: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Process one block of queries: pass P on, add to dV, compute S^T of the next block."""
    zero = opaque_zero(i)
    pass_half(0, s, i, m, slope, draws, listed, channels, work, mask, score, IS_MASKED, cfg)
    channels.dout.acquire(i)
    # (64, BLOCK_M)
    s = issue_scores(own_rows(1, channels.k, zero, False, cfg), i, channels, cfg)
    # (64, BLOCK_M) @ (BLOCK_M, BLOCK_DV) -> (64, BLOCK_DV)
    rows = rows_tile(channels.dout, i, cfg)
    first = warpgroup_mma(half_of(0, channels.p, zero), rows, sums.first, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    pass_half(1, s, i, m, slope, draws, listed, channels, work, mask, score, IS_MASKED, cfg)
    second = warpgroup_mma(half_of(1, channels.p, zero), rows, sums.second, is_async=True)
    # After the last block, S^T is computed from old contents of the slot, and nothing reads it.
    acquire_if(channels.q, i + 1, i + 1 < total)
    # (64, BLOCK_M)
    s = issue_scores(own_rows(0, channels.k, zero, False, cfg), i + 1, channels, cfg)
    channels.ds.acquire(i)
    # (64, BLOCK_M) @ (BLOCK_M, TAIL_D) -> (64, TAIL_D)
    rows = rows_tail(channels.q, i, cfg)
    tail = warpgroup_mma(half_of(1, channels.ds, zero), rows, sums.tail, is_async=True)
    s, first, second, tail = warpgroup_mma_wait(0, deps=[s, first, second, tail])
    channels.dout.release_operand(i)
    channels.q.release_operand(i)  # its log-sum-exp was read before P was full
    return s, Sums(first, second, tail)


@gluon.jit
def pass_half(
    HALF: gl.constexpr, s, i, m, slope, draws, listed, channels, work, mask, score,
    IS_MASKED: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Store P of half of the keys, from its S^T."""
    dtype: gl.constexpr = channels.q.tiles.dtype
    zero = opaque_zero(i)
    lse = statistic(channels.lse, i, cfg)
    place = Place(work.b, draws.h, work.n0 + HALF * CONSUMER_ROWS, m * cfg.BLOCK_M)
    keys = keys_of(HALF, listed, work, mask, zero, cfg)
    # (64, BLOCK_M)
    p, _ = probabilities(s, lse, keys, m, m, place, slope, score.scale, score, IS_MASKED, cfg)
    half_of(HALF, channels.p, zero).store(p.to(dtype))
    fence_async_shared()
    sync_warps()
    arrive_alone(channels.p.full.index(HALF))


# The key consumer


@gluon.jit
def wide_key_consumer(outputs, channels, tile, sizes, at, mask, score, cfg: gl.constexpr):
    """dK of a tile of keys, without the tail of half of them, and dQ."""
    work = key_work(tile, sizes, at, mask, cfg)
    zeros = opaque_zeros(cfg.BLOCK_D)
    sums = Sums(zeros, zeros, opaque_zeros(cfg.TAIL_D))
    if work.end > work.begin:
        sums = wide_key_loop(sums, outputs, channels, work, sizes, mask, cfg)
        # The value consumer has read Q; a later S^T is not used.
        wait_at_barrier(FIRST_BARRIER, 256)
    dk, scale = outputs.dk, score.scale
    if cfg.IS_PARTED:
        if work.n0 < work.N:
            COLUMNS: gl.constexpr = cfg.BLOCK_D + cfg.TAIL_D
            start = part_start(COLUMNS, outputs.plain.dk, work, sizes, at, cfg)
            put_part(0, sums.first, start, 0, cfg)
            put_part(1, sums.second, start, 0, cfg)
            put_part(0, sums.tail, start, cfg.BLOCK_D, cfg)
    elif work.end > work.begin:
        slots, tails = channels.q.tiles, channels.q.tails
        store_half(0, sums.first * scale, slots, 0, dk.tiles, cfg.D, work, sizes, cfg)
        store_half(1, sums.second * scale, slots, 0, dk.tiles, cfg.D, work, sizes, cfg)
        tail = sums.tail * scale
        store_half(0, tail, tails, cfg.BLOCK_D, dk.tails, cfg.D, work, sizes, cfg)
    tma.store_wait(0)


@gluon.jit
def wide_key_loop(sums, outputs, channels, work, sizes, mask, cfg: gl.constexpr):
    """The loop over this program's query blocks that see the tile, head by head; returns
    dK / scale.
    """
    channels.k.acquire(0)
    channels.v.acquire(0)
    i = 0
    first_head, stop_head = own_heads(work, sizes, cfg)
    for g in range(first_head, stop_head):
        base = (work.kv_head * sizes.group + g) * sizes.blocks + work.first_block
        listed = listed_blocks(g, work.end - work.begin, work, sizes, mask, cfg)
        begin, _, _, end = own_blocks(g, listed, work, cfg)
        block = base + first_block_of(begin, end, cfg)
        for _ in range(begin, end):
            sums = wide_key_step(sums, i, block, outputs, channels, cfg)
            i += 1
            block = next_block(block, cfg)
    return sums


@gluon.jit
def wide_key_step(sums, i, block, outputs, channels, cfg: gl.constexpr):
    """Process one block of queries, block `block` of the workspace: compute dS from P of the other
    consumer; add to dK and dQ.
    """
    channels.dout.acquire(i)
    store_ds(0, i, channels, cfg)
    store_ds(1, i, channels, cfg)
    channels.dout.release_operand(i)
    fence_async_shared()
    sync_warps()
    arrive_alone(channels.ds.full.index(0))
    channels.q.acquire(i)
    zero = opaque_zero(i)
    k = whole_tile(channels.k, zero)
    own, other = half_of(0, channels.ds, zero), half_of(1, channels.ds, zero)
    # Each piece of dQ is staged while the product after it runs.
    # (64, BLOCK_N) @ (BLOCK_N, 64) -> (64, 64)
    dq = issue_columns_of_dq(0, 64, k, channels, cfg)
    # (64, BLOCK_M) @ (BLOCK_M, columns) -> (64, columns)
    first = warpgroup_mma(own, rows_tile(channels.q, i, cfg), sums.first, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    stage_piece(dq, 0, i, block, outputs, channels, cfg)
    dq = issue_columns_of_dq(64, 64, k, channels, cfg)
    tail = warpgroup_mma(own, rows_tail(channels.q, i, cfg), sums.tail, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    stage_piece(dq, 1, i, block, outputs, channels, cfg)
    dq = issue_columns_of_dq(cfg.BLOCK_D, cfg.TAIL_D, k, channels, cfg)
    second = warpgroup_mma(other, rows_tile(channels.q, i, cfg), sums.second, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    stage_piece(dq, 2, i, block, outputs, channels, cfg)
    first, second, tail = warpgroup_mma_wait(0, deps=[first, second, tail])
    channels.q.release_operand(i)
    return Sums(first, second, tail)


@gluon.jit
def store_ds(HALF: gl.constexpr, i, channels, cfg: gl.constexpr):
    """Store dS^T of half of the keys, from V, dO and P."""
    zero = opaque_zero(i)
    minus_delta = statistic(channels.delta, i, cfg)
    # (64, BLOCK_M)
    dp = issue_dp(own_rows(HALF, channels.v, zero, False, cfg), minus_delta, i, channels, cfg)
    mbarrier.wait(channels.p.full.index(HALF), i & 1)
    # (64, BLOCK_M)
    p = half_of(HALF, channels.p, zero).load(accumulator(cfg.BLOCK_M))
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = score_gradient(p.to(gl.float32), dp, minus_delta, cfg)
    half_of(HALF, channels.ds, zero).store(ds.to(p.dtype))


@gluon.jit
def stage_piece(dq, NUMBER: gl.constexpr, i, block, outputs, channels, cfg: gl.constexpr):
    """Start adding `dq` (64, 64), piece NUMBER of step `i`, to block `block` of the workspace."""
    COLUMNS: gl.constexpr = dq.shape[1]
    tile = channels.staging.index((3 * i + NUMBER) & 1)  # a step has three pieces
    tma.store_wait(1)  # the piece before the last one has been read
    recast(tile, gl.float32, [64, COLUMNS], piece_layout(COLUMNS)).store(dq)
    fence_async_shared()
    tiles = recast(tile, gl.float32, [1, PIECE_ROWS, 256], outputs.workspace.layout)
    start_additions(tiles, 64 * NUMBER, COLUMNS, block, outputs, cfg)


# Results


@gluon.jit
def store_half(
    HALF: gl.constexpr, x, slots, COLUMN: gl.constexpr, desc, DIM: gl.constexpr, work, sizes,
    cfg: gl.constexpr,
):  # fmt: skip
    """Store columns from COLUMN on of half of dK or dV through one of `slots`."""
    row = work.n0 + HALF * CONSUMER_ROWS
    store_rows(x, slots.index(HALF), row, COLUMN, desc, None, DIM, work, sizes, cfg)


@gluon.jit
def put_part(HALF: gl.constexpr, x, start, BEFORE: gl.constexpr, cfg: gl.constexpr):
    """Store half of a part of dK or dV, which begins at `start`, or of its tail, which has BEFORE
    columns before it.
    """
    store_pieces(x, start + (cfg.BLOCK_N * BEFORE + HALF * (CONSUMER_ROWS * x.shape[1])))
