"""What users write: type checkers run over this file in their strictest mode, nothing runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import flashtile
from flashtile import (
    BlockMask,
    attention,
    attention_varlen,
    attention_with_kvcache,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

if TYPE_CHECKING:
    from typing_extensions import assert_type


def dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert_type(attention(q, k, v, causal=True), Tensor)
    assert_type(attention(q, k, v, return_lse=False), Tensor)
    out, lse = attention(q, k, v, window_size=(512, 0), softcap=20.0, return_lse=True)
    assert_type(lse, Tensor)
    out, lse, probs = attention(q, k, v, return_attn_probs=True)
    assert_type(probs, Tensor)
    out, statistics = attention(q, k, v, return_stats=("entropy",))
    assert_type(statistics, Any)
    attention(q, k, v, backend="cpu", out=out)
    torch.autograd.grad(out.sum(), q)


def decided_when_it_runs(q: Tensor, wanted: bool) -> Tensor:
    result = attention(q, q, q, return_lse=wanted)
    return result[0] if isinstance(result, tuple) else result


def as_in_flash_attn(q: Tensor, k: Tensor, v: Tensor, qkv: Tensor, mask: Tensor) -> None:
    assert_type(flash_attn_func(q, k, v, 0.0, None, True), Tensor)
    out, lse, probs = flash_attn_func(q, k, v, 0.1, causal=True, return_attn_probs=True)
    assert_type(flash_attn_func(q, k, v, sink=torch.zeros(8), deterministic=True), Tensor)
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert_type(flash_attn_qkvpacked_func(qkv, causal=True), Tensor)
    assert_type(flash_attn_func(q, k, v, attn_mask=mask, key_padding_mask=mask), Tensor)
    assert_type((out, lse, probs), tuple[Tensor, Tensor, Tensor])


def packed(q: Tensor, cu_seqlens: Tensor) -> None:
    out = attention_varlen(q, q, q, cu_seqlens, cu_seqlens, 128, 128, causal=True)
    assert_type(out, Tensor)
    out, lse, probs = flash_attn_varlen_func(
        q, q, q, cu_seqlens, cu_seqlens, 128, 128, return_attn_probs=True
    )
    assert_type((out, lse, probs), tuple[Tensor, Tensor, Tensor])


def cached(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> None:
    out = attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, causal=True)
    assert_type(out, Tensor)
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, return_softmax_lse=True)
    assert_type(lse, Tensor)
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, return_lse=True)
    assert_type(lse, Tensor)


def the_rest(q: Tensor, mask: Tensor, options: dict[str, Any]) -> None:
    with flashtile.backend("cpu"):
        attention(q, q, q, block_mask=BlockMask.from_tiles(mask, (128, 128)))
    print(flashtile.explain(q, q, q, **options), flashtile.__version__)
    flashtile.integrations.sdpa.install()
    quantized = flashtile.quantize_qkv(q, q, q)
    assert_type(quantized.q, Tensor)
    assert_type(flashtile.attention_fp8(q, q, q), Tensor)


def mistakes(q: Tensor) -> None:
    """Each line must be an error: an ignore that is not needed is one itself."""
    attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
    attention(q, q, q, backend="tritn")  # type: ignore[call-overload]
    flash_attn_func(q, q, q, scale=1.0)  # type: ignore[call-overload]
    flash_attn_func(q, q, q, causal="yes")  # type: ignore[call-overload]
    attention(q, q, q, return_lse=True).sum()  # type: ignore[attr-defined]
    flashtile.atention(q, q, q)  # type: ignore[attr-defined]
