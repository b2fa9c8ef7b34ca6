"""The reference: dense attention in plain PyTorch with every option of the public API.

Tests compare each backend with this file. It materialises the whole score matrix, works in any
`compute_dtype` (float64 gives the truth, the inputs' own dtype gives "plain PyTorch") and leaves
gradients to autograd. Layouts are those of the public API. Packed sequences are unpacked to a
padded batch and packed again. A call over a cache appends to a copy and attends to what it gathers.

Sizes: `B` batch, `M` query length, `N` key length, `Hq`/`Hk` heads, `D`/`Dv` head dims.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dropout import keep_rate
from ..masks import Spans, Window
from ..problem import FLOAT8, FLOAT8_KEY_BLOCK, FLOAT8_QUERY_BLOCK


@dataclass(frozen=True)
class Reference:
    """`out` and `lse` in the layout of the call, `probs` always (B, Hq, M, N)."""

    out: Tensor
    lse: Tensor
    probs: Tensor


class Alibi(NamedTuple):
    """Slopes (B or 1, Hq, 1, 1) and the distances (B or 1, 1, M, N) that they multiply."""

    slopes: Tensor
    distance: Tensor

    def term(self) -> Tensor:
        """What is added to the scores, (B or 1, Hq, M, N)."""
        return -self.slopes * self.distance


class RelativeBias(NamedTuple):
    """A table (Hq, 2 R + 1) and the column that each score adds, int64 (B or 1, 1, M, N)."""

    table: Tensor
    column: Tensor

    def term(self) -> Tensor:
        """What is added to the scores, (B or 1, Hq, M, N)."""
        return self.table[:, self.column[:, 0]].transpose(0, 1)


class ScoreRule(NamedTuple):
    """The rule that turns q k into scores, and the softmax of the scores into weights of v.

    The tensors broadcast to (B, Hq, M, N), the sink to (B, Hq, M, 1).
    """

    scale: float
    softcap: float  # 0: none
    alibi: Alibi | None
    bias: Tensor | None
    hidden: Tensor  # bool
    sink: Tensor | None  # the score of one more key, whose value is zero
    factor: Tensor  # of dropout: 0, or 1 / `keep_rate`
    function: Callable[[Tensor], Tensor] | None = None  # of the scores, after the softcap
    relative_bias: RelativeBias | None = None


# A function from q (B, M, Hq, D), k (B, N, Hq, D) and v (B, N, Hq, Dv), already descaled and
# repeated, to (out (B, M, Hq, Dv), lse (B, Hq, M), probs (B, Hq, M, N)).
Attend = Callable[[Tensor, Tensor, Tensor, ScoreRule], tuple[Tensor, Tensor, Tensor]]


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(q k) v by its definition; a row that sees no key has out 0, lse -inf, probs 0 and
    zero gradients.
    """
    weights, lse, probs = softmax_weights(q, k, rule)
    dead = (lse == -torch.inf).transpose(1, 2)[..., None]
    out = torch.einsum("bhmn,bnhd->bmhd", weights, v).masked_fill(dead, 0)
    return out, lse, probs


def scaled_products(q: Tensor, k: Tensor, rule: ScoreRule) -> Tensor:
    """The scores before a score function and biases: q k, scaled, with the softcap."""
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * rule.scale
    return rule.softcap * torch.tanh(scores / rule.softcap) if rule.softcap > 0 else scores


def softmax_weights(q: Tensor, k: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of v, the log-sum-exp, and the probabilities, negative where dropped."""
    scores = scaled_products(q, k, rule)
    if rule.function is not None:
        scores = rule.function(scores)
    for by_distance in (rule.alibi, rule.relative_bias):
        if by_distance is not None:
            scores = scores + by_distance.term().to(scores.dtype)
    if rule.bias is not None:
        scores = scores + rule.bias
    scores = scores.masked_fill(rule.hidden, -torch.inf)
    if rule.sink is not None:
        scores = torch.cat((scores, rule.sink), dim=-1)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(dead, 0)
    probs = scores.softmax(-1)[..., : k.shape[1]]
    lse = scores.logsumexp(-1).masked_fill(dead[..., 0], -torch.inf)
    signed = torch.where(rule.factor > 0, probs, -probs).masked_fill(dead, 0)
    return probs * rule.factor, lse, signed


P = ParamSpec("P")
T = TypeVar("T")


def on_its_device(function: Callable[P, T]) -> Callable[P, T]:
    """`function` of q and other tensors, which makes its own tensors on their device."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        q: Any = args[0] if args else options["q"]
        with nullcontext() if q.device.type == "cpu" else q.device:
            return function(*args, **options)

    return call


@on_its_device
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
    relative_bias: Tensor | None = None,
    sink: Tensor | None = None,
    block_mask: Any = None,
    mask: Spans | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    dropout_p: float = 0.0,
    keep: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
    attend: Attend = softmax_attention,
) -> Reference:
    """Dense attention of q (B, M, Hq, D), k (B, N, Hk, D), v (B, N, Hk, Dv).

    Args:
        keep: bool (B, Hq, M, N), the dropout mask to apply with `dropout_p`.
        score_mod: called once, with all scores (B, Hq, M, N) and indices that broadcast to them.
        attend: function that computes attention itself; `error_model.py` passes others than the
            definition.

    The other options are those of `flashtile.attention`.
    """
    if qv is not None:  # q k + qv v is the product of [q, qv] and [k, v]
        q, k = torch.cat((q, qv), dim=-1), torch.cat((k, v), dim=-1)
    B, M, Hq, D = q.shape
    N, Hk = v.shape[1:3]
    m_used, n_used = _used(seqused_q, B, M), _used(seqused_k, B, N)
    live_q = torch.arange(M) < m_used[:, None]  # (B, M)
    live_k = torch.arange(N) < n_used[:, None]  # (B, N)

    # Padding has no effect, even if it holds NaN.
    q = _descaled(q.to(compute_dtype), q_descale, FLOAT8_QUERY_BLOCK)
    k = _descaled(k.to(compute_dtype), k_descale, FLOAT8_KEY_BLOCK)
    v = _descaled(v.to(compute_dtype), v_descale, FLOAT8_KEY_BLOCK)
    q = q.masked_fill(~live_q[:, :, None, None], 0)
    k, v = (x.masked_fill(~live_k[:, :, None, None], 0) for x in (k, v))
    k, v = (x.repeat_interleave(Hq // Hk, dim=2) for x in (k, v))

    visible = visible_keys(m_used, n_used, M, N, causal, window_size, attention_chunk)[:, None]
    if block_mask is not None:
        visible = visible & dense_block_mask(block_mask, M, N)
    if mask is not None:
        visible = visible & dense_spans(mask, N)
    if sink is not None:
        sink = sink.to(compute_dtype)[None, :, None, None].expand(B, Hq, M, 1)
        sink = sink.masked_fill(~live_q[:, None, :, None], -torch.inf)

    factor = torch.ones(1, 1, 1, 1, dtype=compute_dtype)
    if dropout_p > 0:
        assert keep is not None, "the reference takes the dropout mask, it does not draw one"
        factor = keep.to(compute_dtype) / keep_rate(dropout_p)

    p = torch.arange(M)[None, :, None] + (n_used - m_used)[:, None, None]
    distance = (torch.arange(N) - p)[:, None]  # (B, 1, M, N)
    rule = ScoreRule(
        scale=D**-0.5 if softmax_scale is None else softmax_scale,
        softcap=softcap,
        alibi=None if alibi_slopes is None else _alibi(alibi_slopes, distance),
        bias=None if bias is None else bias.to(compute_dtype),
        hidden=~visible,
        sink=sink,
        factor=factor,
        function=None if score_mod is None else _of_scores(score_mod, B, Hq, M, N, ~visible),
        relative_bias=None if relative_bias is None else _relative_bias(relative_bias, distance),
    )
    return Reference(*attend(q, k, v, rule))


def _of_scores(
    score_mod: Callable[..., Tensor], B: int, Hq: int, M: int, N: int, hidden: Tensor
) -> Callable[[Tensor], Tensor]:
    """The function of all scores at once, in their dtype."""
    i, j = torch.arange(M)[:, None], torch.arange(N)
    b, h = torch.arange(B)[:, None, None, None], torch.arange(Hq)[:, None, None]

    def function(scores: Tensor) -> Tensor:
        # The derivative may be infinite at the score of a hidden key, which is 0 of padding.
        given = scores.masked_fill(hidden, 1.0)
        return score_mod(given, b, h, i, j).to(scores.dtype).expand(scores.shape)

    return function


def _alibi(slopes: Tensor, distance: Tensor) -> Alibi:
    slopes = slopes.double() if slopes.ndim == 2 else slopes.double()[None]
    return Alibi(slopes[:, :, None, None], distance.abs())


def _relative_bias(table: Tensor, distance: Tensor) -> RelativeBias:
    R = table.shape[1] // 2
    return RelativeBias(table.double(), distance.clamp(-R, R) + R)


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


WindowSize = Window | tuple[int | None, int | None]


def visible_keys(
    m_used: Tensor,
    n_used: Tensor,
    M: int,
    N: int,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
) -> Tensor:
    """Which keys each query sees by position: bool (B, M, N).

    `m_used`, `n_used`: (B,) int64, the used lengths. Query i has the position
    `p = i + n_used - m_used` (bottom-right alignment).
    """
    i = torch.arange(M)[None, :, None]
    j = torch.arange(N)[None, None, :]
    p = i + (n_used - m_used)[:, None, None]
    left, right = window_sides(causal, window_size)
    visible = (i < m_used[:, None, None]) & (j < n_used[:, None, None])
    if left is not None:
        visible = visible & (j >= p - left)
    if right is not None:
        visible = visible & (j <= p + right)
    if attention_chunk > 0:
        visible = visible & (p.div(attention_chunk, rounding_mode="floor") == j // attention_chunk)
    return visible


def window_sides(causal: bool, window_size: WindowSize) -> tuple[int | None, int | None]:
    """(left, right) with None for an unbounded side.

    In `window_size` -1 is also unbounded, but not in a `Window`; other negative sides move the
    window past the query. Causal sets the right side to 0. A window without any key is ignored.
    """
    left, right = window_size
    if not isinstance(window_size, Window):
        left, right = (None if side == -1 else side for side in window_size)
    if causal:
        right = 0
    if left is not None and right is not None and left + right < 0:
        return None, 0 if causal else None
    return left, right


def dense_spans(mask: Spans, N: int) -> Tensor:
    """A mask of spans as bool (B | 1, Hq | 1, M, N): True where some interval has the key."""
    keys = torch.arange(N)
    visible = (keys >= mask.starts[..., None]) & (keys < mask.stops[..., None])
    return visible.any(-2)


def dense_block_mask(block_mask: Any, M: int, N: int) -> Tensor:
    """A block mask as bool (B | 1, Hq | 1, M, N).

    Takes a bool tensor, a flashtile `BlockMask` or a FlexAttention `BlockMask`.
    """
    if isinstance(block_mask, Tensor):
        return block_mask.reshape((1,) * (4 - block_mask.ndim) + block_mask.shape)
    if not hasattr(block_mask, "mask_mod"):
        return block_mask.to_dense(M, N)
    bm, bn = block_mask.BLOCK_SIZE
    b, h = block_mask.kv_num_blocks.shape[:2]
    dense = torch.zeros(b, h, M, N, dtype=torch.bool)
    for ib in range(b):
        for ih in range(h):
            _fill_flex(dense[ib, ih], block_mask, ib, ih, bm, bn)
    return dense


def _fill_flex(dense: Tensor, mask: Any, b: int, h: int, bm: int, bn: int) -> None:
    M, N = dense.shape
    b_index, h_index = torch.tensor(b), torch.tensor(h)
    for row in range(-(-M // bm)):
        rows = torch.arange(row * bm, min(M, row * bm + bm))
        for col in mask.kv_indices[b, h, row, : int(mask.kv_num_blocks[b, h, row])].tolist():
            cols = torch.arange(col * bn, min(N, col * bn + bn))
            tile = mask.mask_mod(b_index, h_index, rows[:, None], cols[None, :])
            dense[rows[:, None], cols[None, :]] = tile.expand(len(rows), len(cols))
        if mask.full_kv_num_blocks is None:
            continue
        for col in mask.full_kv_indices[
            b, h, row, : int(mask.full_kv_num_blocks[b, h, row])
        ].tolist():
            dense[row * bm : row * bm + bm, col * bn : col * bn + bn] = True


@on_its_device
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
    mask: Spans | None = None,
    **options: Any,
) -> Reference:
    """Packed attention: unpack to padded batches, attend, pack again.

    q (total_q, Hq, D), k (total_k, Hk, D), v (total_k, Hk, Dv). With `page_table` (B, pages) int32,
    k and v are pages (num_pages, page_size, Hk, D or Dv). Queries or keys without cumulative
    lengths are padded already, (B, length, heads, head_dim).
    """
    if page_table is not None:  # gathered pages are a padded batch
        k, v = (x[page_table.long()].flatten(1, 2) for x in (k, v))
        if seqused_k is None and cu_seqlens_k is not None:
            seqused_k = cu_seqlens_k.diff()
        cu_seqlens_k = None
    lengths_q, lengths_k = _lengths(q, cu_seqlens_q), _lengths(k, cu_seqlens_k)
    result = attention_reference(
        _unpack(q, cu_seqlens_q, max_seqlen_q),
        _unpack(k, cu_seqlens_k, max_seqlen_k),
        _unpack(v, cu_seqlens_k, max_seqlen_k),
        qv=None if qv is None else _unpack(qv, cu_seqlens_q, max_seqlen_q),
        mask=unpacked_spans(mask, cu_seqlens_q, max_seqlen_q),
        seqused_q=lengths_q if seqused_q is None else torch.minimum(lengths_q, seqused_q.long()),
        seqused_k=lengths_k if seqused_k is None else torch.minimum(lengths_k, seqused_k.long()),
        **options,
    )
    if cu_seqlens_q is None:
        return result
    rows = range(len(lengths_q))
    out = torch.cat([result.out[b, : lengths_q[b]] for b in rows])
    lse = torch.cat([result.lse[b, :, : lengths_q[b]] for b in rows], dim=-1)
    return Reference(out, lse, result.probs)


def unpacked_spans(mask: Spans | None, cu_seqlens_q: Tensor | None, longest: int) -> Spans | None:
    """A mask of packed queries for the padded batch that `sequences` and `padded` make of them."""
    if mask is None or cu_seqlens_q is None:
        return mask
    rows = (sequences(x[0].transpose(0, 1), cu_seqlens_q) for x in mask)
    return Spans(*(padded(x, longest).transpose(1, 2) for x in rows))


def sequences(x: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """The sequences (length, heads, head_dim) of a packed or padded `x`."""
    if cu_seqlens is None:
        return list(x.unbind(0))
    return [x[begin:end] for begin, end in pairwise(cu_seqlens.tolist())]


def padded(rows: list[Tensor], length: int) -> Tensor:
    """The sequences (their length, heads, head_dim) as a batch (B, length, heads, head_dim)."""
    return torch.stack([resize(x[None], length)[0] for x in rows])


def resize(x: Tensor, length: int) -> Tensor:
    """x (B, S, heads, head_dim) cut or zero-padded to `length` along S."""
    return F.pad(x[:, :length], (0, 0, 0, 0, 0, max(0, length - x.shape[1])))


def _lengths(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return torch.full((len(x),), x.shape[1]) if cu_seqlens is None else cu_seqlens.diff().long()


def _unpack(x: Tensor, cu_seqlens: Tensor | None, length: int) -> Tensor:
    return padded(sequences(x, cu_seqlens), length)


# Caches (append, rotate, then attend as above), and merging.


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
    sides = window_sides(options.get("causal", False), options.get("window_size", (-1, -1)))
    moving = sides != (None, None) or options.get("attention_chunk", 0) > 0

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
