"""Append new keys and values to a cache, contiguous or paged. The host reads no lengths.

Given rotary tables, the same launch rotates the new keys and the queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...gpu.described import capability_of
from ...gpu.hardware import has_tma
from ...gpu.intrinsics import let_next_kernel_start
from ...gpu.launch import Launch
from ...gpu.launch_cache import run_all
from ...gpu.rows import at_boundary, rows_of
from ..rotary.kernel import (
    Rotation,
    as_stored,
    index_of_token,
    rotate_heads,
    rotation_of,
    token_base,
)

# Features that one step of a program copies: usually all heads of a token, so that it waits for
# memory only once.
COPIED = 4096


@dataclass(frozen=True)
class AppendConfig:
    """Compile-time parameters of the kernel."""

    HEADS: int
    HEADS_Q: int
    D: int
    DV: int
    PAGE_SIZE: int  # 0: not paged
    BLOCK: int
    HAS_OWN_POSITIONS: bool  # each query has its own position; else that of the first new token
    ROTATION: Rotation | None  # None: without rotary embedding
    HAS_DEPENDENT_LAUNCH: bool  # the attention that follows may be launched early


@triton.jit
def copy_heads(
    target, target_base, source, source_base, descale_ptr, HEADS_DIM: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy all heads of one token."""
    for first in range(0, HEADS_DIM, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        head = (offs // DIM).to(tl.int64)
        dim = offs % DIM
        inside = offs < HEADS_DIM
        x = tl.load(source_base + head * source.head + dim * source.dim, mask=inside)
        x = as_stored(x, target, descale_ptr, head, inside)
        tl.store(target_base + head * target.head + dim * target.dim, x, mask=inside)


@triton.jit
def slot_of_token(
    token, lengths_ptr, cu_seqlens_ptr, page_table_ptr, cache_batch_idx_ptr, B, seq, rows, capacity,
    page_columns, cfg: tl.constexpr,
):  # fmt: skip
    """(fits, sequence, index among its new tokens, cache row or page, slot in it) of a new token.

    New tokens are stored after the first `lengths` tokens of their sequence.
    """
    b, index = index_of_token(token, cu_seqlens_ptr, B, seq)
    exists = (b < B) & (index >= 0)
    position = tl.load(lengths_ptr + b, mask=exists, other=-1).to(tl.int32) + index
    fits = exists & (position >= 0) & (position < capacity)
    if cfg.PAGE_SIZE > 0:
        column = b.to(tl.int64) * page_columns + position // cfg.PAGE_SIZE
        row = tl.load(page_table_ptr + column, mask=fits, other=-1)
        slot = position % cfg.PAGE_SIZE
    else:
        row = b
        if cache_batch_idx_ptr is not None:
            row = tl.load(cache_batch_idx_ptr + b, mask=fits, other=-1)
        slot = position
    return fits & (row >= 0) & (row < rows), b, index, row, slot


@triton.jit
def store_key(
    token, b, index, row, slot, k_cache, k, base_ptr, cos_ptr, sin_ptr, cu_seqlens_ptr, descale_ptr,
    table_rows, cfg: tl.constexpr,
):  # fmt: skip
    """Store the keys of one token, rotated if `cfg.ROTATION` is given."""
    source = token_base(k, token, b, index, cu_seqlens_ptr)
    target = token_base(k_cache, token, row, slot, None)
    if descale_ptr is not None:
        descale_ptr += b * cfg.HEADS
    if cfg.ROTATION is None:
        copy_heads(k_cache, target, k, source, descale_ptr, cfg.HEADS * cfg.D, cfg.D, cfg.BLOCK)
    else:
        ROTATION: tl.constexpr = cfg.ROTATION
        position = tl.load(base_ptr + b) + index
        rotate_heads(
            k_cache, target, k, source, descale_ptr, position, cos_ptr, sin_ptr, table_rows,
            cfg.HEADS, cfg.D, False, ROTATION,
        )  # fmt: skip


@triton.jit
def store_value(
    token, b, index, row, slot, v_cache, v, cu_seqlens_ptr, descale_ptr, cfg: tl.constexpr
):
    """Store the values of one token."""
    source = token_base(v, token, b, index, cu_seqlens_ptr)
    target = token_base(v_cache, token, row, slot, None)
    if descale_ptr is not None:
        descale_ptr += b * cfg.HEADS
    copy_heads(v_cache, target, v, source, descale_ptr, cfg.HEADS * cfg.DV, cfg.DV, cfg.BLOCK)


@triton.jit
def store_used(used_ptr, lengths_ptr, cu_seqlens_ptr, B, seq, CHUNK: tl.constexpr):
    """Store the lengths including the new tokens."""
    for first in range(0, B, CHUNK):
        offs = first + tl.arange(0, CHUNK)
        inside = offs < B
        count = tl.load(lengths_ptr + offs, mask=inside).to(tl.int32)
        if cu_seqlens_ptr is not None:
            count += tl.load(cu_seqlens_ptr + offs + 1, mask=inside).to(tl.int32)
            count -= tl.load(cu_seqlens_ptr + offs, mask=inside).to(tl.int32)
        else:
            count += seq
        tl.store(used_ptr + offs, count, mask=inside)


@triton.jit
def rotate_query(
    token, q, q_rotated, base_ptr, cos_ptr, sin_ptr, cu_seqlens_ptr, B, seq, table_rows,
    cfg: tl.constexpr,
):  # fmt: skip
    """Rotate one query token; a token after the last sequence is copied unchanged."""
    ROTATION: tl.constexpr = cfg.ROTATION
    b, index = index_of_token(token, cu_seqlens_ptr, B, seq)
    position = tl.load(base_ptr + b, mask=b < B, other=-1)
    if cfg.HAS_OWN_POSITIONS:
        position = tl.where(b < B, position + index, -1)
    source_base = token_base(q, token, b, index, cu_seqlens_ptr)
    target_base = token_base(q_rotated, token, b, index, cu_seqlens_ptr)
    rotate_heads(
        q_rotated, target_base, q, source_base, None, position, cos_ptr, sin_ptr, table_rows,
        cfg.HEADS_Q, cfg.D, False, ROTATION,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "B", "seq", "seq_q", "tokens", "rows", "capacity", "page_columns", "table_rows",
    ]
)  # fmt: skip
def append_kernel(
    k_cache, v_cache, k, v, q, q_rotated, lengths_ptr, used_ptr, base_ptr, cos_ptr, sin_ptr,
    cu_seqlens_ptr, cu_seqlens_q_ptr, page_table_ptr, cache_batch_idx_ptr, k_descale_ptr,
    v_descale_ptr, B, seq, seq_q, tokens, rows, capacity, page_columns, table_rows,
    cfg: tl.constexpr,
):  # fmt: skip
    """A program stores the new lengths, or the keys or the values of one of the new `tokens`, or
    one rotated query token. A token that does not fit is dropped.

    `rows` is the number of rows (or pages) of the cache, `capacity` the largest length of a
    sequence.
    """
    if cfg.HAS_DEPENDENT_LAUNCH:
        let_next_kernel_start()
    program = tl.program_id(0) - 1
    if program < 0:
        store_used(used_ptr, lengths_ptr, cu_seqlens_ptr, B, seq, 128)
    elif program < 2 * tokens:
        token = program // 2
        fits, b, index, row, slot = slot_of_token(
            token, lengths_ptr, cu_seqlens_ptr, page_table_ptr, cache_batch_idx_ptr, B, seq, rows,
            capacity, page_columns, cfg,
        )  # fmt: skip
        if fits:
            if program % 2 == 0:
                store_key(
                    token, b, index, row, slot, k_cache, k, base_ptr, cos_ptr, sin_ptr,
                    cu_seqlens_ptr, k_descale_ptr, table_rows, cfg,
                )  # fmt: skip
            else:
                store_value(
                    token, b, index, row, slot, v_cache, v, cu_seqlens_ptr, v_descale_ptr, cfg
                )
    elif cfg.ROTATION is not None:
        rotate_query(
            program - 2 * tokens, q, q_rotated, base_ptr, cos_ptr, sin_ptr, cu_seqlens_q_ptr, B,
            seq_q, table_rows, cfg,
        )  # fmt: skip


class Appended(NamedTuple):
    """Tensors of the op: new tokens, the cache and, with rotary embedding, the queries.

    Shapes are those of `formula.py`.
    """

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    used: Tensor  # (batch,) int32, receives the lengths including the new tokens
    cu_seqlens: Tensor | None
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    q: Tensor | None = None
    q_rotated: Tensor | None = None  # receives the rotated queries
    cos: Tensor | None = None  # (positions, pairs)
    sin: Tensor | None = None
    base: Tensor | None = None  # (batch,), the position of each sequence's first new token
    cu_seqlens_q: Tensor | None = None


class RotaryOptions(NamedTuple):
    """`interleaved`: pairs are neighbours instead of features of the two halves of a head.
    `own_positions`: each query has its own position.
    """

    interleaved: bool = False
    own_positions: bool = False


def append_launch(
    given: Appended, options: RotaryOptions, capability: tuple[int, int] | None = None
) -> Launch:
    """The launch that appends `given.k` and `given.v` to the cache and, with rotary tables, writes
    the rotated queries to `given.q_rotated`, on a device of `capability`."""
    k, v, q, cos, page_table = given.k, given.v, given.q, given.cos, given.page_table
    capacity = given.k_cache.shape[1]
    columns = 0
    if page_table is not None:
        columns = page_table.shape[1]
        capacity *= columns
    packed = given.cu_seqlens is not None
    tokens = k.shape[0] if packed else k.shape[0] * k.shape[1]
    queries = 0 if q is None else q.numel() // (q.shape[-1] * q.shape[-2])
    config = AppendConfig(
        HEADS=k.shape[-2],
        HEADS_Q=0 if q is None else q.shape[-2],
        D=k.shape[-1],
        DV=v.shape[-1],
        PAGE_SIZE=0 if page_table is None else given.k_cache.shape[1],
        BLOCK=min(COPIED, triton.next_power_of_2(k.shape[-2] * max(k.shape[-1], v.shape[-1]))),
        HAS_OWN_POSITIONS=options.own_positions,
        ROTATION=None if cos is None else rotation_of(cos, k.shape[-1], options.interleaved),
        HAS_DEPENDENT_LAUNCH=has_tma(capability),
    )
    arguments = {
        "k_cache": rows_of(given.k_cache),
        "v_cache": rows_of(given.v_cache),
        "k": rows_of(k),
        "v": rows_of(v),
        "q": None if q is None else rows_of(q),
        "q_rotated": None if given.q_rotated is None else rows_of(given.q_rotated),
        "lengths_ptr": given.lengths.contiguous(),
        "used_ptr": given.used,
        "base_ptr": at_boundary(given.base),
        "cos_ptr": at_boundary(cos),
        "sin_ptr": at_boundary(given.sin),
        "cu_seqlens_ptr": at_boundary(given.cu_seqlens),
        "cu_seqlens_q_ptr": at_boundary(given.cu_seqlens_q),
        "page_table_ptr": at_boundary(page_table),
        "cache_batch_idx_ptr": at_boundary(given.cache_batch_idx),
        "k_descale_ptr": at_boundary(given.k_descale),
        "v_descale_ptr": at_boundary(given.v_descale),
        "B": given.lengths.shape[0],
        "seq": 1 if packed else k.shape[1],
        "seq_q": 1 if q is None else q.shape[1],
        "tokens": tokens,
        "rows": given.k_cache.shape[0],
        "capacity": capacity,
        "page_columns": columns,
        "table_rows": 0 if cos is None else cos.shape[0],
        "cfg": config,
    }
    grid = (1 + 2 * tokens + queries,)
    return Launch(append_kernel, grid, arguments, 4, 1)


def _launch(given: Appended, options: RotaryOptions) -> None:
    """Launch `append_launch`."""

    def describe(given: Any, made: Any) -> list[Launch]:
        capability = capability_of(given[0])
        return [append_launch(Appended(*given), options, capability)]

    run_all("append", options, given, (), describe)


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *where: Tensor | None,
) -> Tensor:
    """`formula.append`."""
    used = torch.empty(lengths.shape, dtype=torch.int32, device=lengths.device)
    _launch(Appended(k_cache, v_cache, k, v, lengths, used, *where), RotaryOptions())
    return used


def rotate_and_append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    base: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    interleaved: bool,
    own_positions: bool,
) -> tuple[Tensor, Tensor]:
    """`formula.rotate_and_append`."""
    used = torch.empty(lengths.shape, dtype=torch.int32, device=lengths.device)
    q_rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    where = (cu_seqlens_k_new, page_table, cache_batch_idx, k_descale, v_descale)
    rotary = (q, q_rotated, cos, sin, base, cu_seqlens_q)
    given = Appended(k_cache, v_cache, k, v, lengths, used, *where, *rotary)
    _launch(given, RotaryOptions(interleaved, own_positions))
    return q_rotated, used
