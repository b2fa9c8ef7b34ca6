"""``flash_attn.flash_attn_triton``: dense attention with a bias, as FlashAttention 1 had it.

The causal mask starts at the top-left corner: query i sees the keys 0 to i. The bias has a gradient
here. Head dims, dtypes and devices are those of `flashtile.attention`.

Source: FlashAttention 2.8.4, ``flash_attn/flash_attn_triton.py``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .api import attention
from .call import checks


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Any:
    """Attention of q (batch, seq_q, heads, head_dim) over k, v (batch, seq_k, heads, head_dim).

    `bias` broadcasts to (batch, heads, seq_q, seq_k) and is added to the scores.
    """
    if not causal:
        return attention(q, k, v, bias=bias, softmax_scale=softmax_scale)
    seen = min(q.shape[1], k.shape[1])  # no query sees a key after the last query
    if bias is not None and bias.shape[-1] > 1:
        bias = bias[..., :seen]
    # The last query is at the last key, or after it: `right` moves the diagonal to the first key.
    right = q.shape[1] - seen
    options: Any = {"softmax_scale": softmax_scale, "window_size": (-1, right), "bias": bias}
    return attention(q, k[:, :seen], v[:, :seen], **options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Any:
    """`flash_attn_func` of kv (batch, seq_k, 2, heads, head_dim)."""
    k, v = checks.unpacked("kv", kv, 2, "batch, seq_k, 2, heads, head_dim")
    return flash_attn_func(q, k, v, bias, causal, softmax_scale)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Any:
    """`flash_attn_func` of qkv (batch, seq, 3, heads, head_dim)."""
    q, k, v = checks.unpacked("qkv", qkv, 3, "batch, seq, 3, heads, head_dim")
    return flash_attn_func(q, k, v, bias, causal, softmax_scale)
