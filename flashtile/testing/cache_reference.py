"""The reference for caches (append, rotate, then attend as in `reference.py`) and for merging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..masks import Spans
from ..problem import FLOAT8
from .reference import (
    attention_reference,
    on_its_device,
    padded,
    resize,
    sequences,
    unpacked_spans,
    window_sides,
)


@dataclass(frozen=True)
class CacheReference:
    """The result of attention over a cache, and the caches after the append."""

    out: Tensor
    lse: Tensor
    k_cache: Tensor
    v_cache: Tensor


@on_its_device
def attention_with_kvcache_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    rotary_interleaved: bool = True,
    mask: Spans | None = None,
    compute_dtype: torch.dtype = torch.float64,
    **options: Any,
) -> CacheReference:
    """Append k, v to copies of the caches, then attend to the caches.

    The arguments are those of `flashtile.attention_with_kvcache`.
    """
    B = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    float8 = k_cache.dtype if k_cache.dtype in FLOAT8 else None
    k_cache, v_cache = (x.to(compute_dtype).clone() for x in (k_cache, v_cache))
    capacity = k_cache.shape[1] if page_table is None else page_table.shape[1] * k_cache.shape[1]
    old = torch.as_tensor(capacity if cache_seqlens is None else cache_seqlens).long().expand(B)
    start = old if rotary_seqlens is None else rotary_seqlens.long()
    leftpad = torch.zeros(B, dtype=torch.long) if cache_leftpad is None else cache_leftpad.long()

    q_rows = sequences(q.to(compute_dtype), cu_seqlens_q)
    moving = _is_causal_or_local(options)

    def rotated(rows: list[Tensor], moving: bool) -> list[Tensor]:
        if rotary_cos is None or rotary_sin is None:
            return rows
        cos, sin = rotary_cos.to(compute_dtype), rotary_sin.to(compute_dtype)
        positions = [s + torch.arange(len(x)) * moving for x, s in zip(rows, start, strict=True)]
        pairs = zip(rows, positions, strict=True)
        return [rotate(x, cos, sin, at, rotary_interleaved) for x, at in pairs]

    q_rows = rotated(q_rows, moving)
    new = old
    if k is not None and v is not None:
        k_rows, v_rows = (sequences(x.to(compute_dtype), cu_seqlens_k_new) for x in (k, v))
        k_rows = rotated(k_rows, True)
        for b in range(B):
            positions = torch.arange(len(k_rows[b])) + old[b]
            slots = _slots(b, positions, k_cache, cache_batch_idx, page_table)
            k_cache[slots] = _stored(k_rows[b], float8, k.dtype, options.get("k_descale"), b)
            v_cache[slots] = _stored(v_rows[b], float8, v.dtype, options.get("v_descale"), b)
        new = old + torch.tensor([len(x) for x in k_rows])

    def gather(cache: Tensor) -> Tensor:  # logical position 0 is the first real key
        spans = [torch.arange(int(leftpad[b]), int(new[b])) for b in range(B)]
        slots = [_slots(b, spans[b], cache, cache_batch_idx, page_table) for b in range(B)]
        return torch.stack([resize(cache[slot][None], capacity)[0] for slot in slots])

    M = q.shape[1] if cu_seqlens_q is None else max_seqlen_q or max(map(len, q_rows), default=0)
    qv_rows = None if qv is None else sequences(qv.to(compute_dtype), cu_seqlens_q)
    result = attention_reference(
        padded(q_rows, M),
        gather(k_cache),
        gather(v_cache),
        qv=None if qv_rows is None else padded(qv_rows, M),
        mask=unpacked_spans(mask, cu_seqlens_q, M),
        seqused_q=torch.tensor([len(x) for x in q_rows]),
        seqused_k=(new - leftpad).clamp(min=0),
        compute_dtype=compute_dtype,
        **options,
    )
    out, lse = result.out, result.lse
    if cu_seqlens_q is not None:
        out = torch.cat([out[b, : len(x)] for b, x in enumerate(q_rows)])
        lse = torch.cat([lse[b, :, : len(x)] for b, x in enumerate(q_rows)], dim=-1)
    return CacheReference(out, lse, k_cache, v_cache)


def _stored(
    x: Tensor, float8: torch.dtype | None, dtype: torch.dtype, descale: Tensor | None, b: int
) -> Tensor:
    """Convert new tokens (T, Hk, D) of sequence `b`, given in `dtype`, to the cache's numbers."""
    if float8 is None or dtype == float8:
        return x
    largest = torch.finfo(float8).max
    scaled = x if descale is None else x / descale[b][:, None].to(x.dtype)
    return scaled.clamp(-largest, largest).float().to(float8).to(x.dtype)


def combine_reference(
    out_partial: Tensor,
    lse_partial: Tensor,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Merge partial out (splits, ..., H, Dv) and natural-log lse (splits, ..., H)."""
    lse = lse_partial.to(compute_dtype)
    total = lse.logsumexp(0)
    weight = torch.exp(lse - total.masked_fill(total == -torch.inf, 0)).unsqueeze(-1)
    # A split of weight zero contributes nothing, even if its buffer holds NaN.
    return torch.where(weight > 0, out_partial.to(compute_dtype) * weight, 0).sum(0), total


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of x (T, H, D) at `positions` (T,); cos, sin (length, rotary_dim / 2)."""
    rotary_dim = 2 * cos.shape[-1]
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]
    rotated, tail = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        rotated = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
    return torch.cat((rotated, tail), dim=-1)


def _slots(
    b: int, positions: Tensor, cache: Tensor, batch_idx: Tensor | None, page_table: Tensor | None
) -> tuple[Any, Tensor]:
    """The slots of these positions of sequence b in the cache: (row or page, offset in it)."""
    row = b if batch_idx is None else int(batch_idx[b])
    if page_table is not None:
        return page_table[row, positions // cache.shape[1]].long(), positions % cache.shape[1]
    return row, positions


def _is_causal_or_local(options: dict[str, Any]) -> bool:
    sides = window_sides(options.get("causal", False), options.get("window_size", (-1, -1)))
    return sides != (None, None) or options.get("attention_chunk", 0) > 0
