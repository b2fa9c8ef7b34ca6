"""Padded batches: `flash_attn_func`, and variants with keys and values in one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..api import Result, attention
from ..call import checks
from ..call.options import PaddedExtras, WindowSize

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
