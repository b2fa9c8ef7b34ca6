"""dQ on its way to memory: tiles of keys add to one float32 workspace, a second kernel rounds it.

A piece is 64 queries by 64 columns, 16 KiB, in the order in which the registers of a consumer hold
it: both the stores to shared memory and the addition, one contiguous transfer of the copy engine,
then run at full speed. The kernel that rounds puts the elements back into their places.

Additions arrive in any order, unless cfg.IS_ORDERED: then tile n of a sequence adds to a block of
queries after tile n - 1 has, which it learns from a number in memory, the block's *turn*: n + 1
once tile n is done.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .arguments import NUMBERS
from .backward_verbs import add_to_global, recast
from .verbs import FIRST_BARRIER, wait_at_barrier

PIECE_ROWS = gl.constexpr(16)  # of the workspace, 256 columns wide
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
def add_piece(dq, slot, number, workspace, tiles, cfg: gl.constexpr):
    """Start adding `dq` (64, 64) to piece `number`, through slot `slot` of the staging tiles."""
    tile = tiles.index(slot)
    recast(tile, gl.float32, [64, 64], piece_layout()).store(dq)
    fence_async_shared()
    add_to_global(workspace, [number * PIECE_ROWS, 0], tile)


@gluon.jit
def await_turn(turn, n, before_end, m):
    """Wait until tile n - 1 has added to block m, if it does at all.

    No deadlock: tiles are numbered in the order in which programs start, so that a program waits
    for none but one that runs already, and the first of those that run waits for none.
    """
    if m < before_end:
        # The additions before and after go through another path to memory than this load.
        gl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; AGAIN: ld.acquire.gpu.global.b32 t, [$1];"
            " setp.ne.s32 p, t, $2; @p bra AGAIN; fence.proxy.async; mov.b32 $0, 0; }",
            "=r,l,r",
            [turn.to(gl.int64, bitcast=True), n],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def await_additions(ME: gl.constexpr):
    """Wait until what this consumer has added is in memory (one of its threads started that)."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    wait_at_barrier(FIRST_BARRIER + 1 + ME, 128)


@gluon.jit
def pass_turn(turn, n):
    """Let tile n + 1 add."""
    gl.atomic_xchg(turn, n + 1, sem="release", scope="gpu")


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
