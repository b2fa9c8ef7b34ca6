"""The sums of dK and dV of each part of a tile of keys, if several programs share the tile.

They are float32 in memory, (heads, tiles, parts, BLOCK_N * columns). A part consists of pieces in
register order (`dq.py`): those of the first columns, 64 rows at a time, then those of the tail. The
consumers store them from their registers, and a kernel adds the parts of a tile.
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


@gluon.constexpr_function
def pieces_of(rows, columns, tail):
    """The number of pieces of a part of `rows` by `columns` and its tail."""
    return rows // 64 * (columns // 64 + (1 if tail > 0 else 0))


@gluon.jit
def store_part(
    ME: gl.constexpr, x, tail, TAIL: gl.constexpr, ptr, work, sizes, at, cfg: gl.constexpr
):  # fmt: skip
    """Store rows ME * 64 to ME * 64 + 63 of a part of dK / scale or dV, and their tail, which has
    TAIL columns.
    """
    COLUMNS: gl.constexpr = x.shape[1]
    SIZE: gl.constexpr = cfg.BLOCK_N * (COLUMNS + TAIL)
    tiles = blocks_before(sizes.B, sizes.total_k, sizes.N, at.cu_seqlens_k, cfg.BLOCK_N)
    before = blocks_before(work.b, work.start_k, sizes.N, at.cu_seqlens_k, cfg.BLOCK_N)
    tile = (work.kv_head * tiles + before + work.n).to(gl.int64)
    start = ptr + (tile * sizes.parts + work.part) * SIZE
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
    x = tl.load(ptrs)
    for part in range(1, parts):
        x += tl.load(ptrs + part * STRIDE)
    return x
