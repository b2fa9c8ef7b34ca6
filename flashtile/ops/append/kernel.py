"""New keys and values into a cache, contiguous or paged, without reading a length on the host.

With rotary tables the new keys are turned on their way, and so are the queries that will meet them:
one launch does what would be many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...gpu.hardware import has_tma
from ...gpu.intrinsics import let_next_kernel_start
from ...gpu.launch import Launch
from ...gpu.relaunch import run_all
from ...gpu.rows import contiguous, rows_of
from ..rotary.kernel import Turn, as_stored, place_of_token, token_base, turn_heads, turn_of

# Features that one step of a program copies: all heads of a token, mostly, so that memory is waited
# for once.
COPIED = 4096


@dataclass(frozen=True)
class AppendConfig:
    """What the kernel is compiled for."""

    HEADS: int
    HEADS_Q: int
    D: int
    DV: int
    PAGE_SIZE: int  # 0: not paged
    BLOCK: int
    HAS_OWN_POSITIONS: bool  # each query has a position of its own, not its sequence's first
    TURN: Turn | None  # None: without rotary embedding
    LETS_NEXT_START: bool  # the attention behind it may be launched early


@triton.jit
def copy_heads(
    target, target_base, source, source_base, descale, HEADS_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """All heads of one token."""
    for first in range(0, HEADS_DIM, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        head = (offs // DIM).to(tl.int64)
        dim = offs % DIM
        inside = offs < HEADS_DIM
        x = tl.load(source_base + head * source.head + dim * source.dim, mask=inside)
        x = as_stored(x, target, descale, head, inside)
        tl.store(target_base + head * target.head + dim * target.dim, x, mask=inside)


@triton.jit
def slot_of_token(
    token, lengths_ptr, cu_seqlens, page_table, cache_batch_idx, B, seq, rows, capacity,
    page_columns, cfg: tl.constexpr,
):  # fmt: skip
    """(fits, sequence, place among its new tokens, row of the cache, place in it) of a new token,
    which goes behind the `lengths` that its sequence has."""
    b, place = place_of_token(token, cu_seqlens, B, seq)
    exists = (b < B) & (place >= 0)
    position = tl.load(lengths_ptr + b, mask=exists, other=-1).to(tl.int32) + place
    fits = exists & (position >= 0) & (position < capacity)
    if cfg.PAGE_SIZE > 0:
        column = b.to(tl.int64) * page_columns + position // cfg.PAGE_SIZE
        row = tl.load(page_table + column, mask=fits, other=-1)
        slot = position % cfg.PAGE_SIZE
    else:
        row = b
        if cache_batch_idx is not None:
            row = tl.load(cache_batch_idx + b, mask=fits, other=-1)
        slot = position
    return fits & (row >= 0) & (row < rows), b, place, row, slot


@triton.jit
def store_key(
    token, b, place, row, slot, k_cache, k, base_ptr, cos, sin, cu_seqlens, descale, table_rows,
    cfg: tl.constexpr,
):  # fmt: skip
    """The keys of one token, turned if asked."""
    source = token_base(k, token, b, place, cu_seqlens)
    target = token_base(k_cache, token, row, slot, None)
    if descale is not None:
        descale += b * cfg.HEADS
    if cfg.TURN is None:
        copy_heads(k_cache, target, k, source, descale, cfg.HEADS * cfg.D, cfg.D, cfg.BLOCK)
    else:
        TURN: tl.constexpr = cfg.TURN
        position = tl.load(base_ptr + b) + place
        turn_heads(
            k_cache, target, k, source, descale, position, cos, sin, table_rows, cfg.HEADS, cfg.D,
            False, TURN,
        )  # fmt: skip


@triton.jit
def store_value(token, b, place, row, slot, v_cache, v, cu_seqlens, descale, cfg: tl.constexpr):
    """The values of one token."""
    source = token_base(v, token, b, place, cu_seqlens)
    target = token_base(v_cache, token, row, slot, None)
    if descale is not None:
        descale += b * cfg.HEADS
    copy_heads(v_cache, target, v, source, descale, cfg.HEADS * cfg.DV, cfg.DV, cfg.BLOCK)


@triton.jit
def store_used(used_ptr, lengths_ptr, cu_seqlens, B, seq, CHUNK: tl.constexpr):
    """The lengths with the new tokens."""
    for first in range(0, B, CHUNK):
        offs = first + tl.arange(0, CHUNK)
        inside = offs < B
        count = tl.load(lengths_ptr + offs, mask=inside).to(tl.int32)
        if cu_seqlens is not None:
            count += tl.load(cu_seqlens + offs + 1, mask=inside).to(tl.int32)
            count -= tl.load(cu_seqlens + offs, mask=inside).to(tl.int32)
        else:
            count += seq
        tl.store(used_ptr + offs, count, mask=inside)


@triton.jit
def turn_query(
    token, q, q_turned, base_ptr, cos, sin, cu_seqlens, B, seq, table_rows, cfg: tl.constexpr
):
    """One token of the queries; behind the last sequence as it is."""
    TURN: tl.constexpr = cfg.TURN
    b, place = place_of_token(token, cu_seqlens, B, seq)
    position = tl.load(base_ptr + b, mask=b < B, other=-1)
    if cfg.HAS_OWN_POSITIONS:
        position = tl.where(b < B, position + place, -1)
    source_base = token_base(q, token, b, place, cu_seqlens)
    target_base = token_base(q_turned, token, b, place, cu_seqlens)
    turn_heads(
        q_turned, target_base, q, source_base, None, position, cos, sin, table_rows, cfg.HEADS_Q,
        cfg.D, False, TURN,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "B", "seq", "seq_q", "tokens", "rows", "capacity", "page_columns", "table_rows",
    ]
)  # fmt: skip
def append_kernel(
    k_cache, v_cache, k, v, q, q_turned, lengths_ptr, used_ptr, base_ptr, cos, sin, cu_seqlens,
    cu_seqlens_q, page_table, cache_batch_idx, k_descale, v_descale, B, seq, seq_q, tokens, rows,
    capacity, page_columns, table_rows, cfg: tl.constexpr,
):  # fmt: skip
    """The new lengths, or the keys or values of one of the new `tokens`, or one token of the
    queries. What does not fit is dropped.

    `rows` is the number of rows (or pages) of the cache, `capacity` the tokens that one sequence
    can have.
    """
    if cfg.LETS_NEXT_START:
        let_next_kernel_start()
    program = tl.program_id(0) - 1
    if program < 0:
        store_used(used_ptr, lengths_ptr, cu_seqlens, B, seq, 128)
    elif program < 2 * tokens:
        token = program // 2
        fits, b, place, row, slot = slot_of_token(
            token, lengths_ptr, cu_seqlens, page_table, cache_batch_idx, B, seq, rows, capacity,
            page_columns, cfg,
        )  # fmt: skip
        if fits:
            if program % 2 == 0:
                store_key(
                    token, b, place, row, slot, k_cache, k, base_ptr, cos, sin, cu_seqlens,
                    k_descale, table_rows, cfg,
                )  # fmt: skip
            else:
                store_value(token, b, place, row, slot, v_cache, v, cu_seqlens, v_descale, cfg)
    elif cfg.TURN is not None:
        turn_query(
            program - 2 * tokens, q, q_turned, base_ptr, cos, sin, cu_seqlens_q, B, seq_q,
            table_rows, cfg,
        )  # fmt: skip


class Appended(NamedTuple):
    """New tokens, the cache that takes them and, with rotary embedding, the queries.

    Shapes as `kvcache.py` has them.
    """

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    used: Tensor  # where to write the lengths with the new tokens
    cu_seqlens: Tensor | None
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    q: Tensor | None = None
    q_turned: Tensor | None = None  # where to write them
    cos: Tensor | None = None  # (positions, pairs)
    sin: Tensor | None = None
    base: Tensor | None = None  # (batch,), the position of each sequence's first new token
    cu_seqlens_q: Tensor | None = None


class Turning(NamedTuple):
    """How rotary embedding turns: the halves of a head or neighbours, and whether each query has a
    position of its own."""

    interleaved: bool = False
    own_positions: bool = False


def append_launch(
    given: Appended, turning: Turning, capability: tuple[int, int] | None = None
) -> Launch:
    """Write new tokens behind those of each sequence, and turned queries to where `given` says, on
    a device of that capability."""
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
        HAS_OWN_POSITIONS=turning.own_positions,
        TURN=None if cos is None else turn_of(cos, k.shape[-1], turning.interleaved),
        LETS_NEXT_START=has_tma(capability),
    )
    arguments = {
        "k_cache": rows_of(given.k_cache),
        "v_cache": rows_of(given.v_cache),
        "k": rows_of(k),
        "v": rows_of(v),
        "q": None if q is None else rows_of(q),
        "q_turned": None if given.q_turned is None else rows_of(given.q_turned),
        "lengths_ptr": given.lengths.contiguous(),
        "used_ptr": given.used,
        "base_ptr": contiguous(given.base),
        "cos": contiguous(cos),
        "sin": contiguous(given.sin),
        "cu_seqlens": contiguous(given.cu_seqlens),
        "cu_seqlens_q": contiguous(given.cu_seqlens_q),
        "page_table": contiguous(page_table),
        "cache_batch_idx": contiguous(given.cache_batch_idx),
        "k_descale": contiguous(given.k_descale),
        "v_descale": contiguous(given.v_descale),
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


def _launch(given: Appended, turning: Turning) -> None:
    """Launch `append_launch`."""

    def describe(given: Any, made: Any) -> list[Launch]:
        k = given[0]
        capability = torch.cuda.get_device_capability(k.device) if k.is_cuda else None
        return [append_launch(Appended(*given), turning, capability)]

    run_all("append", turning, given, (), describe)


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *places: Tensor | None,
) -> Tensor:
    """The op ``flashtile::kvcache_append``: the lengths with the new tokens."""
    used = torch.empty(lengths.shape, dtype=torch.int32, device=lengths.device)
    _launch(Appended(k_cache, v_cache, k, v, lengths, used, *places), Turning())
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
    """The op ``flashtile::kvcache_rotate_append``: the queries, turned, and the
    lengths with the new tokens."""
    used = torch.empty(lengths.shape, dtype=torch.int32, device=lengths.device)
    q_turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    places = (cu_seqlens_k_new, page_table, cache_batch_idx, k_descale, v_descale)
    rotary = (q, q_turned, cos, sin, base, cu_seqlens_q)
    given = Appended(k_cache, v_cache, k, v, lengths, used, *places, *rotary)
    _launch(given, Turning(interleaved, own_positions))
    return q_turned, used
