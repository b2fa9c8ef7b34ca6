"""The truth: dense attention in plain PyTorch, every option of the public API, nothing clever.

Each backend is judged against this file. It materialises the whole score matrix, works in any
`compute_dtype` (float64 gives the truth, the inputs' own dtype gives "plain PyTorch") and leaves
the gradients to autograd. Layouts are those of the public API. The other two entry points only
rearrange their inputs and call `attention_reference`.

Sizes: `B` batch, `M` query length, `N` key length, `Hq`/`Hk` heads, `D`/`Dv` head dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import FLOAT8, FLOAT8_KEY_BLOCK, FLOAT8_QUERY_BLOCK
from .summation_order import Order, softmax_product
from .visibility import WindowSize, dense_block_mask, visible_keys, window_sides


@dataclass(frozen=True)
class Reference:
    """`out` and `lse` in the layout of the call, `probs` always (B, Hq, M, N)."""

    out: Tensor
    lse: Tensor
    probs: Tensor


@dataclass(frozen=True)
class CacheReference:
    """What attention over a cache returns, with the caches as they are after the append."""

    out: Tensor
    lse: Tensor
    k_cache: Tensor
    v_cache: Tensor


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    qv: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    block_mask: Any = None,
    dropout_p: float = 0.0,
    keep: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
    shuffle: torch.Generator | None = None,
    stored: torch.dtype | None = None,
    weights: torch.dtype | None = None,
) -> Reference:
    """Dense attention of q (B, M, Hq, D), k (B, N, Hk, D), v (B, N, Hk, Dv).

    Args:
        keep: bool (B, Hq, M, N), the dropout mask to apply with `dropout_p`.
        shuffle: add up every sum, forward and backward, in an order drawn from this generator; the
            result is the same but for its roundings.
        stored: run the papers' backward, which recomputes P from the log-sum-exp and takes `out`
            as it was stored in this dtype; the same but for roundings.
        weights: round what is multiplied with V, 256 exp(S - row maximum), to this dtype: plain
            PyTorch in float8.

    The other options are those of `flashtile.attention`.
    """
    if qv is not None:  # q k + qv v is one product: of q beside qv with k beside v
        q, k = torch.cat((q, qv), dim=-1), torch.cat((k, v), dim=-1)
    B, M, Hq, D = q.shape
    N, Hk, Dv = v.shape[1:]
    m_used, n_used = _used(seqused_q, B, M), _used(seqused_k, B, N)
    live_q = torch.arange(M) < m_used[:, None]  # (B, M)
    live_k = torch.arange(N) < n_used[:, None]  # (B, N)
    at = Order.make(M, N, D, Dv, shuffle)

    # What lies in the padding never counts, not even a NaN.
    q = _descaled(q.to(compute_dtype), q_descale, FLOAT8_QUERY_BLOCK)
    k = _descaled(k.to(compute_dtype), k_descale, FLOAT8_KEY_BLOCK)
    v = _descaled(v.to(compute_dtype), v_descale, FLOAT8_KEY_BLOCK)
    q = q.masked_fill(~live_q[:, :, None, None], 0)[:, at.m][..., at.d]
    k, v = (x.masked_fill(~live_k[:, :, None, None], 0)[:, at.n] for x in (k, v))
    k, v = (x.repeat_interleave(Hq // Hk, dim=2) for x in (k[..., at.d], v[..., at.dv]))

    facts = (causal, window_size, attention_chunk)
    visible = visible_keys(m_used, n_used, M, N, *facts)[:, None]
    if block_mask is not None:
        visible = visible & dense_block_mask(block_mask, M, N)
    hidden = ~at.matrix(visible, M, N)
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    v_factor = 1.0
    if shuffle is not None and stored is not None:  # other roundings where no sum has two terms
        q_factor, v_factor = (1 + torch.rand(2, generator=shuffle)).tolist()
        q, v, scale = q * q_factor, v * v_factor, scale / q_factor

    def masked_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
        scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            alibi = _alibi(alibi_slopes, m_used, n_used, M, N).to(compute_dtype)
            scores = scores - at.matrix(alibi, M, N)
        if bias is not None:
            scores = scores + at.matrix(bias.to(compute_dtype), M, N)
        return scores.masked_fill(hidden, -torch.inf)

    scores = masked_scores(q, k, scale)
    again = None
    if stored is not None:  # the scores as the backward will meet them, rounded otherwise
        again = masked_scores((q * scale).flip(-1), k.flip(-1), 1.0).detach()
    factor = scores.new_ones(1, 1, 1, 1)
    if dropout_p > 0:
        assert keep is not None, "the reference takes the dropout mask, it does not draw one"
        factor = at.matrix(keep, M, N).to(compute_dtype) / (1 - dropout_p)
    if sink is not None:
        column = sink.to(compute_dtype)[None, :, None, None].expand(B, Hq, M, 1)
        column = column.masked_fill(~live_q[:, at.m][:, None, :, None], -torch.inf)
        scores = torch.cat((scores, column), dim=-1)
        again = None if again is None else torch.cat((again, column.detach()), dim=-1)
        v = torch.cat((v, v.new_zeros(B, 1, Hq, Dv)), dim=1)  # one more key, of value zero
        factor = torch.cat((factor.expand(B, Hq, M, N), torch.ones_like(column)), dim=-1)
    out, lse, probs = softmax_product(scores, again, v, factor, stored, weights)
    out, probs = out / v_factor, torch.where(factor > 0, probs, -probs)[..., :N]
    back = at.inverse()
    return Reference(out[:, back.m][..., back.dv], lse[..., back.m], back.matrix(probs, M, N))


def attention_varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    qv: Tensor | None = None,
    page_table: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    **options: Any,
) -> Reference:
    """Packed attention: unpack to padded batches, attend, pack again.

    q (total_q, Hq, D), k (total_k, Hk, D), v (total_k, Hk, Dv). With `page_table` (B, pages) int32,
    k and v are pages (num_pages, page_size, Hk, D or Dv). Without cumulative lengths a side is
    padded already, (B, length, heads, head_dim).
    """
    lengths_q = _lengths(q, cu_seqlens_q)
    lengths_k = _lengths(k, cu_seqlens_k)
    used_q = lengths_q if seqused_q is None else torch.minimum(lengths_q, seqused_q.long())
    if page_table is not None:
        k, v = (x[page_table.long()].flatten(1, 2) for x in (k, v))
        lengths_k = lengths_k if cu_seqlens_k is not None else _lengths(k, None)
        used_k = lengths_k if seqused_k is None else seqused_k.long()
        k, v = (_resize(x, max_seqlen_k) for x in (k, v))
    else:
        used_k = lengths_k if seqused_k is None else torch.minimum(lengths_k, seqused_k.long())
        k, v = (_unpack(x, cu_seqlens_k, max_seqlen_k) for x in (k, v))
    padded = attention_reference(
        _unpack(q, cu_seqlens_q, max_seqlen_q),
        k,
        v,
        qv=None if qv is None else _unpack(qv, cu_seqlens_q, max_seqlen_q),
        seqused_q=used_q,
        seqused_k=used_k,
        **options,
    )
    if cu_seqlens_q is None:
        return padded
    rows = range(len(lengths_q))
    out = torch.cat([padded.out[b, : lengths_q[b]] for b in rows])
    lse = torch.cat([padded.lse[b, :, : lengths_q[b]] for b in rows], dim=-1)
    return Reference(out, lse, padded.probs)


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
    compute_dtype: torch.dtype = torch.float64,
    **options: Any,
) -> CacheReference:
    """Append k, v to copies of the caches, then attend to what the caches hold.

    Arguments as in `flashtile.attention_with_kvcache`.
    """
    B = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    float8 = k_cache.dtype if k_cache.dtype in FLOAT8 else None
    k_cache, v_cache = (x.to(compute_dtype).clone() for x in (k_cache, v_cache))
    capacity = k_cache.shape[1] if page_table is None else page_table.shape[1] * k_cache.shape[1]
    old = torch.as_tensor(capacity if cache_seqlens is None else cache_seqlens).long().expand(B)
    start = old if rotary_seqlens is None else rotary_seqlens.long()
    leftpad = torch.zeros(B, dtype=torch.long) if cache_leftpad is None else cache_leftpad.long()

    q_rows = _sequences(q.to(compute_dtype), cu_seqlens_q)
    moving = _is_causal_or_local(options)

    def turned(rows: list[Tensor], moving: bool) -> list[Tensor]:
        if rotary_cos is None or rotary_sin is None:
            return rows
        cos, sin = rotary_cos.to(compute_dtype), rotary_sin.to(compute_dtype)
        places = [s + torch.arange(len(x)) * moving for x, s in zip(rows, start, strict=True)]
        pairs = zip(rows, places, strict=True)
        return [rotate(x, cos, sin, place, rotary_interleaved) for x, place in pairs]

    q_rows = turned(q_rows, moving)
    new = old
    if k is not None and v is not None:
        k_rows, v_rows = (_sequences(x.to(compute_dtype), cu_seqlens_k_new) for x in (k, v))
        k_rows = turned(k_rows, True)
        for b in range(B):
            places = torch.arange(len(k_rows[b])) + old[b]
            slots = _slots(b, places, k_cache, cache_batch_idx, page_table)
            k_cache[slots] = _stored(k_rows[b], float8, k.dtype, options.get("k_descale"), b)
            v_cache[slots] = _stored(v_rows[b], float8, v.dtype, options.get("v_descale"), b)
        new = old + torch.tensor([len(x) for x in k_rows])

    def gather(cache: Tensor) -> Tensor:  # logical position 0 is the first real key
        spans = [torch.arange(int(leftpad[b]), int(new[b])) for b in range(B)]
        slots = [_slots(b, spans[b], cache, cache_batch_idx, page_table) for b in range(B)]
        return torch.stack([_resize(cache[place][None], capacity)[0] for place in slots])

    M = q.shape[1] if cu_seqlens_q is None else max_seqlen_q or max(map(len, q_rows), default=0)
    qv_rows = None if qv is None else _sequences(qv.to(compute_dtype), cu_seqlens_q)
    result = attention_reference(
        _padded(q_rows, M),
        gather(k_cache),
        gather(v_cache),
        qv=None if qv_rows is None else _padded(qv_rows, M),
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
    """New tokens (T, Hk, D) of sequence `b`, given in `dtype`, as the cache holds them."""
    if float8 is None or dtype == float8:
        return x
    largest = torch.finfo(float8).max
    scaled = x if descale is None else x / descale[b][:, None].to(x.dtype)
    return scaled.clamp(-largest, largest).float().to(float8).to(x.dtype)


def combine_reference(
    out_partial: Tensor,
    lse_partial: Tensor,
    compute_dtype: torch.dtype = torch.float64,
    shuffle: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Joins partial out (splits, ..., H, Dv) and natural-log lse (splits, ..., H)."""
    if shuffle is not None:
        order = torch.randperm(len(out_partial), generator=shuffle)
        out_partial, lse_partial = out_partial[order], lse_partial[order]
    lse = lse_partial.to(compute_dtype)
    total = lse.logsumexp(0)
    weight = torch.exp(lse - total.masked_fill(total == -torch.inf, 0)).unsqueeze(-1)
    # A split of weight zero is nothing, whatever was left in its buffer.
    return torch.where(weight > 0, out_partial.to(compute_dtype) * weight, 0).sum(0), total


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of x (T, H, D) at `positions` (T,); cos, sin (length, rotary_dim / 2)."""
    rotary_dim = 2 * cos.shape[-1]
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def _alibi(slopes: Tensor, m_used: Tensor, n_used: Tensor, M: int, N: int) -> Tensor:
    """slope * distance, float64 (B | 1, Hq, M, N)."""
    p = torch.arange(M)[None, :, None] + (n_used - m_used)[:, None, None]
    distance = (p - torch.arange(N)[None, None, :]).abs()[:, None]
    slopes = slopes.double() if slopes.ndim == 2 else slopes.double()[None]
    return slopes[:, :, None, None] * distance


def _descaled(x: Tensor, descale: Tensor | None, block: int) -> Tensor:
    """`x` (B, S, H, D) times its float8 scales: (B, Hk), or (B, H, blocks) of `block` rows."""
    if descale is None:
        return x
    if descale.ndim == 2:
        descale, block = descale[..., None], x.shape[1]
    rows = descale.to(x.dtype).repeat_interleave(block, dim=2)[:, :, : x.shape[1]].transpose(1, 2)
    return x * rows.repeat_interleave(x.shape[2] // rows.shape[2], dim=2)[..., None]


def _used(seqused: Tensor | None, B: int, length: int) -> Tensor:
    return torch.full((B,), length) if seqused is None else seqused.long().clamp(max=length)


def _resize(x: Tensor, length: int) -> Tensor:
    """x (B, S, H, D) cut or zero-padded to `length` along S."""
    return F.pad(x[:, :length], (0, 0, 0, 0, 0, max(0, length - x.shape[1])))


def _lengths(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return torch.full((len(x),), x.shape[1]) if cu_seqlens is None else cu_seqlens.diff().long()


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    if cu_seqlens is None:
        return list(x.unbind(0))
    bounds = cu_seqlens.tolist()
    return [x[a:b] for a, b in pairwise(bounds)]


def _padded(rows: list[Tensor], length: int) -> Tensor:
    return torch.stack([_resize(x[None], length)[0] for x in rows])


def _unpack(x: Tensor, cu_seqlens: Tensor | None, length: int) -> Tensor:
    return _padded(_sequences(x, cu_seqlens), length)


def _slots(
    b: int, positions: Tensor, cache: Tensor, batch_idx: Tensor | None, page_table: Tensor | None
) -> tuple[Any, Tensor]:
    """Where the cache keeps these positions of sequence b: (row or page, offset in it)."""
    row = b if batch_idx is None else int(batch_idx[b])
    if page_table is not None:
        return page_table[row, positions // cache.shape[1]].long(), positions % cache.shape[1]
    return row, positions


def _is_causal_or_local(options: dict[str, Any]) -> bool:
    sides = window_sides(options.get("causal", False), options.get("window_size", (-1, -1)))
    return sides != (None, None) or options.get("attention_chunk", 0) > 0
