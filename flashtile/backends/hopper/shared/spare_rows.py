"""Spare rows: the rows of a tensor that belong to no sequence, before, between and after them.

The kernels write only the rows of sequences. A kernel before them fills the spare rows, so that no
launch has to fill the whole tensor. Most batches have none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .packing_order import rows_of

CHUNK = tl.constexpr(4096)
PARTS = tl.constexpr(8)  # programs that share the rows after a sequence


@triton.jit
def fill_spare_rows(ptr, value, runs, step, width, b, count, part, parts, B, side):
    """Write `value` into the rows from row `count` of sequence `b` to the next sequence, and into
    those before sequence 0.

    `side` has the lengths. The tensor at `ptr`, of one sequence if the batch is dense, consists of
    `runs` runs at multiples of `step`; in each, a row has `width` elements and rows are adjacent.
    `parts` programs share the work.
    """
    start, _ = rows_of(b, side)
    stop = start + side.longest
    if side.cu_seqlens is not None:
        stop = start * 0 + side.total
        if b + 1 < B:
            stop, _ = rows_of(b + 1, side)
        if b == 0:
            fill_rows(ptr, value, runs, step, width, start * 0, start, part, parts)
    fill_rows(ptr, value, runs, step, width, start + count, stop, part, parts)


@triton.jit
def fill_rows(ptr, value, runs, step, width, first, stop, part, parts):
    """Write `value` into the rows [first, stop) of all runs; one of `parts` shares."""
    size = tl.maximum(stop - first, 0).to(tl.int64) * width
    if size > 0:
        ptr += first.to(tl.int64) * width
        for _ in range(runs):
            for offset in range(part * CHUNK, size, parts * CHUNK):
                offs = offset + tl.arange(0, CHUNK)
                tl.store(ptr + offs, value, mask=offs < size)
            ptr += step
