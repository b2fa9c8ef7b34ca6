"""Load tiles of keys and values from a paged cache, through a page table."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import load_rows, load_tile


@triton.jit
def page_list(lengths, b):
    """Pointer to the page indices of sequence `b`; None without pages."""
    pages = None
    if lengths.at.page_table is not None:
        pages = lengths.at.page_table + b.to(tl.int64) * lengths.page_columns
    return pages


@triton.jit
def load_paged_rows(
    x, base, pages, start, n0, count, lengths, IS_MASKED: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Rows [n0, n0 + BLOCK) of a sequence cut into pages of PAGE rows, (BLOCK, BLOCK_DIM); zero
    past `count` (if IS_MASKED) and past DIM."""
    if PAGE % BLOCK == 0 and lengths.at.leftpad_k is None:  # the tile is inside one page
        page = page_number(tl.load(pages + n0 // PAGE), lengths)
        page_base = base + page.to(tl.int64) * x.batch
        left = count - n0 + n0 % PAGE
        tile = load_rows(x, page_base, n0 % PAGE, left, IS_MASKED, DIM, BLOCK, BLOCK_DIM, ALIGNMENT)
    else:
        offs = tl.arange(0, BLOCK)
        dims = tl.arange(0, BLOCK_DIM)[None, :]
        inside = n0 + offs < count
        if BLOCK % PAGE == 0 and lengths.at.leftpad_k is None:  # the tile consists of whole pages
            column = n0 // PAGE + tl.arange(0, BLOCK // PAGE)
            slot = offs % PAGE
            is_used = column * PAGE < count
        else:
            row = n0 + offs
            if lengths.at.leftpad_k is not None:
                row += start
            column = row // PAGE
            slot = row % PAGE
            is_used = inside
        if IS_MASKED:
            page = tl.load(pages + column, mask=is_used, other=0)
        else:
            page = tl.load(pages + column)
        page = page_number(page, lengths)
        if BLOCK % PAGE == 0 and lengths.at.leftpad_k is None:  # repeat each page for its rows
            page = tl.broadcast_to(page[:, None], [BLOCK // PAGE, PAGE])
            page = tl.reshape(page, [BLOCK])
        pointers = (base + dims) + (slot * x.row)[:, None]
        pointers += page_offset(page, x)[:, None]
        pointers = tl.multiple_of(pointers, [1, ALIGNMENT])
        if IS_MASKED:
            tile = tl.load(pointers, mask=inside[:, None] & (dims < DIM), other=0.0)
        elif DIM == BLOCK_DIM:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=dims < DIM, other=0.0)
    return tile


@triton.jit
def page_offset(page, x):
    """Elements of `x` before a page, 64-bit; by a 32-bit multiplication if the stride fits."""
    stride = page * 0 + x.batch  # Triton passes the stride in 32 or 64 bits
    if stride.dtype == tl.int32:
        wide = stride.to(tl.uint32).to(tl.uint64)
        offset = (page.to(tl.uint32).to(tl.uint64) * wide).to(tl.int64)
    else:
        offset = page.to(tl.int64) * stride
    return offset


@triton.jit
def page_number(page, lengths):
    """A page index, clamped to the cache."""
    return tl.minimum(tl.maximum(page, 0), lengths.total_k - 1)


@triton.jit
def load_keys(
    source, x, pages, start, n0, count, lengths, cfg: tl.constexpr, IS_MASKED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values, paged or not: (BLOCK, BLOCK_DIM)."""
    if cfg.PAGE_SIZE > 0:
        tile = load_paged_rows(
            x, source, pages, start, n0, count, lengths, IS_MASKED, cfg.PAGE_SIZE, DIM, BLOCK,
            BLOCK_DIM, cfg.ALIGNMENT,
        )  # fmt: skip
    else:
        tile = load_tile(source, x, n0, count, cfg, IS_MASKED, DIM, BLOCK, BLOCK_DIM, cfg.ALIGNMENT)
    return tile
