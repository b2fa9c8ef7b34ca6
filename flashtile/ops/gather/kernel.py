"""Copy the pages of a cache into contiguous rows, for kernels that read packed sequences."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...gpu.launch import Launch
from ...gpu.launch_cache import allocate_and_run_all
from ...gpu.memory import NewTensor, uninitialised
from ...gpu.rows import rows_of

# Elements of K, and of V, that a program copies.
COPIED = 4096


@triton.constexpr_function
def parts_of_page(page: int, heads: int, D: int, DV: int, block: int) -> int:
    """Programs that copy one page."""
    return -(-page * heads * max(D, DV) // block)


@triton.jit
def element_offset(x, offs, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Offsets of the elements `offs` of a page, counted over rows, heads and head dim."""
    row = (offs // (HEADS * DIM)).to(tl.int64)
    return row * x.row + offs // DIM % HEADS * x.head + offs % DIM * x.dim


@triton.jit(do_not_specialize=["pages", "columns"])
def gather_kernel(
    k, v, k_rows, v_rows, page_table_ptr, used_ptr, pages, columns, PAGE: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a part of the keys and values of one page of one sequence, if it is used."""
    PARTS: tl.constexpr = parts_of_page(PAGE, HEADS, D, DV, BLOCK)
    number = tl.program_id(0) // PARTS  # index of the page in the table
    b = number // columns
    column = number % columns
    if column * PAGE >= tl.load(used_ptr + b):
        return
    page = tl.load(page_table_ptr + number.to(tl.int64))
    page = tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64)
    row = column.to(tl.int64) * PAGE
    offs = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    # Load K and V before storing either, to wait for memory only once.
    of_k = k.ptr + page * k.batch + element_offset(k, offs, HEADS, D)
    k_part = tl.load(of_k, mask=offs < PAGE * HEADS * D)
    of_v = v.ptr + page * v.batch + element_offset(v, offs, HEADS, DV)
    v_part = tl.load(of_v, mask=offs < PAGE * HEADS * DV)
    to_k = k_rows.ptr + b.to(tl.int64) * k_rows.batch + row * k_rows.row
    to_k += element_offset(k_rows, offs, HEADS, D)
    tl.store(to_k, k_part, mask=offs < PAGE * HEADS * D)
    to_v = v_rows.ptr + b.to(tl.int64) * v_rows.batch + row * v_rows.row
    to_v += element_offset(v_rows, offs, HEADS, DV)
    tl.store(to_v, v_part, mask=offs < PAGE * HEADS * DV)


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
        "page_table_ptr": page_table.contiguous(),
        "used_ptr": used.contiguous(),
        "pages": k.shape[0],
        "columns": columns,
        "PAGE": k.shape[1],
        "HEADS": k.shape[2],
        "D": k.shape[3],
        "DV": v.shape[3],
        "BLOCK": COPIED,
    }
    parts = parts_of_page(*k.shape[1:], v.shape[3], COPIED)
    return Launch(gather_kernel, (batch * columns * parts,), arguments, 4, 1)


def gather_pages(k: Tensor, v: Tensor, page_table: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """`op.gather_pages`; the unused pages are neither read nor written."""
    batch, columns = page_table.shape

    def allocators() -> list[NewTensor]:
        rows = batch, columns * k.shape[1]
        return [uninitialised((*rows, *x.shape[2:]), x.dtype, x.device) for x in (k, v)]

    def describe(given: Any, made: Any) -> list[Launch]:
        return [gather_launch(*given, *made)]

    given = (k, v, page_table, used)
    k_rows, v_rows = allocate_and_run_all("gather", (), given, allocators, describe, lambda: None)
    return k_rows, v_rows
