"""Packed sequences: `flash_attn_varlen_func`, and variants with keys and values in one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..api import Result, attention_varlen
from ..call import checks
from ..call.options import Extras, WindowSize

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **extras,
    )


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
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **extras,
    )
