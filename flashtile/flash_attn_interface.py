"""The seven functions of FlashAttention-2: same names, positional order, defaults and return
values.

``from flash_attn import ...`` becomes ``from flashtile import ...``. Everything newer is
keyword-only (`Extras`), with the meaning it has in `flashtile.attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

from . import checks
from .api import Result, WindowSize, attention, attention_varlen, attention_with_kvcache
from .dispatch import BackendName

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Extras(TypedDict, total=False):
    """Keyword-only options of every training function beyond FlashAttention-2."""

    qv: Tensor | None
    attention_chunk: int
    bias: Tensor | None
    sink: Tensor | None
    block_mask: Any
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    num_splits: int
    pack_gqa: bool | None
    sm_margin: int
    return_lse: bool
    out: Tensor | None
    backend: BackendName | None


class CacheExtras(TypedDict, total=False):
    """Keyword-only options of `flash_attn_with_kvcache` beyond FlashAttention-2."""

    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | Tensor | None
    cu_seqlens_k_new: Tensor | None
    rotary_seqlens: Tensor | None
    qv: Tensor | None
    attention_chunk: int
    bias: Tensor | None
    sink: Tensor | None
    block_mask: Any
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    pack_gqa: bool | None
    sm_margin: int
    scheduler_metadata: Tensor | None
    out: Tensor | None
    workspace: Tensor | None
    backend: BackendName | None


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
    **extras: Unpack[Extras],
) -> Result:
    """Attention of q (batch, seq_q, heads, head_dim) over k, v (batch, seq_k, kv_heads, head_dim).

    Options, errors and results are those of `flashtile.attention`.
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
    **extras: Unpack[Extras],
) -> Result:
    """`flash_attn_func` with keys and values in one tensor, kv (batch, seq_k, 2, kv_heads,
    head_dim).
    """
    k, v = checks.unpacked("kv", kv, 2, "batch, seq_k, 2, kv_heads, head_dim")
    return flash_attn_func(
        q,
        k,
        v,
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
    **extras: Unpack[Extras],
) -> Result:
    """`flash_attn_func` with everything in one tensor, qkv (batch, seq, 3, heads, head_dim)."""
    q, k, v = checks.unpacked("qkv", qkv, 3, "batch, seq, 3, heads, head_dim")
    return flash_attn_func(
        q,
        k,
        v,
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
    """Attention over packed sequences: q (total_q, heads, head_dim), k, v (total_k, kv_heads,
    head_dim).

    `block_table` and `page_table` are two names of one thing. Options, errors and results are those
    of `flashtile.attention_varlen`.
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
    """`flash_attn_varlen_func` with keys and values in one tensor, kv (total_k, 2, kv_heads,
    head_dim).
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
    """`flash_attn_varlen_func` with everything in one tensor, qkv (total, 3, heads, head_dim)."""
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
    **extras: Unpack[CacheExtras],
) -> Result:
    """Attention against a key-value cache, with an append of new keys and values in place; no
    gradient.

    `block_table` and `page_table` are two names of one thing. Options, errors and results are those
    of `flashtile.attention_with_kvcache`.
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
        return_lse=return_softmax_lse,
        **extras,
    )
