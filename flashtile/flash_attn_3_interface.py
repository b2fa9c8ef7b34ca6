"""``flash_attn_interface`` of FlashAttention-3: its names, positional order, defaults and results.

The options mean the same and accept the same values as in `flashtile.attention`, so any head dim,
page size and device works, and `attention_chunk` has gradients. Two results differ from
FlashAttention-3's: the log-sum-exp of a query that sees no key is -inf even if there are no keys at
all, and `flash_attn_with_kvcache` returns empty tensors for the partial results of split keys.

Source: FlashAttention commit 0251105a, ``hopper/flash_attn_interface.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import combine, flash_attn_2_cuda
from .api import attention, attention_varlen, attention_with_kvcache
from .call import checks
from .call.options import WindowSize
from .flash_attn_2_interface import maybe_contiguous, round_multiple
from .problem import FLOAT8

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "maybe_contiguous",
    "round_multiple",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flashtile.attention`; with `return_attn_probs` it returns (out, lse)."""
    q, k, v, qv, finish = forward_only(q, k, v, qv)
    result = attention(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_lse=return_attn_probs,
    )
    return finish(result)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    page_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    only_qv: bool = False,
) -> Any:
    """`flashtile.attention_varlen`; with `return_attn_probs` it returns (out, lse).

    SGLang's keywords: `return_softmax_lse` does the same, `sinks` is `sink`, and `only_qv` is as in
    `flash_attn_with_kvcache`.
    """
    if only_qv:
        q, k, k_descale, qv = _instead_of_q_and_k(qv, v, v_descale)
    q, k, v, qv, finish = forward_only(q, k, v, qv)
    result = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_lse=return_attn_probs or return_softmax_lse,
        page_table=page_table,
        sink=sinks,
        out=out,
    )
    return finish(result)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv (batch, seq, 3, heads, head_dim) or, if keys have fewer heads than
    queries, (batch, seq, num_heads_q + 2 * kv_heads, head_dim).
    """
    q, k, v = _unpacked(qkv, num_heads_q)
    descales = (q_descale, k_descale, v_descale)
    call = (q, k, v, softmax_scale, causal, None, *descales, window_size, attention_chunk, softcap)
    num_splits, pack_gqa = 1, None  # the defaults
    return flash_attn_func(*call, num_splits, pack_gqa, deterministic, sm_margin, return_attn_probs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    only_qv: bool = False,
) -> Any:
    """`flashtile.attention_with_kvcache`; with `return_softmax_lse` it returns (out, lse,
    out_accum, lse_accum), where the last two are empty.

    SGLang's keywords: `sinks` is `sink`, and `attention_chunk` may be None. With `only_qv` the
    scores are those of `qv` and the values alone: `q`, `k_cache` and `k` may be None and are not
    read, and `softmax_scale` is by default that of the values' head dim.
    """
    if only_qv:
        if rotary_cos is not None:
            raise ValueError("rotary_cos: want None with only_qv, which has nothing to rotate")
        q, k_cache, k_descale, qv = _instead_of_q_and_k(qv, v_cache, v_descale)
        k = v
    result = attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        qv=qv,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk or 0,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        scheduler_metadata=scheduler_metadata,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
        return_lse=return_softmax_lse,
        sink=sinks,
        out=out,
    )
    return (*result, *_no_parts(q)) if return_softmax_lse else result


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `flashtile.flash_attn_combine`."""
    return combine.flash_attn_combine(out_partial, lse_partial, out, out_dtype)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Return an empty int32 tensor on the device of `cache_seqlens`, which `scheduler_metadata`
    accepts. flashtile needs no metadata, because it plans from sizes only.

    Raises:
        ValueError, TypeError: `cache_seqlens` or a hint is not valid for the call.
    """
    checks.tensor("cache_seqlens", cache_seqlens)
    checks.per_sequence("cache_seqlens", cache_seqlens, cache_seqlens, batch_size)
    checks.splits("num_splits", num_splits)
    checks.performance_hints(pack_gqa, sm_margin, None, cache_seqlens)
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, softmax_lse, out_accum, softmax_lse_accum), where the last two are empty.

    If an argument is given that only caches have, it calls `flashtile.attention_with_kvcache`,
    which records no gradient. Otherwise it calls `flashtile.attention_varlen` if queries or keys
    have cumulative lengths, and `flashtile.attention` if not.
    """
    shared: dict[str, Any] = {
        "qv": qv,
        "out": out_,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": (window_size_left, window_size_right),
        "attention_chunk": attention_chunk,
        "softcap": softcap,
        "num_splits": num_splits,
        "pack_gqa": pack_gqa,
        "sm_margin": sm_margin,
        "return_lse": True,
    }
    of_caches = {
        "k_new": k_new,
        "v_new": v_new,
        "cu_seqlens_k_new": cu_seqlens_k_new,
        "page_table": page_table,
        "kv_batch_idx": kv_batch_idx,
        "leftpad_k": leftpad_k,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "seqlens_rotary": seqlens_rotary,
    }
    given = [name for name, x in of_caches.items() if x is not None]
    result: Any
    if given and cu_seqlens_k is not None:
        raise ValueError(f"{given[0]}: is for a cache and cannot be combined with cu_seqlens_k")
    if not given:
        shared |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
        if cu_seqlens_q is None and cu_seqlens_k is None:
            result = attention(q, k, v, **shared)
        else:
            packing: Any = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            result = attention_varlen(q, k, v, *packing, **shared)
    elif seqused_q is not None:
        raise NotImplementedError(
            "seqused_q: cannot be combined with a cache; shorten cu_seqlens_q instead"
        )
    else:
        shared |= {_NAMES_OF_CACHES.get(name, name): x for name, x in of_caches.items()}
        result = attention_with_kvcache(
            q,
            k,
            v,
            **shared,
            rotary_interleaved=rotary_interleaved,
            scheduler_metadata=scheduler_metadata,
            cache_seqlens=seqused_k,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
        )
    return (*result, *_no_parts(q))


# Arguments of `_flash_attn_forward` that have another name in `attention_with_kvcache`.
_NAMES_OF_CACHES = {
    "k_new": "k",
    "v_new": "v",
    "kv_batch_idx": "cache_batch_idx",
    "leftpad_k": "cache_leftpad",
    "seqlens_rotary": "rotary_seqlens",
}


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Write the gradients into dq, dk and dv; returns softmax_d of `flash_attn_2_cuda.bwd` or, with
    `cu_seqlens_q`, `varlen_bwd`. (`sequed_q` and `sequed_k` are FlashAttention-3's own names.)
    """
    options = {
        "softmax_scale": softmax_scale,
        "causal": is_causal,
        "window_size": (window_size_left, window_size_right),
        "softcap": softcap,
        "seqused_q": sequed_q,
        "seqused_k": sequed_k,
        "deterministic": deterministic,
        "sm_margin": sm_margin,
    }
    layout = flash_attn_2_cuda.layout_of(
        q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    )
    results = (dout, out, softmax_lse)
    return flash_attn_2_cuda.backward((q, k, v), layout, options, results, (dq, dk, dv))[3]


def _unpacked(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, ...]:
    """Split qkv into q, k and v: along a dimension of 3, or along the heads."""
    checks.tensor("qkv", qkv)
    if qkv.dim() == 5:
        return checks.unpacked("qkv", qkv, 3, "batch, seq, 3, heads, head_dim")
    checks.tensor("qkv", qkv, dims="batch, seq, num_heads_q + 2 * kv_heads, head_dim")
    if num_heads_q is None:
        raise ValueError("num_heads_q: got None, want the number of query heads of a 4-D qkv")
    heads = qkv.shape[2] - checks.length("num_heads_q", num_heads_q)
    if heads < 2 or heads % 2:
        raise ValueError(
            f"num_heads_q: got {num_heads_q} of {qkv.shape[2]} heads, want an even number of heads "
            "left for keys and values"
        )
    return qkv.split([num_heads_q, heads // 2, heads // 2], dim=2)


def _instead_of_q_and_k(
    qv: Tensor | None, v: Tensor, v_descale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, None]:
    """q, k, k_descale and qv of a call with `only_qv`: its queries are `qv`, and its keys the
    values.
    """
    if qv is None:
        raise ValueError("qv: got None, want the queries with only_qv")
    return qv, v, v_descale, None


def _no_parts(q: Tensor) -> tuple[Tensor, Tensor]:
    """Empty out_accum and lse_accum."""
    empty = torch.empty(0, device=q.device)
    return empty, empty.clone()


# FlashAttention-3 runs float8 inputs and `qv` whether or not they require gradients; only its
# backward fails. `flashtile.attention` refuses such a call on a GPU before it runs. Code written
# for FlashAttention-3 finds here what it finds there.

# Largest head dim for which a GPU backend has a backward; with `qv`, the sum of both head dims.
WIDEST_WITH_GRADIENT = 512


class _ForwardOnly(torch.autograd.Function):
    """The identity on tensors, with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, reason: str, inputs: int, *tensors: Tensor) -> Any:
        ctx.reason = reason
        results = tuple(x.view_as(x) for x in tensors[inputs:])
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(ctx.reason)


def forward_only(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Callable[[Any], Any]]:
    """Return the inputs to use for the call, and a function to apply to its result.

    If the call requires a gradient that no GPU backend has, the inputs are detached, and the
    backward of the result raises NotImplementedError. Otherwise both are left unchanged.
    """
    inputs = [q, k, v] if qv is None else [q, k, v, qv]
    are_tensors = all(isinstance(x, Tensor) for x in inputs)  # the call itself rejects others
    requires_grad = torch.is_grad_enabled() and are_tensors and any(x.requires_grad for x in inputs)
    if not (requires_grad and _has_no_backward(q, qv)):
        return q, k, v, qv, lambda result: result
    what = "float8 inputs have" if q.dtype in FLOAT8 else "qv with this head dim has"
    reason = f"{what} no backward on a GPU; flashtile.attention refuses such a call before it runs"

    def attach(result: Any) -> Any:
        results = result if isinstance(result, tuple) else (result,)
        return _ForwardOnly.apply(reason, len(inputs), *inputs, *results)

    detached = [x.detach() for x in (q, k, v)]
    return *detached, None if qv is None else qv.detach(), attach  # type: ignore[return-value]  # a list has no fixed length


def _has_no_backward(q: Tensor, qv: Tensor | None) -> bool:
    is_wide = qv is not None and q.shape[-1] + qv.shape[-1] > WIDEST_WITH_GRADIENT
    return q.is_cuda and (q.dtype in FLOAT8 or is_wide)
