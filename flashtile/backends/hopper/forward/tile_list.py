"""The kernel before the forward if sequences can be shorter than the tensors: it lists the tiles
that exist and fills the spare rows of the outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.intrinsics import let_next_kernel_start
from ..shared.packing_order import Side, fill_spare_rows, list_tiles, rows_of
from ..shared.schedule import NUMBERS


@triton.jit(do_not_specialize=[*NUMBERS, "entries", "together"])
def tile_list_kernel(
    out_ptr, lse_ptr, entries, together, at, B, M, N, total_q, total_k, heads,
    BLOCK_M: tl.constexpr, DV: tl.constexpr, IS_PACKED: tl.constexpr,
):  # fmt: skip
    """List the tiles of a sequence, and fill the rows after it: out (rows, heads, DV) with zeros,
    the log-sum-exp with -inf; unless they are None, because the caller has filled them.
    """
    let_next_kernel_start()
    b, part = tl.program_id(0), tl.program_id(1)
    parts = tl.num_programs(1)
    queries = Side(at.cu_seqlens_q, at.seqused_q, total_q, M)
    keys = Side(at.cu_seqlens_k, at.seqused_k, total_k, N)
    if part == 0:
        list_tiles(b, at.tiles, entries, together, B, queries, keys, BLOCK_M)
    _, count = rows_of(b, queries)
    rows = total_q
    if not IS_PACKED:
        rows = M
        out_ptr += b.to(tl.int64) * M * heads * DV
        lse_ptr += b.to(tl.int64) * M * heads
    if out_ptr is not None:
        fill_spare_rows(out_ptr, 0.0, 1, 0, heads * DV, b, count, part, parts, B, queries)
        fill_spare_rows(lse_ptr, -float("inf"), heads, rows, 1, b, count, part, parts, B, queries)
