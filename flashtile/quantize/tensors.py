"""From 16 bits to 8: scales, rotation, centring, and the layout that the tensor cores want."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autocast import without_autocast
from ..call import checks
from ..call.layouts import Packed
from ..layers.rotary import apply_rotary_emb
from ..problem import FLOAT8_KEY_BLOCK, FLOAT8_QUERY_BLOCK
from .rotation import rotation
from .rows import Rows, per_block

SCALES = ("tensor", "head", "block")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max

# TMA wants rows at multiples of 16 bytes.
ROW_STEP = 16


class Recipe(NamedTuple):
    """How q, k and v are brought to 8 bits: the options of `quantize_qkv`."""

    scales: str = "block"
    rotate: bool = True
    rotate_v: bool = False
    centre_k: bool = False
    seed: int = 0


class Rotary(NamedTuple):
    """Rotary embedding of q and k."""

    cos: Any  # (positions, pairs)
    sin: Any
    interleaved: bool

    def turn(self, x: Tensor, rows: Rows, cu_seqlens: Tensor | None) -> Tensor:
        """`x` turned by the formula."""
        return apply_rotary_emb(
            x,
            self.cos.to(x.dtype),
            self.sin.to(x.dtype),
            interleaved=self.interleaved,
            cu_seqlens=cu_seqlens,
            max_seqlen=None if cu_seqlens is None else rows.longest,
        )


class Quantized(NamedTuple):
    """Float8 tensors and their scales, as `flashtile.attention` takes them."""

    q: Tensor  # as given, float8_e4m3fn
    k: Tensor
    v: Tensor  # as given, but keys are adjacent in memory, as the tensor cores read V
    q_descale: Tensor  # (batch, kv_heads) float32, or (batch, heads, blocks of 64 rows)
    k_descale: Tensor  # (batch, kv_heads), or (batch, kv_heads, blocks of 128 rows), as the next
    v_descale: Tensor
    k_mean: Tensor | None  # (batch, kv_heads, head_dim) float32, what was taken from k


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scales: str = "block",
    rotate: bool = True,
    rotate_v: bool = False,
    centre_k: bool = False,
    seed: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
) -> Quantized:
    """q, k and v in float8 e4m3, with scales that fit them.

    A scale is the smallest power of two with which the largest finite magnitude fits e4m3 (448), so
    that scaling rounds nothing. NaN and infinities become NaN and count for no scale.

    Args:
        q: (batch, seq_q, heads, head_dim), or (total_q, heads, head_dim) with `cu_seqlens_q`;
            float16, bfloat16 or float32.
        k, v: (batch, seq_k, kv_heads, head_dim), or (total_k, kv_heads, head_dim); the value head
            dim may differ.
        scales: "tensor", "head" (one for each sequence and key head; that of q covers the query
            heads of the group) or "block" (one for each 64 rows of q, or 128 of k and v, of a
            head).
        rotate: multiply q and k with `rotation(head_dim, seed)`, which spreads outliers and leaves
            their products as they are.
        rotate_v: multiply v with `rotation(value_head_dim, seed)`; the result of attention is then
            to be multiplied with its transpose.
        centre_k: take the mean over a sequence's keys from k. The softmax does not notice; the
            log-sum-exp of query i comes out less by ``softmax_scale * q_i . k_mean``.
        seed: decides the signs of the rotation.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, cumulative lengths of packed sequences.
        max_seqlen_q, max_seqlen_k: upper bounds of their lengths.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), turn q and k first, each row by the
            angles of its number in its sequence.
        rotary_interleaved: turn pairs (0, 1), (2, 3), ... instead of the two halves.

    Returns:
        `Quantized`, whose first six members are arguments of `flashtile.attention`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.

    Source: FlashAttention-3 (Shah et al. 2024), section 3.3; the centring of K is SageAttention's
        (Zhang et al. 2024).
    """
    layout = layout_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    recipe = Recipe(scales, rotate, rotate_v, centre_k, seed)
    check(q, k, v, layout, recipe)
    rotary = None
    if rotary_cos is not None or rotary_sin is not None:
        rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved)
        check_rotary(rotary, q, k, layout)
    return quantized(q, k, v, recipe, layout, rotary)


def layout_of(*lengths: Any) -> Packed | None:
    """How packed sequences lie, if they are packed; what is missing is found by `check`."""
    return None if all(x is None for x in lengths) else Packed(*lengths)


def check(q: Any, k: Any, v: Any, layout: Packed | None, recipe: Recipe) -> None:
    """The checks that `flashtile.attention` makes, and those of what is told here."""
    if layout is None:
        checks.dense(q, k, v)
    else:
        checks.packed(q, k, v, layout.cu_seqlens_q, layout.cu_seqlens_k, None)
        checks.length("max_seqlen_q", layout.max_seqlen_q)
        checks.length("max_seqlen_k", layout.max_seqlen_k)
    if q.dtype not in DTYPES:
        raise TypeError(f"q: got dtype {q.dtype}, want float16, bfloat16 or float32")
    if recipe.scales not in SCALES:
        wanted = ", ".join(map(repr, SCALES))
        raise ValueError(f"scales: got {recipe.scales!r}, want one of {wanted}")
    for name in ("rotate", "rotate_v", "centre_k"):
        checks.flag(name, getattr(recipe, name))


def check_rotary(rotary: Rotary, q: Tensor, k: Tensor, layout: Packed | None) -> None:
    """Raise unless the tables reach over all rows."""
    for name, table in (("rotary_cos", rotary.cos), ("rotary_sin", rotary.sin)):
        checks.rank(name, table, "positions, rotary_dim / 2")
        checks.same_device(name, table, q)
    checks.shape("rotary_sin", rotary.sin, tuple(rotary.cos.shape), "the shape of rotary_cos")
    positions, pairs = rotary.cos.shape
    longest = max(rows.longest for rows in rows_of(q, k, layout))
    if positions < longest or 2 * pairs > q.shape[-1]:
        raise ValueError(
            f"rotary_cos: got shape {(positions, pairs)}, want at least {longest} positions and at "
            f"most {q.shape[-1] // 2} pairs"
        )


@without_autocast
def quantized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Recipe,
    layout: Packed | None,
    rotary: Rotary | None = None,
) -> Quantized:
    """`quantize_qkv` of checked arguments."""
    from . import on_gpu

    if on_gpu.runs_as_kernel(q):
        return on_gpu.quantized_on_gpu(q, k, v, recipe, layout, rotary)
    rows_q, rows_k = rows_of(q, k, layout)
    if rotary is not None:
        q = rotary.turn(q, rows_q, layout.cu_seqlens_q if layout else None)
        k = rotary.turn(k, rows_k, layout.cu_seqlens_k if layout else None)
    turned = rotation(q.shape[-1], recipe.seed, q.device) if recipe.rotate else None
    turned_v = rotation(v.shape[-1], recipe.seed, v.device) if recipe.rotate_v else None
    k_float, k_mean = k.float(), None
    if recipe.centre_k:
        k_mean = means_of(k_float, rows_k)
        k_float = centred(k_float, k_mean, rows_k)
    kv_heads = k.shape[-2]
    q8, q_descale = scaled(rotated(q, turned), rows_q, FLOAT8_QUERY_BLOCK, recipe, kv_heads)
    k8, k_descale = scaled(rotated(k_float, turned), rows_k, FLOAT8_KEY_BLOCK, recipe, kv_heads)
    v8, v_descale = scaled(rotated(v, turned_v), rows_k, FLOAT8_KEY_BLOCK, recipe, kv_heads)
    return Quantized(q8, k8, keys_adjacent(v8), q_descale, k_descale, v_descale, k_mean)


def rows_of(q: Tensor, k: Tensor, layout: Packed | None) -> tuple[Rows, Rows]:
    """The rows of q and of k."""
    if layout is None:
        return Rows.of(q, None, q.shape[1]), Rows.of(k, None, k.shape[1])
    return (
        Rows.of(q, layout.cu_seqlens_q, layout.max_seqlen_q),
        Rows.of(k, layout.cu_seqlens_k, layout.max_seqlen_k),
    )


def rotated(x: Tensor, matrix: Tensor | None) -> Tensor:
    """`x` (..., head_dim) in float32, times `matrix`."""
    x = x.float()
    return x if matrix is None else x @ matrix


def means_of(k: Tensor, rows: Rows) -> Tensor:
    """The mean of each sequence of `k` (float32), (batch, kv_heads, head_dim)."""
    tokens = k.reshape(-1, *k.shape[-2:])
    usable = torch.where(tokens.isfinite(), tokens, 0.0)
    return per_block(usable, rows.sequence, rows.B, "mean")


def centred(k: Tensor, means: Tensor, rows: Rows) -> Tensor:
    """`k` less the mean of its sequence."""
    tokens = k.reshape(-1, *k.shape[-2:])
    padded = torch.cat((means, means.new_zeros(1, *means.shape[1:])))
    return (tokens - padded[rows.sequence]).view(k.shape)


def scaled(
    x: Tensor, rows: Rows, block: int, recipe: Recipe, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """`x` (float32, dense or packed) in e4m3 and its descale."""
    tokens = x.reshape(-1, *x.shape[-2:])
    heads = tokens.shape[1]
    size = block if recipe.scales == "block" else max(rows.longest, 1)
    index, count = rows.blocks(size)
    magnitude = torch.where(tokens.isfinite(), tokens.abs(), 0.0).amax(-1)  # (tokens, heads)
    largest = per_block(magnitude, index, rows.B * count, "amax").view(rows.B, count, heads)
    largest = largest.transpose(1, 2)  # (B, heads, count)
    if recipe.scales != "block":
        largest = shared(largest, recipe, kv_heads)
    descale = power_of_two(largest / LARGEST)
    factors = token_factors(descale, rows, block, heads)
    numbers = torch.where(tokens.isfinite(), tokens / factors, torch.nan)
    return numbers.to(E4M3).view(x.shape), descale.contiguous()


def shared(magnitudes: Tensor, recipe: Recipe, kv_heads: int) -> Tensor:
    """The largest of each key head, or of all, (batch, kv_heads), of blocks (batch, heads,
    blocks)."""
    of_heads = magnitudes.reshape(magnitudes.shape[0], kv_heads, -1)
    if of_heads.numel() == 0:
        return of_heads.new_zeros(of_heads.shape[:2])
    found = of_heads.amax(-1)
    return found.amax().expand(found.shape) if recipe.scales == "tensor" else found


def token_factors(descale: Tensor, rows: Rows, block: int, heads: int) -> Tensor:
    """The factor of every token, (tokens, heads, 1); 1 for tokens of no sequence."""
    if descale.dim() == 2:
        index, factors = rows.sequence, descale
    else:
        index, _ = rows.blocks(block)
        factors = descale.transpose(1, 2).flatten(0, 1)
    factors = factors.repeat_interleave(heads // factors.shape[1], dim=1)
    return torch.cat((factors, factors.new_ones(1, heads)))[index][:, :, None]


def power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not below `x`; 1 for 0."""
    mantissa, exponent = torch.frexp(x)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(min=-126)
    return torch.where(x > 0, torch.ldexp(torch.ones_like(x), exponent), 1.0)


def keys_adjacent(v: Tensor) -> Tensor:
    """`v` (..., keys, heads, head_dim) with its keys adjacent in memory."""
    return keys_adjacent_like(v).copy_(v)


def keys_adjacent_like(v: Tensor) -> Tensor:
    """A float8 tensor of v's shape, keys adjacent in memory; nothing is in it yet."""
    *batch, N, heads, head_dim = v.shape
    rows = -(-N // ROW_STEP) * ROW_STEP
    memory = torch.empty(*batch, heads, head_dim, rows, dtype=E4M3, device=v.device)
    return memory[..., :N].movedim(-1, -3)


def dequantized(x: Tensor, descale: Tensor, rows: Rows, block: int, dtype: torch.dtype) -> Tensor:
    """Float8 `x` times its scales, in `dtype`."""
    tokens = x.float().reshape(-1, *x.shape[-2:])
    factors = token_factors(descale, rows, block, tokens.shape[1])
    return (tokens * factors).to(dtype).view(x.shape)
