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

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..shared.channels import Channel
from ..shared.intrinsics import add_to_global, arrive_alone, recast, sync_warps
from .products import piece_columns
from .schedule import (
    block_at,
    key_work,
    listed_blocks,
    own_heads,
    own_steps,
    predecessors_at,
    visited_block,
)

PIECE_ROWS = gl.constexpr(16)  # of the workspace, 256 columns wide
PAIRS = gl.constexpr(2)  # slots of the staging ring
PIECE = tl.constexpr(4096)


@gluon.constexpr_function
def rows_of_piece(columns):
    """Rows of the workspace that 64 queries by `columns` columns occupy."""
    return columns // 4


@gluon.constexpr_function
def piece_layout(columns):
    """The float32 tile (64, columns) of `intrinsics.accumulator` in register order: four registers
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
def writer(ME: gl.constexpr, outputs, staging, tile, sizes, at, mask, cfg: gl.constexpr):
    """Add dQ of a tile of keys: every step or, with two writers, every second step."""
    if cfg.ADDERS == 1:
        work = key_work(tile, sizes, at, mask, cfg)
        add_pairs(ME, outputs, staging, work, sizes, mask, cfg)


@gluon.jit
def add_pairs(ME: gl.constexpr, outputs, staging, work, sizes, mask, cfg: gl.constexpr):
    """Add the pieces of both consumers from the staging ring, in the order of the query loop."""
    count = work.end - work.begin
    i = 0  # pairs so far
    if not cfg.IS_SPLIT:  # the first pair belongs to no step
        if ME == 0 and count > 0:
            staging.acquire(0)
            staging.release(0)
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
