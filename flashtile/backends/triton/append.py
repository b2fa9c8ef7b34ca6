"""New keys and values into a cache, contiguous or paged, without reading a length on the host.

With rotary tables the new keys are turned on their way, and so are the queries that will meet them:
one launch does what would be many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import rows_of
from .kernel_launch import Launch, run
from .rotary import Turn, place_of_token, token_base, turn_heads, turn_of

# Features that one step of a program copies.
COPIED = 512


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


@triton.jit
def copy_heads(
    target, target_base, source, source_base, HEADS_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """All heads of one token."""
    for first in range(0, HEADS_DIM, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        head = (offs // DIM).to(tl.int64)
        dim = offs % DIM
        inside = offs < HEADS_DIM
        x = tl.load(source_base + head * source.head + dim * source.dim, mask=inside)
        tl.store(target_base + head * target.head + dim * target.dim, x, mask=inside)


@triton.jit
def append_token(
    token, k_cache, v_cache, k, v, lengths_ptr, base_ptr, cos, sin, cu_seqlens, page_table,
    cache_batch_idx, B, seq, rows, capacity, page_columns, table_rows, cfg: tl.constexpr,
):  # fmt: skip
    """One new token, behind the `lengths` that its sequence has; what does not fit is dropped."""
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
    if fits & (row >= 0) & (row < rows):
        k_base = token_base(k, token, b, place, cu_seqlens)
        v_base = token_base(v, token, b, place, cu_seqlens)
        k_slot = token_base(k_cache, token, row, slot, None)
        v_slot = token_base(v_cache, token, row, slot, None)
        if cfg.TURN is None:
            copy_heads(k_cache, k_slot, k, k_base, cfg.HEADS * cfg.D, cfg.D, cfg.BLOCK)
        else:
            TURN: tl.constexpr = cfg.TURN
            turned_at = tl.load(base_ptr + b) + place
            turn_heads(
                k_cache, k_slot, k, k_base, turned_at, cos, sin, table_rows, cfg.HEADS, cfg.D,
                False, TURN,
            )  # fmt: skip
        copy_heads(v_cache, v_slot, v, v_base, cfg.HEADS * cfg.DV, cfg.DV, cfg.BLOCK)


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
        q_turned, target_base, q, source_base, position, cos, sin, table_rows, cfg.HEADS_Q, cfg.D,
        False, TURN,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "B", "seq", "seq_q", "tokens", "rows", "capacity", "page_columns", "table_rows",
    ]
)  # fmt: skip
def append_kernel(
    k_cache, v_cache, k, v, q, q_turned, lengths_ptr, base_ptr, cos, sin, cu_seqlens, cu_seqlens_q,
    page_table, cache_batch_idx, B, seq, seq_q, tokens, rows, capacity, page_columns, table_rows,
    cfg: tl.constexpr,
):  # fmt: skip
    """One of the new `tokens` or, behind them, one token of the queries.

    `rows` is the number of rows (or pages) of the cache, `capacity` the tokens that one sequence
    can have.
    """
    program = tl.program_id(0)
    if program < tokens:
        append_token(
            program, k_cache, v_cache, k, v, lengths_ptr, base_ptr, cos, sin, cu_seqlens,
            page_table, cache_batch_idx, B, seq, rows, capacity, page_columns, table_rows, cfg,
        )  # fmt: skip
    elif cfg.TURN is not None:
        turn_query(
            program - tokens, q, q_turned, base_ptr, cos, sin, cu_seqlens_q, B, seq_q, table_rows,
            cfg,
        )  # fmt: skip


@dataclass(frozen=True)
class Rotation:
    """Queries and the angles that they and the new keys are turned by."""

    q: Tensor  # (batch, seq_q, heads, head_dim), or packed
    q_turned: Tensor  # where to write them
    cos: Tensor  # (positions, pairs)
    sin: Tensor
    base: Tensor  # (batch,), the position of each sequence's first new token
    cu_seqlens_q: Tensor | None
    interleaved: bool
    own_positions: bool


def append_launch(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    cu_seqlens: Tensor | None,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    rotation: Rotation | None = None,
) -> Launch:
    """Write `k` and `v` behind the `lengths` tokens of each sequence, and the queries of `rotation`
    to where it says; shapes as `kvcache.py` has them."""
    page_size = 0 if page_table is None else k_cache.shape[1]
    columns = 0 if page_table is None else page_table.shape[1]
    tokens = k.shape[0] if cu_seqlens is not None else k.shape[0] * k.shape[1]
    packed = cu_seqlens is not None
    turn = None
    if rotation is not None:
        turn = turn_of(rotation.cos, k.shape[-1], rotation.interleaved)
    config = AppendConfig(
        HEADS=k.shape[-2],
        HEADS_Q=0 if rotation is None else rotation.q.shape[-2],
        D=k.shape[-1],
        DV=v.shape[-1],
        PAGE_SIZE=page_size,
        BLOCK=COPIED,
        HAS_OWN_POSITIONS=rotation is not None and rotation.own_positions,
        TURN=turn,
    )
    arguments = {
        "k_cache": rows_of(k_cache),
        "v_cache": rows_of(v_cache),
        "k": rows_of(k),
        "v": rows_of(v),
        "lengths_ptr": lengths.contiguous(),
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.contiguous(),
        "page_table": None if page_table is None else page_table.contiguous(),
        "cache_batch_idx": None if cache_batch_idx is None else cache_batch_idx.contiguous(),
        "B": lengths.shape[0],
        "seq": 1 if packed else k.shape[1],
        "tokens": tokens,
        "rows": k_cache.shape[0],
        "capacity": columns * page_size if page_table is not None else k_cache.shape[1],
        "page_columns": columns,
        "cfg": config,
        **_rotation_arguments(rotation),
    }
    queries = 0
    if rotation is not None:
        queries = rotation.q.numel() // (rotation.q.shape[-1] * rotation.q.shape[-2])
    return Launch(append_kernel, (tokens + queries,), arguments, 4, 1)


def _rotation_arguments(rotation: Rotation | None) -> dict[str, object]:
    if rotation is None:
        names = ("q", "q_turned", "base_ptr", "cos", "sin", "cu_seqlens_q")
        return dict.fromkeys(names) | {"seq_q": 1, "table_rows": 0}
    q, cu_seqlens_q = rotation.q, rotation.cu_seqlens_q
    return {
        "q": rows_of(q),
        "q_turned": rows_of(rotation.q_turned),
        "base_ptr": rotation.base.contiguous(),
        "cos": rotation.cos.contiguous(),
        "sin": rotation.sin.contiguous(),
        "cu_seqlens_q": None if cu_seqlens_q is None else cu_seqlens_q.contiguous(),
        "seq_q": q.shape[1],
        "table_rows": rotation.cos.shape[0],
    }


def append_to_cache(k_cache: Tensor, *rest: Any) -> None:
    """Launch `append_launch` of the same arguments."""
    run([append_launch(k_cache, *rest)], k_cache)


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
    interleaved: bool,
    own_positions: bool,
) -> Tensor:
    """The op ``flashtile::kvcache_rotate_append`` of `kvcache.py`: the queries, turned."""
    q_turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rotation = Rotation(q, q_turned, cos, sin, base, cu_seqlens_q, interleaved, own_positions)
    cache = (k_cache, v_cache, k, v, lengths, cu_seqlens_k_new, page_table, cache_batch_idx)
    run([append_launch(*cache, rotation)], k_cache)
    return q_turned
