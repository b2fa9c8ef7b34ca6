"""The sums of dK and dV of each part of a tile of keys, if several programs share the tile.

They are float32 in memory, (heads, tiles, parts, BLOCK_N * columns). A part consists of pieces in
register order (`dq.py`): those of the first BLOCK_D columns, 64 rows at a time, then those of the
tail. The consumers store them from their registers, and a kernel adds the parts of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared.intrinsics import CONSUMER_ROWS
from ..shared.packing_order import Side, rows_of
from ..shared.schedule import NUMBERS
from .dq import PIECE, in_register_order
from .row_kernels import STRIDES, store_piece
from .schedule import blocks_before


@gluon.jit
def store_part(ME: gl.constexpr, x, tail, ptr, work, sizes, at, cfg: gl.constexpr):
    """Store rows ME * 64 to ME * 64 + 63 of a part of dK / scale or dV, and their tail."""
    SIZE: gl.constexpr = cfg.BLOCK_N * (cfg.BLOCK_D + cfg.TAIL_D)
    tiles = blocks_before(sizes.B, sizes.total_k, sizes.N, at.cu_seqlens_k, cfg.BLOCK_N)
    before = blocks_before(work.b, work.start_k, sizes.N, at.cu_seqlens_k, cfg.BLOCK_N)
    tile = (work.kv_head * tiles + before + work.n).to(gl.int64)
    start = ptr + (tile * sizes.parts + work.part) * SIZE
    store_pieces(x, start + ME * (CONSUMER_ROWS * cfg.BLOCK_D))
    if cfg.TAIL_D > 0:
        start += cfg.BLOCK_N * cfg.BLOCK_D
        store_pieces(tail, start + ME * (CONSUMER_ROWS * cfg.TAIL_D))


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
    a program adds one piece, of dk if program_id(2) is even, else of dv.
    """
    b = tl.program_id(0) // heads
    h = tl.program_id(0) % heads
    n = tl.program_id(1)
    start, count = rows_of(b, Side(at.cu_seqlens_k, at.seqused_k, total_k, N))
    first_block = b * tl.cdiv(N, cfg.BLOCK_N)
    if at.cu_seqlens_k is not None:
        first_block = start // cfg.BLOCK_N + b
    if n * cfg.BLOCK_N < count:
        SIZE: tl.constexpr = cfg.BLOCK_N * (cfg.BLOCK_D + cfg.TAIL_D)
        batch = b if at.cu_seqlens_k is None else b * 0
        batch = batch.to(tl.int64)
        first = (h * blocks + first_block + n).to(tl.int64) * parts * SIZE
        piece = tl.program_id(2) // 2
        row = n * cfg.BLOCK_N
        if tl.program_id(2) % 2 == 0:
            base = dk_ptr + batch * dk_batch + h.to(tl.int64) * dk_head
            ptr = dk_parts_ptr + first
            add_piece(ptr, piece, parts, scale, base, start, row, count, dk_row, cfg.D, cfg)
        else:
            base = dv_ptr + batch * dv_batch + h.to(tl.int64) * dv_head
            ptr = dv_parts_ptr + first
            add_piece(ptr, piece, parts, 1.0, base, start, row, count, dv_row, cfg.DV, cfg)


@triton.jit
def add_piece(
    ptr, piece, parts, scale, base, start, row, count, row_stride, DIM: tl.constexpr,
    cfg: tl.constexpr,
):  # fmt: skip
    """Add one piece of all parts at `ptr`, scale it, and store its rows; `row` is the tile's
    first row.
    """
    PIECES: tl.constexpr = cfg.BLOCK_N * cfg.BLOCK_D // PIECE
    ACROSS: tl.constexpr = cfg.BLOCK_D // 64
    if piece < PIECES:
        x = sum_of_parts(ptr + piece * PIECE, parts, PIECE, cfg) * scale
        row += piece // ACROSS * 64
        store_piece(x, base, start, row, count, row_stride, piece % ACROSS * 64, 64, DIM)
    elif cfg.TAIL_D > 0:
        TAIL: tl.constexpr = 64 * cfg.TAIL_D
        half = piece - PIECES
        tail = sum_of_parts(ptr + PIECES * PIECE + half * TAIL, parts, TAIL, cfg) * scale
        row += half * 64
        store_piece(tail, base, start, row, count, row_stride, cfg.BLOCK_D, cfg.TAIL_D, DIM)


@triton.jit
def sum_of_parts(ptr, parts, SIZE: tl.constexpr, cfg: tl.constexpr):
    """The sum of one piece, SIZE numbers, over all parts, in their order."""
    STRIDE: tl.constexpr = cfg.BLOCK_N * (cfg.BLOCK_D + cfg.TAIL_D)
    ptrs = ptr + tl.arange(0, SIZE)
    x = tl.load(ptrs)
    for part in range(1, parts):
        x += tl.load(ptrs + part * STRIDE)
    return x
