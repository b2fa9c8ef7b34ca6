"""The kernels before and after the backward kernel: one computes row statistics, one rounds dQ.

The first kernel makes one pass over O and dO: delta = rowsum(dO * O) (Dao et al. 2022, equation 4)
minus the cotangent of the log-sum-exp, which adds P * dlse to dS. It also clears the workspace of
dQ and its semaphores, and lists the tiles of keys of a packed batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.intrinsics import let_next_kernel_start, wait_for_earlier_kernels
from ..shared.packing_order import PARTS, Side, fill_spare_rows, list_tiles, rows_of
from ..shared.schedule import NUMBERS
from .dq import PIECE

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
    if cfg.IS_ORDERED:
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
        minus_delta = -tl.sum(tl.where(o == 0.0, 0.0, o * do), 1)
        if at.cu_seqlens_q is None:
            source = (b * heads + h).to(tl.int64) * M + rows
        else:
            source = h.to(tl.int64) * total_q + start + rows
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

    The programs of a packed batch are those of the blocks of the workspace.
    """
    h = tl.program_id(0) % heads
    b = tl.program_id(0) // heads
    m = tl.program_id(1)
    first_block = b * tl.cdiv(M, BLOCK_M)
    if at.cu_seqlens_q is not None:
        block = b
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
