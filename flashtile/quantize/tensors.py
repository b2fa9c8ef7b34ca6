"""`quantize_qkv`: its checks, and the rows of its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Never

from ..call import checks
from ..call.layouts import Packed
from ..call.options import unexpected_keywords
from ..ops.quantize import Rotary, quantize
from ..ops.quantize.formula import Quantized, Recipe, Rows

SCALES = ("tensor", "head", "block")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scales: str = "block",
    hadamard: bool = True,
    hadamard_v: bool = False,
    smooth_k: bool = False,
    seed: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    **unknown: Never,
) -> Quantized:
    """Quantise q, k and v to float8 e4m3.

    A scale is the smallest power of two by which the largest finite magnitude can be divided to fit
    e4m3 (448), so scaling itself rounds nothing. NaN and infinities become NaN and do not affect
    the scales.

    Args:
        q: (batch, seq_q, heads, head_dim), or (total_q, heads, head_dim) with `cu_seqlens_q`;
            float16, bfloat16 or float32.
        k, v: (batch, seq_k, kv_heads, head_dim), or (total_k, kv_heads, head_dim); the value head
            dim may differ.
        scales: "tensor" (one scale), "head" (one for each sequence and key head; the query heads
            of a group share q's scale) or "block" (one for each 64 rows of q, or 128 rows of k and
            v, of a head).
        hadamard: multiply q and k by `rotation(head_dim, seed)`, a Hadamard matrix with random
            signs, which spreads outliers and leaves the products of q and k as they are.
        hadamard_v: multiply v by `rotation(value_head_dim, seed)`; multiply the result of attention
            by its transpose.
        smooth_k: subtract the mean over a sequence's keys from k. The softmax stays the same; the
            log-sum-exp of query i decreases by ``softmax_scale * q_i . k_mean``.
        seed: determines the signs of the rotation.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, cumulative lengths of packed sequences.
        max_seqlen_q, max_seqlen_k: upper bounds of their lengths.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), tables to rotate q and k first, each
            row by the angles of its position in its sequence.
        rotary_interleaved: rotate pairs (0, 1), (2, 3), ... instead of the two halves.

    Returns:
        `Quantized`, whose first six members are arguments of `flashtile.attention`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.

    Source: FlashAttention-3 (Shah et al. 2024), section 3.3; the smoothing of K is SageAttention's
        (Zhang et al. 2024).
    """
    if unknown:
        raise unexpected_keywords(unknown, quantize_qkv)
    layout = layout_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    recipe = Recipe(scales, hadamard, hadamard_v, smooth_k, seed)
    check(q, k, v, layout, recipe)
    rotary = None
    if rotary_cos is not None or rotary_sin is not None:
        rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved)
        check_rotary(rotary, q, k, layout)
    return quantized(q, k, v, recipe, layout, rotary)


def layout_of(*lengths: Any) -> Packed | None:
    """The layout of packed sequences, None if dense; `check` finds missing lengths."""
    return None if all(x is None for x in lengths) else Packed(*lengths)


def check(q: Any, k: Any, v: Any, layout: Packed | None, recipe: Recipe) -> None:
    """Check the tensors as `flashtile.attention` does, and the options of quantising."""
    if layout is None:
        checks.dense(q, k, v)
    else:
        checks.packed(q, k, v, layout.cu_seqlens_q, layout.cu_seqlens_k, None)
        checks.length("max_seqlen_q", layout.max_seqlen_q)
        checks.length("max_seqlen_k", layout.max_seqlen_k)
        if checks.checking_values((q, layout.cu_seqlens_q, layout.cu_seqlens_k)):
            for side, x, lengths, longest in (
                ("q", q, layout.cu_seqlens_q, layout.max_seqlen_q),
                ("k", k, layout.cu_seqlens_k, layout.max_seqlen_k),
            ):
                checks.packed_lengths(side, lengths, None, x.shape[0], longest)
    if q.dtype not in DTYPES:
        raise TypeError(f"q: got dtype {q.dtype}, want float16, bfloat16 or float32")
    if recipe.scales not in SCALES:
        wanted = ", ".join(map(repr, SCALES))
        raise ValueError(f"scales: got {recipe.scales!r}, want one of {wanted}")
    for name in ("hadamard", "hadamard_v", "smooth_k"):
        checks.flag(name, getattr(recipe, name))


def check_rotary(rotary: Rotary, q: Tensor, k: Tensor, layout: Packed | None) -> None:
    """Raise unless the tables cover all rows."""
    for name, table in (("rotary_cos", rotary.cos), ("rotary_sin", rotary.sin)):
        checks.tensor(name, table, dims="positions, rotary_dim / 2", like=q)
    checks.tensor(
        "rotary_sin", rotary.sin, shape=tuple(rotary.cos.shape), meaning="the shape of rotary_cos"
    )
    positions, pairs = rotary.cos.shape
    longest = max(rows.longest for rows in rows_of(q, k, layout))
    if positions < longest or 2 * pairs > q.shape[-1]:
        raise ValueError(
            f"rotary_cos: got shape {(positions, pairs)}, want at least {longest} positions and at "
            f"most {q.shape[-1] // 2} pairs"
        )


def quantized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Recipe,
    layout: Packed | None,
    rotary: Rotary | None = None,
) -> Quantized:
    """`quantize_qkv` for checked arguments."""
    return quantize(q, k, v, recipe, *rows_of(q, k, layout), rotary)


def rows_of(q: Tensor, k: Tensor, layout: Packed | None) -> tuple[Rows, Rows]:
    """The rows of q and of k."""
    if layout is None:
        return Rows.of(q, None, q.shape[1]), Rows.of(k, None, k.shape[1])
    return (
        Rows.of(q, layout.cu_seqlens_q, layout.max_seqlen_q),
        Rows.of(k, layout.cu_seqlens_k, layout.max_seqlen_k),
    )
