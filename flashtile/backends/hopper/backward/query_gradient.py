"""dQ on its way to memory: tiles of keys add to one float32 workspace, a second kernel rounds it.

A piece is 64 queries by 64 columns, 16 KiB, in the order in which the registers of a consumer hold
it: both the stores to shared memory and the addition, one contiguous transfer of TMA,
then run at full speed. The kernel that rounds puts the elements back into their places.

Up to 128 columns a consumer makes one piece a step. Those of both lie side by side in a slot of the
staging ring, and `backward_writer.py` adds them with one transfer; or, for cfg.FROM_REGISTERS, each
thread adds four neighbours at a time, without shared memory. Above, a consumer makes two pieces
and adds them itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..shared.arguments import NUMBERS
from ..shared.channels import Channel
from ..shared.intrinsics import arrive_alone
from .intrinsics import add_to_global, meet, recast

PIECE_ROWS = gl.constexpr(16)  # of the workspace, 256 columns wide
PAIRS = gl.constexpr(2)  # on their way to the writer
PIECE = tl.constexpr(4096)


@gluon.constexpr_function
def piece_layout():
    """The float32 tile (64, 64) of `layouts.accumulator`, register by register: four registers of a
    thread, then the thread, then the other registers. No two threads share a bank."""
    return gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16],
         [0, 32]]
    )  # fmt: skip


@gluon.jit
def make_staging(workspace, cfg: gl.constexpr):
    """The ring of pairs of pieces: both consumers fill a slot, the writer empties it. Without a
    writer, a piece of each consumer; for cfg.FROM_REGISTERS nothing but the workspace."""
    SLOTS: gl.constexpr = PAIRS if cfg.ADDERS == 1 else 1
    staging = workspace
    if not cfg.FROM_REGISTERS:
        staging = gl.allocate_shared_memory(
            gl.float32, [2 * SLOTS, PIECE_ROWS, 256], workspace.layout
        )
    if cfg.ADDERS == 1:
        full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(SLOTS):
            mbarrier.init(full.index(slot), count=2)
            mbarrier.init(empty.index(slot), count=1)
        staging = Channel(staging, staging, full, empty, SLOTS)
    return staging


@gluon.jit
def put_piece(ME: gl.constexpr, dq, staging, i):
    """Hand `dq` (64, 64), this consumer's half of pair `i`, to the writer."""
    slot = i % staging.SLOTS
    mbarrier.wait(staging.empty.index(slot), ((i // staging.SLOTS) & 1) ^ 1)
    tile = staging.tiles.index(2 * slot + ME)
    recast(tile, gl.float32, [64, 64], piece_layout()).store(dq)
    fence_async_shared()
    meet()
    arrive_alone(staging.full.index(slot))


@gluon.jit
def add_at_once(dq, number, workspace):
    """Add `dq` (64, 64) to piece `number` of `workspace`, plain memory, from the registers."""
    # Rows: warp, row / 8 % 2, row % 8. Columns: columns / 8, columns % 8 / 2, columns % 2.
    piece = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([PIECE])
    start = workspace + number.to(gl.int64) * PIECE
    gl.atomic_add(start + gl.arange(0, PIECE, layout=piece.type.layout), piece, sem="relaxed")


@gluon.jit
def add_piece(dq, tile, number, workspace):
    """Start adding `dq` (64, 64) to piece `number`, through the staging tile of this consumer."""
    recast(tile, gl.float32, [64, 64], piece_layout()).store(dq)
    fence_async_shared()
    add_to_global(workspace, [number * PIECE_ROWS, 0], tile)


@triton.jit(do_not_specialize=[*NUMBERS, "blocks"])
def round_kernel(
    workspace, dq, batch_stride, row_stride, head_stride, at, M, total_q, heads, blocks, scale,
    cfg: tl.constexpr,
):  # fmt: skip
    """dq = scale * workspace, one block of one head a program."""
    BLOCK: tl.constexpr = cfg.BLOCK_M
    PIECES: tl.constexpr = cfg.BLOCK_M * cfg.BLOCK_D // PIECE
    b = tl.program_id(0) // heads
    h = tl.program_id(0) % heads
    m = tl.program_id(1)
    start, count, place = rows_of_sequence(b, at, M, total_q, BLOCK)
    if m * BLOCK < count:
        batch = b if at.cu_seqlens_q is None else b * 0
        base = dq + batch.to(tl.int64) * batch_stride + h.to(tl.int64) * head_stride
        pieces = workspace + ((h * blocks + place + m).to(tl.int64) * PIECES) * PIECE
        for piece in tl.static_range(PIECES):
            x = tl.load(pieces + piece * PIECE + tl.arange(0, PIECE)) * scale
            # Columns / 8, warp, row % 8, columns % 8 / 2, row / 8 % 2, columns % 2.
            x = tl.permute(tl.reshape(x, [8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
            x = tl.reshape(x, [64, 64])
            down, across = (piece % (BLOCK // 64)) * 64, (piece // (BLOCK // 64)) * 64
            rows = m * BLOCK + down + tl.arange(0, 64)[:, None]
            dims = across + tl.arange(0, 64)[None, :]
            places = (start + rows).to(tl.int64) * row_stride + dims
            inside = (rows < count) & (dims < cfg.D)
            tl.store(base + places, x.to(dq.dtype.element_ty), mask=inside)


@triton.jit
def rows_of_sequence(b, at, M, total_q, BLOCK_M: tl.constexpr):
    """First row, rows, and first block in the workspace of sequence `b`: `schedule.sequence` and
    `backward_schedule.places_before` for a kernel in plain Triton."""
    start = b * 0
    count = start + M
    place = b * tl.cdiv(M, BLOCK_M)
    if at.cu_seqlens_q is not None:
        start = tl.minimum(tl.maximum(tl.load(at.cu_seqlens_q + b), 0), total_q)
        stop = tl.minimum(tl.load(at.cu_seqlens_q + b + 1), total_q)
        count = tl.minimum(tl.maximum(stop - start, 0), count)
        place = start // BLOCK_M + b
    if at.seqused_q is not None:
        count = tl.minimum(tl.maximum(tl.load(at.seqused_q + b), 0), count)
    return start, count, place
