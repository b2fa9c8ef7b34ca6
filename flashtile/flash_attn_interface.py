"""The seven functions of FlashAttention-2, with the same names, positional order, defaults and
return values: three for padded batches, three for packed sequences, and one for caches.

``from flash_attn import ...`` becomes ``from flashtile import ...``. All newer options are
keyword-only (`Extras`) and mean the same as in `flashtile.attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .api import Result, attention, attention_varlen, attention_with_kvcache
from .call import checks
from .call.options import CacheExtras, Extras, PaddedExtras, WindowSize

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "CacheExtras",
    "Extras",
    "PaddedExtras",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[PaddedExtras],
) -> Result:
    """Attention of each query over the keys, ``softmax(softmax_scale * q k^T) v``, differentiable.

    Masks are aligned to the bottom-right corner. With ``causal=True``, a 1 is a visible key::

        seq_q = 2, seq_k = 5        seq_q = 5, seq_k = 2
            1 1 1 1 0                       0 0
            1 1 1 1 1                       0 0
                                            0 0
                                            1 0
                                            1 1

    A query that sees no key gets 0. Query head ``h`` reads key head ``h // (heads / kv_heads)``.

    Args:
        q: (batch, seq_q, heads, head_dim); float16, bfloat16, float32, float64 or float8.
        k: (batch, seq_k, kv_heads, head_dim); kv_heads divides heads.
        v: (batch, seq_k, kv_heads, value_head_dim).
        dropout_p: rate in [0, 1) at which attention probabilities are dropped; 0 for evaluation.
        softmax_scale: factor on the scores; ``head_dim ** -0.5`` by default.
        causal: hide the keys after each query.
        window_size: (left, right) keys that a query sees on its two sides; -1 is unbounded.
        softcap: bound on the scores' magnitude, ``softcap * tanh(s / softcap)``; 0 is off.
        alibi_slopes: (heads,) or (batch, heads) float32; adds ``-slope * |distance|`` to a score.
        deterministic: make the backward bitwise repeatable (the forward always is).
        return_attn_probs: also return the log-sum-exp and the probabilities, quadratic in memory.
        extras: keyword options beyond FlashAttention-2, as `flashtile.attention` describes them.

    Returns:
        out (batch, seq_q, heads, value_head_dim); with `return_lse` (out, lse), with
        `return_attn_probs` (out, lse, probs): lse (batch, heads, seq_q) float32, differentiable;
        probs (batch, heads, seq_q, seq_k), negative where dropout dropped a probability.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        NotImplementedError: no backend can run the call; the message gives the reasons of each.
    """
    return attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        **extras,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[PaddedExtras],
) -> Result:
    """`flash_attn_func` with keys and values in one tensor, and the same masks and options.

    Args:
        q: (batch, seq_q, heads, head_dim).
        kv: (batch, seq_k, 2, kv_heads, head_dim).
        dropout_p: rate in [0, 1) at which attention probabilities are dropped; 0 for evaluation.
        softmax_scale: factor on the scores; ``head_dim ** -0.5`` by default.
        causal: hide the keys after each query.
        window_size: (left, right) keys that a query sees on its two sides; -1 is unbounded.
        softcap: bound on the scores' magnitude, ``softcap * tanh(s / softcap)``; 0 is off.
        alibi_slopes: (heads,) or (batch, heads) float32; adds ``-slope * |distance|`` to a score.
        deterministic: make the backward bitwise repeatable (the forward always is).
        return_attn_probs: also return the log-sum-exp and the probabilities, quadratic in memory.
        extras: as in `flash_attn_func`.

    Returns:
        out (batch, seq_q, heads, head_dim) and, on request, lse and probs, as `flash_attn_func`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flash_attn_func`.
    """
    k, v = checks.unpacked("kv", kv, 2, "batch, seq_k, 2, kv_heads, head_dim")
    call = (q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return flash_attn_func(*call, deterministic, return_attn_probs, **extras)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[PaddedExtras],
) -> Result:
    """`flash_attn_func` with queries, keys and values in one tensor, and the same masks and
    options.

    Args:
        qkv: (batch, seq, 3, heads, head_dim).
        dropout_p: rate in [0, 1) at which attention probabilities are dropped; 0 for evaluation.
        softmax_scale: factor on the scores; ``head_dim ** -0.5`` by default.
        causal: hide the keys after each query.
        window_size: (left, right) keys that a query sees on its two sides; -1 is unbounded.
        softcap: bound on the scores' magnitude, ``softcap * tanh(s / softcap)``; 0 is off.
        alibi_slopes: (heads,) or (batch, heads) float32; adds ``-slope * |distance|`` to a score.
        deterministic: make the backward bitwise repeatable (the forward always is).
        return_attn_probs: also return the log-sum-exp and the probabilities, quadratic in memory.
        extras: as in `flash_attn_func`.

    Returns:
        out (batch, seq, heads, head_dim) and, on request, lse and probs, as `flash_attn_func`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flash_attn_func`.
    """
    q, k, v = checks.unpacked("qkv", qkv, 3, "batch, seq, 3, heads, head_dim")
    call = (q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return flash_attn_func(*call, deterministic, return_attn_probs, **extras)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    workspace: Tensor | None = None,
    **extras: Unpack[Extras],
) -> Result:
    """`flash_attn_func` for sequences packed back to back; a query sees only its own sequence.

    Args:
        q: (total_q, heads, head_dim).
        k, v: (total_k, kv_heads, head_dim) and (total_k, kv_heads, value_head_dim), or pages:
            (num_pages, page_size, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, cumulative lengths, 0 first.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        dropout_p: rate in [0, 1) at which attention probabilities are dropped; 0 for evaluation.
        softmax_scale: factor on the scores; ``head_dim ** -0.5`` by default.
        causal: hide the keys after each query.
        window_size: (left, right) keys that a query sees on its two sides; -1 is unbounded.
        softcap: bound on the scores' magnitude, ``softcap * tanh(s / softcap)``; 0 is off.
        alibi_slopes: (heads,) or (batch, heads) float32; adds ``-slope * |distance|`` to a score.
        deterministic: make the backward bitwise repeatable (the forward always is).
        return_attn_probs: also return the log-sum-exp and the probabilities, quadratic in memory.
        block_table, page_table: (batch, pages per sequence) int32; two names of one argument.
        workspace: scratch buffer, as in `flashtile.attention_with_kvcache`.
        extras: keyword options beyond FlashAttention-2, as `flashtile.attention` describes them.

    Returns:
        out (total_q, heads, value_head_dim), on request lse (heads, total_q) and probs (batch,
        heads, max_seqlen_q, max_seqlen_k).

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        NotImplementedError: no backend can run the call; the message gives the reasons of each.
    """
    return attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        page_table=checks.one_page_table(block_table, page_table),
        workspace=workspace,
        **extras,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[Extras],
) -> Result:
    """`flash_attn_varlen_func` with keys and values in one tensor, and the same masks and options.

    Args:
        q: (total_q, heads, head_dim).
        kv: (total_k, 2, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, cumulative lengths, 0 first.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        dropout_p: rate in [0, 1) at which attention probabilities are dropped; 0 for evaluation.
        softmax_scale: factor on the scores; ``head_dim ** -0.5`` by default.
        causal: hide the keys after each query.
        window_size: (left, right) keys that a query sees on its two sides; -1 is unbounded.
        softcap: bound on the scores' magnitude, ``softcap * tanh(s / softcap)``; 0 is off.
        alibi_slopes: (heads,) or (batch, heads) float32; adds ``-slope * |distance|`` to a score.
        deterministic: make the backward bitwise repeatable (the forward always is).
        return_attn_probs: also return the log-sum-exp and the probabilities, quadratic in memory.
        extras: as in `flash_attn_varlen_func`.

    Returns:
        out (total_q, heads, head_dim) and, on request, lse and probs, as `flash_attn_varlen_func`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flash_attn_varlen_func`.
    """
    k, v = checks.unpacked("kv", kv, 2, "total_k, 2, kv_heads, head_dim")
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    call = (q, k, v, *lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return flash_attn_varlen_func(*call, deterministic, return_attn_probs, **extras)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[Extras],
) -> Result:
    """`flash_attn_varlen_func` with queries, keys and values in one tensor, and the same masks and
    options.

    Args:
        qkv: (total, 3, heads, head_dim).
        cu_seqlens: (batch + 1,) int32, cumulative lengths, 0 first.
        max_seqlen: upper bound of the lengths.
        dropout_p: rate in [0, 1) at which attention probabilities are dropped; 0 for evaluation.
        softmax_scale: factor on the scores; ``head_dim ** -0.5`` by default.
        causal: hide the keys after each query.
        window_size: (left, right) keys that a query sees on its two sides; -1 is unbounded.
        softcap: bound on the scores' magnitude, ``softcap * tanh(s / softcap)``; 0 is off.
        alibi_slopes: (heads,) or (batch, heads) float32; adds ``-slope * |distance|`` to a score.
        deterministic: make the backward bitwise repeatable (the forward always is).
        return_attn_probs: also return the log-sum-exp and the probabilities, quadratic in memory.
        extras: as in `flash_attn_varlen_func`.

    Returns:
        out (total, heads, head_dim) and, on request, lse and probs, as `flash_attn_varlen_func`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flash_attn_varlen_func`.
    """
    q, k, v = checks.unpacked("qkv", qkv, 3, "total, 3, heads, head_dim")
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    call = (q, k, v, *lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return flash_attn_varlen_func(*call, deterministic, return_attn_probs, **extras)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    return_lse: bool = False,
    **extras: Unpack[CacheExtras],
) -> Result:
    """Append `k` and `v` to a key-value cache, then attend to it.

    For inference: no gradient is recorded, and the cache is written in place. Masks are aligned to
    the bottom-right corner of each sequence's own length, as in `flash_attn_func`.

    Args:
        q: (batch, seq_q, heads, head_dim).
        k_cache, v_cache: (cache rows, capacity, kv_heads, head_dim), or pages: (num_pages,
            page_size, kv_heads, head_dim).
        k, v: (batch, seq_new, kv_heads, head_dim), written at `cache_seqlens`.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), tables that rotate the new keys and the
            queries.
        cache_seqlens: an int or (batch,) int32, number of tokens in each cache before the append.
        cache_batch_idx: (batch,) int32, the cache row of each sequence.
        cache_leftpad: (batch,) int32, index of each sequence's first token in its cache row.
        block_table, page_table: (batch, pages per sequence) int32; two names of one argument.
        softmax_scale: factor on the scores; ``head_dim ** -0.5`` by default.
        causal: hide the keys after each query.
        window_size: (left, right) keys that a query sees on its two sides; -1 is unbounded.
        softcap: bound on the scores' magnitude, ``softcap * tanh(s / softcap)``; 0 is off.
        alibi_slopes: (heads,) or (batch, heads) float32; adds ``-slope * |distance|`` to a score.
        rotary_interleaved: rotate pairs (0, 1), (2, 3), ... instead of the two halves.
        num_splits: programs that share one sequence's keys on a GPU; 0 lets the backend choose.
        return_softmax_lse, return_lse: return (out, lse); two names of one argument.
        extras: keyword options as `flashtile.attention_with_kvcache` describes them.

    Returns:
        out (batch, seq_q, heads, value_head_dim), on request lse (batch, heads, seq_q) float32.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        NotImplementedError: no backend can run the call; the message gives the reasons of each.
    """
    return attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=checks.one_page_table(block_table, page_table),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        return_lse=return_softmax_lse or return_lse,
        **extras,
    )
