"""The accumulation of dQ: tiles of keys add to a float32 workspace, which a later kernel rounds.

A piece is 64 queries by 64 columns, 16 KiB, in the register order of a consumer, so both the stores
to shared memory and the addition, a contiguous TMA transfer, run at full speed. The kernel that
rounds restores the order of the elements. Groups of 8 columns are contiguous in a piece, so above
128 columns a block need not contain all columns of zeros: see `plan.dq_columns`.

Up to 128 columns, a consumer computes one piece in each step. With 64 columns and 64 queries, it
has 32 columns. With 80 or 96 columns, the second consumer has the tail, so its piece is smaller. A
slot of the staging ring holds the pieces of both consumers, and a writer adds them with one
transfer or, if there is a tail, with several. With cfg.HAS_DQ_IN_REGISTERS, each thread adds four
neighbours at a time instead, without shared memory.
Above 128 columns, the consumers add their pieces themselves, or, if additions are ordered, leave
them to the writers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ....gpu.intrinsics import let_next_kernel_start, wait_for_earlier_kernels
from ..shared.pipeline import (
    CONSUMER_ROWS,
    Channel,
    add_to_global,
    arrive_alone,
    recast,
    sync_warps,
)
from ..shared.schedule import NUMBERS, PARTS, Side, fill_spare_rows, list_tiles, rows_of
from .schedule import (
    block_at,
    blocks_before,
    key_work,
    listed_blocks,
    own_heads,
    own_steps,
    predecessors_at,
    read_key_work,
    visited_block,
)

PIECE_ROWS = gl.constexpr(16)  # of the workspace, 256 columns wide
PAIRS = gl.constexpr(2)  # slots of the staging ring
PIECE = tl.constexpr(4096)


@gluon.constexpr_function
def piece_columns(cfg):
    """Columns of dQ that a consumer computes in a step up to 128 columns; the second one computes
    the tail, if there is one.
    """
    return 64 if cfg.TAIL_D > 0 else cfg.BLOCK_M * cfg.BLOCK_D // 128


@gluon.constexpr_function
def rows_of_piece(columns):
    """Rows of the workspace that 64 queries by `columns` columns occupy."""
    return columns // 4


@gluon.constexpr_function
def piece_layout(columns):
    """The float32 tile (64, columns) of `pipeline.accumulator` in register order: four registers
    of a thread, then the thread, then the other registers. No two threads share a bank.
    """
    bases = [
        [0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0],
    ]  # fmt: skip
    return gl.SharedLinearLayout(bases + [[0, bit] for bit in (8, 16, 32, 64) if bit < columns])


@gluon.jit
def make_staging(workspace, cfg: gl.constexpr):
    """The ring of pairs of pieces: both consumers fill a slot, and the writer empties it. With
    cfg.HAS_DQ_IN_REGISTERS, only the workspace.
    """
    SLOTS: gl.constexpr = PAIRS if cfg.ADDERS == 1 else 1
    PIECES: gl.constexpr = 2 * SLOTS if cfg.TAIL_D == 0 else SLOTS  # without those of the tail
    OF_PIECE: gl.constexpr = rows_of_piece(piece_columns(cfg))
    staging = workspace
    if not cfg.HAS_DQ_IN_REGISTERS:
        staging = gl.allocate_shared_memory(gl.float32, [PIECES, OF_PIECE, 256], workspace.layout)
    tails = staging
    if cfg.TAIL_D > 0 and not cfg.HAS_DQ_IN_REGISTERS:
        ROWS: gl.constexpr = rows_of_piece(cfg.TAIL_D)
        tails = gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS, 256], workspace.layout)
    if cfg.ADDERS == 1:
        full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(SLOTS):
            mbarrier.init(full.index(slot), count=2)
            mbarrier.init(empty.index(slot), count=1)
        staging = Channel(staging, tails, full, empty, SLOTS)
    return staging


@gluon.jit
def put_piece(ME: gl.constexpr, dq, staging, i, cfg: gl.constexpr):
    """Pass `dq`, this consumer's piece of pair `i`, to the writer. It is (64, `piece_columns`), or
    (64, TAIL_D) for a tail.
    """
    COLUMNS: gl.constexpr = dq.shape[1]
    slot = i % staging.SLOTS
    mbarrier.wait(staging.empty.index(slot), ((i // staging.SLOTS) & 1) ^ 1)
    if cfg.TAIL_D == 0:
        tile = staging.tiles.index(2 * slot + ME)
    elif ME == 0:
        tile = staging.tiles.index(slot)
    else:
        tile = staging.tails.index(slot)
    recast(tile, gl.float32, [64, COLUMNS], piece_layout(COLUMNS)).store(dq)
    fence_async_shared()
    sync_warps()
    arrive_alone(staging.full.index(slot))


@gluon.jit
def in_register_order(x):
    """The pieces of `x` (64, columns), one after the other."""
    # Rows: warp, row / 8 % 2, row % 8. Columns: columns / 8, columns % 8 / 2, columns % 2.
    COLUMNS: gl.constexpr = x.shape[1]
    # (COLUMNS / 8, 4, 8, 4, 2, 2)
    pieces = x.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return pieces.reshape([64 * COLUMNS])


@gluon.jit
def add_at_once(ME: gl.constexpr, dq, block, workspace, cfg: gl.constexpr):
    """Add `dq`, this consumer's piece of a block, from registers to the memory at `workspace`.
    It is (64, `piece_columns`), or (64, TAIL_D) for a tail.
    """
    SIZE: gl.constexpr = 64 * dq.shape[1]
    BLOCK: gl.constexpr = cfg.BLOCK_M * cfg.DQ_COLUMNS
    piece = in_register_order(dq)
    start = workspace + block.to(gl.int64) * BLOCK + ME * (64 * piece_columns(cfg))
    gl.atomic_add(start + gl.arange(0, SIZE, layout=piece.type.layout), piece, sem="relaxed")


# Above 128 columns: one consumer has the first columns of dQ, the other consumer the others.

# Columns of dQ that the key consumer computes; the value consumer, which has less time because of
# the exponentials, computes the others: the tail or, in two pieces, 128.
KEY_COLUMNS = gl.constexpr(128)


@gluon.constexpr_function
def last_columns(cfg):
    """The last columns of dQ, which the value consumer computes in the next step."""
    return cfg.TAIL_D if cfg.TAIL_D > 0 else 64


@gluon.constexpr_function
def first_of_last(cfg):
    """The first of the `last_columns`."""
    return cfg.BLOCK_D + cfg.TAIL_D - last_columns(cfg)


@gluon.constexpr_function
def value_puts(cfg):
    """How many times in a step the value consumer passes on pieces: once its last columns, and
    before them the 64 columns that the key consumer leaves over, if any.
    """
    return 2 if first_of_last(cfg) > KEY_COLUMNS else 1


@gluon.constexpr_function
def columns_there(first, columns, cfg):
    """How many of `columns` columns from `first` the workspace has."""
    return max(min(cfg.DQ_COLUMNS - first, columns), 0)


class Staging(NamedTuple):
    """dQ of each consumer on its way to memory: one piece of the workspace after the other. With
    cfg.IS_ORDERED, a `Channel` to the writers: one slot, and a full barrier for each writer.
    """

    of_values: Any
    of_keys: Any


@gluon.jit
def make_split_staging(workspace, cfg: gl.constexpr):
    """The staging tiles: a piece or a smaller one for the value consumer, two for the key
    consumer.
    """
    LAYOUT: gl.constexpr = workspace.layout
    OF_VALUES: gl.constexpr = rows_of_piece(last_columns(cfg))
    values = gl.allocate_shared_memory(gl.float32, [1, OF_VALUES, 256], LAYOUT)
    keys = gl.allocate_shared_memory(gl.float32, [KEY_COLUMNS // 64, PIECE_ROWS, 256], LAYOUT)
    if cfg.IS_ORDERED:
        values, keys = to_writers(values, cfg), to_writers(keys, cfg)
    return Staging(values, keys)


@gluon.jit
def to_writers(tiles, cfg: gl.constexpr):
    """The channel of one slot from a consumer to the writers."""
    WRITERS: gl.constexpr = cfg.WRITERS
    full = gl.allocate_shared_memory(gl.int64, [WRITERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(WRITERS):
        mbarrier.init(full.index(number), count=1)
    mbarrier.init(empty.index(0), count=1)
    return Channel(tiles, tiles, full, empty, 1)


@gluon.jit
def emit_pieces(
    dq, staging, FIRST: gl.constexpr, i, PUT: gl.constexpr, PUTS: gl.constexpr, block, outputs,
    cfg: gl.constexpr,
):  # fmt: skip
    """Start adding `dq` (64, columns) of step `i`, the columns from FIRST, to block `block` of the
    workspace, through this consumer's staging tiles, or pass it to the writer of the step. It is
    number PUT of this consumer's PUTS parts of a step.
    """
    COLUMNS: gl.constexpr = dq.shape[1]
    if cfg.IS_ORDERED:
        staging.await_empty(i * PUTS + PUT)
        recast(staging.tiles, gl.float32, [64, COLUMNS], piece_layout(COLUMNS)).store(dq)
        fence_async_shared()
        sync_warps()
        arrive_alone(staging.full.index(i % cfg.WRITERS))
    else:
        tma.store_wait(0)
        recast(staging, gl.float32, [64, COLUMNS], piece_layout(COLUMNS)).store(dq)
        fence_async_shared()
        start_additions(staging, FIRST, COLUMNS, block, outputs, cfg)


@gluon.jit
def start_additions(
    tiles, FIRST: gl.constexpr, COLUMNS: gl.constexpr, block, outputs, cfg: gl.constexpr
):  # fmt: skip
    """Start adding COLUMNS columns of dQ, from FIRST, to block `block` of the workspace: those that
    are there, whole pieces and then the tail.
    """
    FOUND: gl.constexpr = columns_there(FIRST, COLUMNS, cfg)
    PIECES: gl.constexpr = FOUND // 64
    row = block * rows_of_piece(cfg.DQ_COLUMNS) + rows_of_piece(FIRST)
    for piece in gl.static_range(PIECES):
        add_to_global(outputs.workspace, [row + piece * PIECE_ROWS, 0], tiles.index(piece))
    if FOUND % 64 > 0:
        ROWS: gl.constexpr = rows_of_piece(FOUND % 64)
        BOXES: gl.constexpr = tiles.shape[0] * tiles.shape[1] // ROWS
        boxes = recast(tiles, gl.float32, [BOXES, ROWS, 256], outputs.workspace.layout)
        at = PIECES * PIECE_ROWS
        add_to_global(outputs.workspace_tail, [row + at, 0], boxes.index(at // ROWS))


# The writer: a warp that adds dQ to memory, so that no consumer waits for the addition.
#
# An ordered addition takes longer than a step: acquire the semaphore, add, release it. Therefore
# two writers process alternate steps. Two steps of a tile add to different blocks; only tiles that
# add to the same block are ordered.
#
# With cfg.HAS_DQ_IN_REGISTERS the writer is idle. Above 128 columns there are writers only for
# ordered additions. Shared memory has no room for a second pair of pieces there, so consumers wait
# less if they add their own pieces; but in ordered additions they would wait for semaphores too.


@gluon.jit
def writer(ME: gl.constexpr, outputs, channels, tile, sizes, at, mask, cfg: gl.constexpr):
    """Add dQ of every tile of keys: every step or, with two writers, every second step."""
    staging = channels.staging
    if cfg.IS_PERSISTENT:
        count = 0  # tiles so far
        i = 0  # pairs so far
        channels.work.acquire(count)
        work = read_key_work(channels.work, count, sizes, 1, cfg)
        while work.begin < work.end:
            i = add_pairs(ME, i, outputs, staging, work, sizes, mask, cfg)
            channels.work.release(count)
            count += 1
            channels.work.acquire(count)
            work = read_key_work(channels.work, count, sizes, 1, cfg)
    elif cfg.ADDERS == 1:
        work = key_work(tile, sizes, at, mask, cfg)
        add_pairs(ME, work.n * 0, outputs, staging, work, sizes, mask, cfg)


@gluon.jit
def add_pairs(ME: gl.constexpr, i, outputs, staging, work, sizes, mask, cfg: gl.constexpr):
    """Add the pieces of both consumers from the staging ring, in the order of the query loop, after
    `i` pairs; return the number of pairs so far.
    """
    count = work.end - work.begin
    if not cfg.IS_SPLIT:  # the first pair belongs to no step
        if ME == 0 and count > 0:
            staging.acquire(i)
            staging.release(i)
        i += 1
    first_head, stop_head = own_heads(work, sizes, cfg)
    for g in range(first_head, stop_head):
        h = work.kv_head * sizes.group + g
        listed = listed_blocks(g, count, work, sizes, mask, cfg)
        first, stop = own_steps(g, listed.count, work, cfg)
        for j in range(first, stop):
            position = visited_block(j, listed, work, cfg)
            block = block_at(position, listed.entries, cfg)
            index = h * sizes.blocks + work.first_block + block
            if i % cfg.WRITERS == ME:
                predecessors = predecessors_at(position, listed.entries, work, cfg)
                if cfg.IS_SPLIT:
                    add_split_step(ME, outputs, staging, i, index, block, predecessors, work, cfg)
                else:
                    add_pair(outputs, staging, i, index, block, predecessors, work, cfg)
            i += 1
    return i


@gluon.jit
def add_pair(outputs, staging, i, index, block, predecessors, work, cfg: gl.constexpr):
    """Add pair `i` to block `index` of the workspace, which is block `block` of its sequence."""
    if cfg.IS_ORDERED:
        acquire_semaphore(outputs.semaphores + index, predecessors, block, work, cfg)
    staging.acquire(i)
    start_addition(outputs.workspace, staging, i % staging.SLOTS, index, cfg)
    tma.store_wait(0)
    staging.release(i)
    if cfg.IS_ORDERED:
        await_additions()
        release_semaphore(outputs.semaphores + index, work, cfg)


@gluon.jit
def add_split_step(
    ME: gl.constexpr, outputs, staging, i, index, block, predecessors, work, cfg: gl.constexpr
):  # fmt: skip
    """Add what both consumers pass on in step `i`, one of this writer's."""
    PUTS: gl.constexpr = value_puts(cfg)
    LAST: gl.constexpr = first_of_last(cfg)
    COLUMNS: gl.constexpr = last_columns(cfg)
    acquire_semaphore(outputs.semaphores + index, predecessors, block, work, cfg)
    add_put(ME, staging.of_keys, i, 0, 1, 0, KEY_COLUMNS, index, outputs, cfg)
    if PUTS == 2:
        add_put(ME, staging.of_values, i, 0, PUTS, KEY_COLUMNS, 64, index, outputs, cfg)
    add_put(ME, staging.of_values, i, PUTS - 1, PUTS, LAST, COLUMNS, index, outputs, cfg)
    await_additions()
    release_semaphore(outputs.semaphores + index, work, cfg)


@gluon.jit
def add_put(
    ME: gl.constexpr, channel, i, PUT: gl.constexpr, PUTS: gl.constexpr, FIRST: gl.constexpr,
    COLUMNS: gl.constexpr, index, outputs, cfg: gl.constexpr,
):  # fmt: skip
    """Add number PUT of a consumer's PUTS parts of step `i`: COLUMNS columns from FIRST."""
    number = i // cfg.WRITERS * PUTS + PUT  # of those that this writer adds
    mbarrier.wait(channel.full.index(ME), number & 1)
    start_additions(channel.tiles, FIRST, COLUMNS, index, outputs, cfg)
    tma.store_wait(0)
    channel.release(0)


@gluon.jit
def start_addition(workspace, staging, slot, index, cfg: gl.constexpr):
    """Start adding the pair of a slot to block `index`. TMA adds tiles whose number of rows is a
    power of two, so a piece and a smaller one are added in boxes as large as the smaller one.
    """
    SLOTS: gl.constexpr = staging.SLOTS
    LAYOUT: gl.constexpr = workspace.layout
    if cfg.TAIL_D == 0:
        OF_PAIR: gl.constexpr = 2 * rows_of_piece(piece_columns(cfg))
        pairs = recast(staging.tiles, gl.float32, [SLOTS, OF_PAIR, 256], LAYOUT)
        add_to_global(workspace, [index * OF_PAIR, 0], pairs.index(slot))
    else:
        ROWS: gl.constexpr = rows_of_piece(cfg.TAIL_D)
        COUNT: gl.constexpr = PIECE_ROWS // ROWS
        boxes = recast(staging.tiles, gl.float32, [COUNT * SLOTS, ROWS, 256], LAYOUT)
        row = index * (PIECE_ROWS + ROWS)
        for box in gl.static_range(COUNT):
            add_to_global(workspace, [row + box * ROWS, 0], boxes.index(COUNT * slot + box))
        add_to_global(workspace, [row + PIECE_ROWS, 0], staging.tails.index(slot))


# The dQ semaphores, for cfg.IS_ORDERED: tile n of a sequence adds to a block after tile n - 1.
#
# Each block and adder has a number in memory, which is n + 1 after tile n has added. All tiles loop
# from the last row that sees them to the first (cfg.IS_ASCENDING is false), so a tile reaches a
# block later than the previous tile or, if both start at the same row, at the same time. It then
# waits once, for the duration of one addition, and never again.
#
# Under a block mask the tiles that see a block add in the order in which they start, and the number
# is how many have added.


@gluon.jit
def acquire_semaphore(semaphore, predecessors, m, work, cfg: gl.constexpr):
    """Wait until the tile before this one has added to block m, if there is one: tile n - 1 if it
    sees the block, or with a block mask the last of its predecessors.

    This cannot deadlock. Programs number themselves in the order in which they start, and in every
    order of `schedule.py` tile n - 1 of a head has a smaller number than tile n. So a program waits
    only for programs that have started, and the one with the smallest number among those that have
    not ended waits for none, however few run at the same time.
    """
    if cfg.HAS_BLOCK_MASK:
        waits = predecessors > 0
    else:
        waits = m < work.before
    if waits:
        # The additions use another proxy than this load. The fence is for global memory only; a
        # fence for all memory would also wait for this thread's stores.
        gl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; AGAIN: ld.acquire.gpu.global.b32 t, [$1];"
            " setp.ne.s32 p, t, $2; @p bra AGAIN; fence.proxy.async.global; mov.b32 $0, 0; }",
            "=r,l,r",
            [semaphore.to(gl.int64, bitcast=True), predecessors],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def await_additions():
    """Wait until the additions that a thread of this role started are in memory."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    sync_warps()


@gluon.jit
def release_semaphore(semaphore, work, cfg: gl.constexpr):
    """Let the next tile add."""
    if cfg.HAS_BLOCK_MASK:
        gl.atomic_add(semaphore, 1, sem="release", scope="gpu")
    else:
        gl.atomic_xchg(semaphore, work.n + 1, sem="release", scope="gpu")


# The kernels before and after the backward kernel: one computes row statistics, one rounds dQ.
#
# The first kernel makes one pass over O and dO: delta = rowsum(dO * O) (Dao et al. 2022, equation
# 4) minus the cotangent of the log-sum-exp, which adds P * dlse to dS. It also clears the workspace
# of dQ and its semaphores, and lists the tiles of keys of a packed batch.


LOG2E = tl.constexpr(1.4426950408889634)
SINK_ERROR = tl.constexpr(2.0**-21)


# Strides of tensors of head rows. Rows of 8 columns start at multiples of 16 bytes, which hints say
# where addresses are computed, so Triton need not specialise the strides.
STRIDES = [
    f"{name}_{of}" for name in ("o", "do", "dq", "dk", "dv") for of in ("batch", "row", "head")
]


@triton.jit(
    do_not_specialize=[*NUMBERS, *STRIDES, "lse_ptr", "dlse_ptr", "blocks", "entries", "together"]
)
def delta_kernel(
    out_ptr, dout_ptr, o_batch, o_row, o_head, do_batch, do_row, do_head, lse_ptr, dlse_ptr,
    lse_log2_ptr, minus_delta_ptr, workspace_ptr, semaphores_ptr, dq_ptr, dk_ptr, dv_ptr, order,
    entries, together, at, B, M, N, total_q, total_k, heads, group, blocks, keep,
    sink_ptr, cfg: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of one block of rows of one head, and clear its part of the workspace.
    `entries` and `together` are for `list_tiles`.

    `lse_log2` (heads, blocks, BLOCK_M) is +inf for a row that saw no key or does not exist, which
    makes its P zero; its `minus_delta` is 0 or, with a sink, the gradient of its log-sum-exp.

    Dropout keeps a probability with probability `keep` and divides it by that. This kernel adds
    log(keep) to the log-sum-exp, which divides every P, and multiplies delta by `keep`, so that dS
    = P (dP - delta) is the same. The kernel that recomputes P then only drops.
    """
    let_next_kernel_start()
    BLOCK: tl.constexpr = cfg.BLOCK_M
    SIZE: tl.constexpr = cfg.BLOCK_M * cfg.DQ_COLUMNS  # of a block of the workspace
    ADDERS: tl.constexpr = cfg.ADDERS
    b, h, m, start, count, first_block = block_of_rows(at, B, M, total_q, heads, BLOCK)
    if cfg.IS_ORDERED or cfg.IS_PERSISTENT:
        tl.store(order.counter, 0, mask=(tl.program_id(0) == 0) & (tl.program_id(1) == 0))
    if cfg.IS_PACKED:
        # There are at least as many programs as sequences.
        listed, part = tl.program_id(0) % B, tl.program_id(0) // B
        parts = tl.minimum(tl.num_programs(0) // B, PARTS)
        keys = Side(at.cu_seqlens_k, at.seqused_k, total_k, N)
        queries = Side(at.cu_seqlens_q, at.seqused_q, total_q, M)
        if part == 0:
            list_tiles(listed, order.tiles, entries, together, B, keys, queries, cfg.BLOCK_N)
        if part < parts:
            _, rows = rows_of(listed, queries)
            _, seen = rows_of(listed, keys)
            seen = tl.where(rows > 0, seen, 0)  # no query sees the others: see `leaves_keys_unseen`
            width = heads // group
            if not cfg.IS_DQ_ADDED:  # else it is the caller's
                fill_spare_rows(
                    dq_ptr, 0.0, 1, 0, heads * cfg.D, listed, rows, part, parts, B, queries
                )  # fmt: skip
            fill_spare_rows(dk_ptr, 0.0, 1, 0, width * cfg.D, listed, seen, part, parts, B, keys)
            fill_spare_rows(dv_ptr, 0.0, 1, 0, width * cfg.DV, listed, seen, part, parts, B, keys)
    block = (h * blocks + first_block + m).to(tl.int64)
    if cfg.IS_ORDERED:  # all of them: with a wrong `cu_seqlens`, any may be waited for
        adders = tl.arange(0, ADDERS)
        tl.store(semaphores_ptr + block * ADDERS + adders, tl.zeros([ADDERS], tl.int32))
    if (m >= 0) & (m * BLOCK < count):
        # (BLOCK_M,)
        rows = m * BLOCK + tl.arange(0, BLOCK)
        real = rows < count
        dims = tl.arange(0, cfg.BLOCK_DV if cfg.TAIL_DV == 0 else 2 * cfg.BLOCK_DV)[None, :]
        batch = b if at.cu_seqlens_q is None else b * 0
        row = (start + rows).to(tl.int64)[:, None]
        inside = real[:, None] & (dims < cfg.DV)
        o_base = out_ptr + batch.to(tl.int64) * o_batch + h.to(tl.int64) * o_head
        do_base = dout_ptr + batch.to(tl.int64) * do_batch + h.to(tl.int64) * do_head
        # (BLOCK_M, number of columns, rounded up to a power of two)
        o_ptrs = o_base + row * o_row + dims
        do_ptrs = do_base + row * do_row + dims
        if cfg.DV % 8 == 0:
            o_ptrs = tl.multiple_of(o_ptrs, [1, 16])
            do_ptrs = tl.multiple_of(do_ptrs, [1, 16])
        o = tl.load(o_ptrs, mask=inside, other=0.0).to(tl.float32)
        do = tl.load(do_ptrs, mask=inside, other=0.0).to(tl.float32)
        # A row without a key has an output of 0, whatever its gradient holds.
        # (BLOCK_M,)
        minus_delta = -tl.sum(tl.where(o == 0.0, 0.0, o * do), 1)
        if at.cu_seqlens_q is None:
            source = (b * heads + h).to(tl.int64) * M + rows
        else:
            source = h.to(tl.int64) * total_q + start + rows
        # (BLOCK_M,)
        lse = tl.load(lse_ptr + source, mask=real, other=-float("inf"))
        if dlse_ptr is not None:
            minus_delta += tl.load(dlse_ptr + source, mask=real, other=0.0)
        dead = lse == -float("inf")
        minus_delta = tl.where(dead, 0.0, minus_delta)
        if sink_ptr is not None:  # it is the log-sum-exp of a row without a key, but for rounding
            sink = tl.load(sink_ptr + h).to(tl.float32)
            is_sink = tl.abs(lse - sink) <= tl.abs(sink) * SINK_ERROR
            dead = dead | (is_sink & (tl.sum(tl.abs(o), 1) == 0.0))
        lse_log2 = lse * LOG2E
        if cfg.HAS_DROPOUT:
            lse_log2 += tl.log2(keep)
            minus_delta = tl.where(dead, minus_delta, minus_delta * keep)
        target = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(lse_log2_ptr + target, tl.where(dead, float("inf"), lse_log2))
        tl.store(minus_delta_ptr + target, minus_delta)
        for piece in tl.static_range((SIZE + PIECE - 1) // PIECE):
            offsets = piece * PIECE + tl.arange(0, PIECE)
            tl.store(workspace_ptr + block * SIZE + offsets, 0.0, mask=offsets < SIZE)


@triton.jit(do_not_specialize=[*NUMBERS, *STRIDES, "blocks"])
def round_kernel(
    workspace_ptr, dq_ptr, dq_batch, dq_row, dq_head, at, B, M, total_q, heads, blocks,
    scale, cfg: tl.constexpr,
):  # fmt: skip
    """dq = scale * workspace, added to what is there if cfg.IS_DQ_ADDED; each program has one block
    of one head.
    """
    wait_for_earlier_kernels()
    BLOCK: tl.constexpr = cfg.BLOCK_M
    ACROSS: tl.constexpr = BLOCK // 64  # pieces of the same columns
    SIZE: tl.constexpr = cfg.BLOCK_M * cfg.DQ_COLUMNS
    b, h, m, start, count, first_block = block_of_rows(at, B, M, total_q, heads, BLOCK)
    if (m >= 0) & (m * BLOCK < count):
        batch = b if at.cu_seqlens_q is None else b * 0
        base = dq_ptr + batch.to(tl.int64) * dq_batch + h.to(tl.int64) * dq_head
        pieces = workspace_ptr + (h * blocks + first_block + m).to(tl.int64) * SIZE
        for piece in tl.static_range((SIZE + PIECE - 1) // PIECE):
            row, column = m * BLOCK + (piece % ACROSS) * 64, (piece // ACROSS) * 64
            ptrs = pieces + piece * PIECE + tl.arange(0, PIECE)
            if (piece + 1) * PIECE <= SIZE:
                x = tl.load(ptrs) * scale
            else:  # see cfg.DQ_COLUMNS
                x = tl.load(ptrs, mask=tl.arange(0, PIECE) < SIZE % PIECE, other=0.0) * scale
            store_piece(x, base, start, row, count, dq_row, column, 64, cfg.D, cfg.IS_DQ_ADDED)


@triton.jit
def store_piece(
    x, base, start, row, count, row_stride, column, COLUMNS: tl.constexpr, DIM: tl.constexpr,
    IS_ADDED: tl.constexpr,
):  # fmt: skip
    """Round a piece (64, COLUMNS) and store it, or add it, at `row` and `column` of a sequence,
    which has `count` rows from `start` on and DIM columns.
    """
    # Columns / 8, warp, row % 8, columns % 8 / 2, row / 8 % 2, columns % 2.
    # -> (64, COLUMNS)
    x = tl.permute(tl.reshape(x, [COLUMNS // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    x = tl.reshape(x, [64, COLUMNS])
    rows = row + tl.arange(0, 64)[:, None]
    dims = column + tl.arange(0, COLUMNS)[None, :]
    ptrs = base + (start + rows).to(tl.int64) * row_stride + dims
    if DIM % 8 == 0:
        ptrs = tl.multiple_of(ptrs, [1, 16])
    inside = (rows < count) & (dims < DIM)
    if IS_ADDED:
        x += tl.load(ptrs, mask=inside, other=0.0)
    tl.store(ptrs, x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def block_of_rows(at, B, M, total_q, heads, BLOCK_M: tl.constexpr):
    """The block of a program: sequence, head, index in the sequence (negative in front of the first
    sequence), first row and number of rows of the sequence, and its first block in the workspace.

    The programs of a packed batch are those of the blocks of the workspace. Those of a dense batch
    begin with the last head: the cache then has the first heads when the next kernel begins with
    them, and the last ones after it has ended with them.
    """
    if at.cu_seqlens_q is None:
        blocks = tl.cdiv(M, BLOCK_M)
        number = tl.num_programs(0) - 1 - tl.program_id(0)
        head, m = number // blocks, number % blocks
        b, h = head // heads, head % heads
        first_block = b * blocks
    else:
        h = tl.program_id(0) % heads
        block = tl.program_id(0) // heads
        b = sequence_of_block(block, at.cu_seqlens_q, B, total_q, BLOCK_M)
    start, count = rows_of(b, Side(at.cu_seqlens_q, at.seqused_q, total_q, M))
    if at.cu_seqlens_q is not None:
        first_block = start // BLOCK_M + b
        m = block - first_block
    return b, h, m, start, count, first_block


@triton.jit
def sequence_of_block(block, cu_seqlens, B, total, BLOCK_M: tl.constexpr):
    """The last sequence that starts in or before `block`: the inverse of `blocks_before`."""
    b = block * 0
    stop = b + B
    while stop - b > 1:
        middle = (b + stop) // 2
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + middle), 0), total)
        is_before = start // BLOCK_M + middle <= block
        b = tl.where(is_before, middle, b)
        stop = tl.where(is_before, stop, middle)
    return b


# The sums of dK and dV of each part of a tile of keys, if several programs share the tile.
#
# They are float32 in memory, (heads, tiles, parts, BLOCK_N * columns). A part consists of pieces in
# register order (`dq.py`): those of the first columns, 64 rows at a time, then those of the tail.
# The consumers store them from their registers, and a kernel adds the parts of a tile.


@gluon.constexpr_function
def pieces_of(rows, columns, tail):
    """The number of pieces of a part of `rows` by `columns` and its tail."""
    return rows // 64 * (columns // 64 + (1 if tail > 0 else 0))


@gluon.jit
def part_start(COLUMNS: gl.constexpr, ptr, work, sizes, at, cfg: gl.constexpr):
    """Where a program's part of dK or dV begins, with COLUMNS columns in all."""
    SIZE: gl.constexpr = cfg.BLOCK_N * COLUMNS
    tiles = blocks_before(sizes.B, sizes.total_k, sizes.N, at.cu_seqlens_k, cfg.BLOCK_N)
    before = blocks_before(work.b, work.start_k, sizes.N, at.cu_seqlens_k, cfg.BLOCK_N)
    tile = (work.kv_head * tiles + before + work.n).to(gl.int64)
    return ptr + (tile * sizes.parts + work.part) * SIZE


@gluon.jit
def store_part(
    ME: gl.constexpr, x, tail, TAIL: gl.constexpr, ptr, work, sizes, at, cfg: gl.constexpr
):  # fmt: skip
    """Store rows ME * 64 to ME * 64 + 63 of a part of dK / scale or dV, and their tail, which has
    TAIL columns.
    """
    COLUMNS: gl.constexpr = x.shape[1]
    start = part_start(COLUMNS + TAIL, ptr, work, sizes, at, cfg)
    store_pieces(x, start + ME * (CONSUMER_ROWS * COLUMNS))
    if TAIL > 0:
        start += cfg.BLOCK_N * COLUMNS
        store_pieces(tail, start + ME * (CONSUMER_ROWS * TAIL))


@gluon.jit
def store_pieces(x, ptr):
    """Store `x` (64, columns) at `ptr`, 16 bytes a thread."""
    pieces = in_register_order(x)
    gl.store(ptr + gl.arange(0, pieces.shape[0], layout=pieces.type.layout), pieces)


@triton.jit(do_not_specialize=[*NUMBERS, *STRIDES, "blocks", "parts"])
def add_parts_kernel(
    dk_parts_ptr, dv_parts_ptr, dk_ptr, dv_ptr, dk_batch, dk_row, dk_head, dv_batch, dv_row,
    dv_head, at, N, total_k, heads, blocks, parts, scale, cfg: tl.constexpr,
):  # fmt: skip
    """dk = scale * the sum of its parts, and dv = the sum of its parts, always in the same order;
    a program adds one piece. The pieces of dk come first.
    """
    KEY_PIECES: tl.constexpr = pieces_of(cfg.BLOCK_N, cfg.BLOCK_D, cfg.TAIL_D)
    b = tl.program_id(0) // heads
    h = tl.program_id(0) % heads
    n = tl.program_id(1)
    start, count = rows_of(b, Side(at.cu_seqlens_k, at.seqused_k, total_k, N))
    first_block = b * tl.cdiv(N, cfg.BLOCK_N)
    if at.cu_seqlens_k is not None:
        first_block = start // cfg.BLOCK_N + b
    if n * cfg.BLOCK_N < count:
        batch = b if at.cu_seqlens_k is None else b * 0
        batch = batch.to(tl.int64)
        tile = (h * blocks + first_block + n).to(tl.int64) * parts
        piece = tl.program_id(2)
        row = n * cfg.BLOCK_N
        if piece < KEY_PIECES:
            base = dk_ptr + batch * dk_batch + h.to(tl.int64) * dk_head
            add_piece(
                dk_parts_ptr, tile, piece, parts, scale, base, start, row, count, dk_row, cfg.D,
                cfg.BLOCK_N, cfg.BLOCK_D, cfg.TAIL_D,
            )  # fmt: skip
        else:
            base = dv_ptr + batch * dv_batch + h.to(tl.int64) * dv_head
            add_piece(
                dv_parts_ptr, tile, piece - KEY_PIECES, parts, 1.0, base, start, row, count, dv_row,
                cfg.DV, cfg.BLOCK_N, cfg.BLOCK_DV, cfg.TAIL_DV,
            )  # fmt: skip


@triton.jit
def add_piece(
    ptr, tile, piece, parts, scale, base, start, row, count, row_stride, DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
):  # fmt: skip
    """Add one piece of all parts of a tile, scale it, and store its rows; `row` is the tile's
    first row. BLOCK_D and TAIL_D are the columns of dk or of dv.
    """
    SIZE: tl.constexpr = BLOCK_N * (BLOCK_D + TAIL_D)
    PIECES: tl.constexpr = BLOCK_N * BLOCK_D // PIECE
    ACROSS: tl.constexpr = BLOCK_D // 64
    ptr += tile * SIZE
    if piece < PIECES:
        x = sum_of_parts(ptr + piece * PIECE, parts, PIECE, SIZE) * scale
        row += piece // ACROSS * 64
        store_piece(x, base, start, row, count, row_stride, piece % ACROSS * 64, 64, DIM, False)
    elif TAIL_D > 0:
        TAIL: tl.constexpr = 64 * TAIL_D
        half = piece - PIECES
        tail = sum_of_parts(ptr + PIECES * PIECE + half * TAIL, parts, TAIL, SIZE) * scale
        row += half * 64
        store_piece(tail, base, start, row, count, row_stride, BLOCK_D, TAIL_D, DIM, False)


@triton.jit
def sum_of_parts(ptr, parts, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """The sum of one piece, SIZE numbers, over all parts, which are STRIDE numbers apart."""
    ptrs = ptr + tl.arange(0, SIZE)
    # (SIZE,)
    x = tl.load(ptrs)
    for part in range(1, parts):
        x += tl.load(ptrs + part * STRIDE)
    return x
