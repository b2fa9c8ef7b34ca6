"""New keys and values into a cache, contiguous or paged, without reading a length on the host."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_of_token(token, cu_seqlens, B, CHUNK: tl.constexpr):
    """The sequence that owns a row of a packed tensor: how many sequences have ended by then."""
    count = token * 0
    for first in range(0, B, CHUNK):
        offs = first + tl.arange(0, CHUNK)
        end = tl.load(cu_seqlens + 1 + offs, mask=offs < B, other=2**31 - 1)
        count += tl.sum((end <= token).to(tl.int32), 0)
    return count


@triton.jit
def copy_row(
    target,
    source,
    row,
    slot,
    b,
    token,
    HEADS_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
):
    """All heads of one token."""
    for first in range(0, HEADS_DIM, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        head = offs // DIM
        dim = offs % DIM
        read = source.ptr + b.to(tl.int64) * source.batch + token.to(tl.int64) * source.row
        write = target.ptr + row.to(tl.int64) * target.batch + slot.to(tl.int64) * target.row
        inside = offs < HEADS_DIM
        x = tl.load(read + head * source.head + dim * source.dim, mask=inside)
        tl.store(write + head * target.head + dim * target.dim, x, mask=inside)


@triton.jit(do_not_specialize=["B", "seq", "rows", "capacity", "page_columns"])
def append_kernel(
    k_cache, v_cache, k, v, lengths_ptr, cu_seqlens, page_table, cache_batch_idx, B, seq, rows,
    capacity, page_columns,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One new token of one sequence: behind the `lengths` that its sequence has; what does not fit
    is dropped.

    `rows` is the number of rows (or pages) of the cache, `capacity` the tokens that one sequence
    can have.
    """
    program = tl.program_id(0)
    if cu_seqlens is not None:
        b = sequence_of_token(program, cu_seqlens, B, 128)
        if b >= B:
            return
        place = program - tl.load(cu_seqlens + b)
        source_b = b * 0
        token = program
    else:
        b = program // seq
        place = program % seq
        source_b = b
        token = place
    position = tl.load(lengths_ptr + b).to(tl.int32) + place
    if position < 0 or position >= capacity:
        return
    if page_table is not None:
        row = tl.load(page_table + b.to(tl.int64) * page_columns + position // PAGE_SIZE)
        slot = position % PAGE_SIZE
    else:
        row = b
        if cache_batch_idx is not None:
            row = tl.load(cache_batch_idx + b)
        slot = position
    if row < 0 or row >= rows:
        return
    copy_row(k_cache, k, row, slot, source_b, token, HEADS * D, BLOCK, D)
    copy_row(v_cache, v, row, slot, source_b, token, HEADS * DV, BLOCK, DV)
