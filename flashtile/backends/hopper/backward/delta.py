"""What the backward needs of every row before it starts, in one pass over O and dO.

delta = rowsum(dO * O) (Dao et al. 2022, equation 4) less the cotangent of the log-sum-exp, which
adds P * dlse to dS. The same pass clears what tiles of keys will add to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..shared.arguments import NUMBERS
from .query_gradient import rows_of_sequence

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=[*NUMBERS, "blocks"])
def delta_kernel(
    out, dout, o_batch, o_row, o_head, do_batch, do_row, do_head, lse_ptr, dlse_ptr, lse_log2_ptr,
    minus_delta_ptr, workspace, turns, counter, at, M, total_q, heads, blocks, cfg: tl.constexpr,
):  # fmt: skip
    """Statistics of one block of rows of one head, and its part of the workspace cleared.

    `lse_log2` (heads, blocks, BLOCK_M) is +inf where a row saw no key or does not exist, which
    makes its P zero; `minus_delta` is 0 there.
    """
    BLOCK: tl.constexpr = cfg.BLOCK_M
    BLOCK_D: tl.constexpr = cfg.BLOCK_D
    ADDERS: tl.constexpr = cfg.ADDERS
    b = tl.program_id(0) // heads
    h = tl.program_id(0) % heads
    m = tl.program_id(1)
    start, count, place = rows_of_sequence(b, at, M, total_q, BLOCK)
    if cfg.IS_ORDERED:
        tl.store(counter, 0, mask=(m == 0) & (tl.program_id(0) == 0))
    if m * BLOCK < count:
        rows = m * BLOCK + tl.arange(0, BLOCK)
        real = rows < count
        dims = tl.arange(0, BLOCK_D)[None, :]
        batch = b if at.cu_seqlens_q is None else b * 0
        row = (start + rows).to(tl.int64)[:, None]
        inside = real[:, None] & (dims < cfg.DV)
        o_base = out + batch.to(tl.int64) * o_batch + h.to(tl.int64) * o_head
        do_base = dout + batch.to(tl.int64) * do_batch + h.to(tl.int64) * do_head
        # (BLOCK_M, BLOCK_D)
        o = tl.load(o_base + row * o_row + dims, mask=inside, other=0.0).to(tl.float32)
        do = tl.load(do_base + row * do_row + dims, mask=inside, other=0.0).to(tl.float32)
        minus_delta = -tl.sum(o * do, 1)
        if at.cu_seqlens_q is None:
            source = (b * heads + h).to(tl.int64) * M + rows
        else:
            source = h.to(tl.int64) * total_q + start + rows
        lse = tl.load(lse_ptr + source, mask=real, other=-float("inf"))
        if dlse_ptr is not None:
            minus_delta += tl.load(dlse_ptr + source, mask=real, other=0.0)
        dead = lse == -float("inf")
        block = (h * blocks + place + m).to(tl.int64)
        target = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(lse_log2_ptr + target, tl.where(dead, float("inf"), lse * LOG2E))
        tl.store(minus_delta_ptr + target, tl.where(dead, 0.0, minus_delta))
        cleared = tl.arange(0, BLOCK)[:, None] * BLOCK_D + dims
        zeros = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        tl.store(workspace + block * (BLOCK * BLOCK_D) + cleared, zeros)
        if cfg.IS_ORDERED:
            adders = tl.arange(0, ADDERS)
            tl.store(turns + block * ADDERS + adders, tl.zeros([ADDERS], tl.int32))
