"""The pages of a cache side by side, for kernels that read packed sequences."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .arguments import rows_of
from .kernel_launch import Launch, run

# Numbers that one step of a program copies.
COPIED = 4096


@triton.jit
def copy_page(
    target, target_base, source, source_base, ROWS: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All heads of ROWS rows."""
    for first in range(0, ROWS * HEADS * DIM, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        inside = offs < ROWS * HEADS * DIM
        row = (offs // (HEADS * DIM)).to(tl.int64)
        head = offs // DIM % HEADS
        dim = offs % DIM
        place = row * source.row + head * source.head + dim * source.dim
        x = tl.load(source_base + place, mask=inside)
        place = row * target.row + head * target.head + dim * target.dim
        tl.store(target_base + place, x, mask=inside)


@triton.jit(do_not_specialize=["pages", "columns"])
def gather_kernel(
    k, v, k_rows, v_rows, page_table, used_ptr, pages, columns, PAGE: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The keys and values of one page of one sequence, if it is used."""
    b = tl.program_id(0) // columns
    column = tl.program_id(0) % columns
    if column * PAGE >= tl.load(used_ptr + b):
        return
    page = tl.load(page_table + tl.program_id(0).to(tl.int64))
    page = tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64)
    row = column.to(tl.int64) * PAGE
    target = k_rows.ptr + b.to(tl.int64) * k_rows.batch + row * k_rows.row
    copy_page(k_rows, target, k, k.ptr + page * k.batch, PAGE, HEADS, D, BLOCK)
    target = v_rows.ptr + b.to(tl.int64) * v_rows.batch + row * v_rows.row
    copy_page(v_rows, target, v, v.ptr + page * v.batch, PAGE, HEADS, DV, BLOCK)


def gather_launch(
    k: Tensor, v: Tensor, page_table: Tensor, used: Tensor, k_rows: Tensor, v_rows: Tensor
) -> Launch:
    """Copy the used pages of each sequence to its row of `k_rows` and `v_rows`."""
    batch, columns = page_table.shape
    arguments: dict[str, Any] = {
        "k": rows_of(k),
        "v": rows_of(v),
        "k_rows": rows_of(k_rows),
        "v_rows": rows_of(v_rows),
        "page_table": page_table.contiguous(),
        "used_ptr": used.contiguous(),
        "pages": k.shape[0],
        "columns": columns,
        "PAGE": k.shape[1],
        "HEADS": k.shape[2],
        "D": k.shape[3],
        "DV": v.shape[3],
        "BLOCK": COPIED,
    }
    return Launch(gather_kernel, (batch * columns,), arguments, 4, 1)


def gather_pages(k: Tensor, v: Tensor, page_table: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """The op ``flashtile::gather_pages`` of `prefill.py`."""
    batch, columns = page_table.shape
    k_rows, v_rows = (x.new_empty(batch, columns * x.shape[1], *x.shape[2:]) for x in (k, v))
    run([gather_launch(k, v, page_table, used, k_rows, v_rows)], k)
    return k_rows, v_rows
