"""Quantise q, k and v to float8: with a kernel on Hopper, elsewhere with the formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...autocast import without_autocast
from ...gpu.hardware import TRITON_IS_INSTALLED
from ...lru import memoised
from ...problem import FLOAT8_KEY_BLOCK, FLOAT8_QUERY_BLOCK
from ..rotary import op as rotary_op
from . import formula
from .formula import E4M3, ROW_STEP, Quantized, Recipe, keys_adjacent_like, means_of, shared
from .hadamard import rotation
from .rows import Rows

# The quantising kernel runs on the GPUs that have a kernel for float8 attention.
CAPABILITY = (9, 0)
DTYPES = (torch.float16, torch.bfloat16)


class Rotary(NamedTuple):
    """Rotary embedding of q and k before they are quantised."""

    cos: Any  # (positions, pairs)
    sin: Any
    interleaved: bool

    def rotate(self, x: Tensor, rows: Rows) -> Tensor:
        """Rotate each row of `x` by the angles of its position in its sequence."""
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        return rotary_op.rotate(x, rotary_op.Angles(cos, sin, 0, rows.cu_seqlens), self.interleaved)


@without_autocast
def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Recipe,
    rows_q: Rows,
    rows_k: Rows,
    rotary: Rotary | None = None,
) -> Quantized:
    """`flashtile.quantize_qkv` for checked arguments."""
    if runs_as_kernel(q):
        return quantize_on_gpu(q, k, v, recipe, rows_q, rows_k, rotary)
    if rotary is not None:
        q, k = rotary.rotate(q, rows_q), rotary.rotate(k, rows_k)
    return formula.quantize(q, k, v, recipe, rows_q, rows_k)


def runs_as_kernel(q: Tensor) -> bool:
    """Whether the kernel can quantise tensors like `q` in this context."""
    if not q.is_cuda or q.dtype not in DTYPES or not TRITON_IS_INSTALLED:
        return False
    if torch.compiler.is_compiling():
        return False
    return torch.cuda.get_device_capability(q.device) == CAPABILITY


def quantize_on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Recipe,
    rows_q: Rows,
    rows_k: Rows,
    rotary: Rotary | None,
    **launch: Any,
) -> Quantized:
    """`quantize` with the kernel; `launch` holds further arguments of `kernel.quantize`."""
    k_mean = None
    if recipe.smooth_k:
        if rotary is not None:
            q, k, rotary = rotary.rotate(q, rows_q), rotary.rotate(k, rows_k), None
        k_mean = means_of(k.float(), rows_k)
    kv_heads = k.shape[-2]

    def one(x: Tensor, out: Tensor, rows: Rows, **how: Any) -> Tensor:
        block = FLOAT8_QUERY_BLOCK if x is q else FLOAT8_KEY_BLOCK
        named = launch | {"cu_seqlens": rows.cu_seqlens, "longest": rows.longest} | how
        return _quantize(x, out, block, rows, kv_heads, recipe, named)

    q8, k8 = (torch.empty(x.shape, dtype=E4M3, device=x.device) for x in (q, k))
    v8 = keys_adjacent_like(v)
    how = {"rotates": recipe.hadamard, "rotary": rotary}
    q_descale = one(q, q8, rows_q, **how)
    k_descale = one(k, k8, rows_k, **how, mean=k_mean)
    v_descale = one(v, v8, rows_k, rotates=recipe.hadamard_v)
    return Quantized(q8, k8, v8, q_descale, k_descale, v_descale, k_mean)


def _quantize(
    x: Tensor, out: Tensor, block: int, rows: Rows, kv_heads: int, recipe: Recipe, how: Any
) -> Tensor:
    """Quantise `x` into `out` and return the scales."""
    from . import kernel

    heads, dim = x.shape[-2:]
    rotates, rotary = how.pop("rotates"), how.pop("rotary", None)
    matrix, unit = signs(dim, recipe.seed, x.dtype, x.device) if rotates else (None, 1.0)
    named = {
        "matrix": matrix,
        "mean": how.pop("mean", None),
        "rotary": (None, None) if rotary is None else (rotary.cos, rotary.sin),
        "group": heads // kv_heads,
        **how,
    }
    config = kernel.QuantizeConfig(
        ROWS=block,
        DIM=dim,
        BLOCK_D=max(16, 1 << (dim - 1).bit_length()),
        UNIT=unit,
        ROW_STEP=ROW_STEP if out.stride(-1) != 1 and how["cu_seqlens"] is None else 1,
        HALF=0 if rotary is None else rotary.cos.shape[1],
        IS_INTERLEAVED=rotary is not None and rotary.interleaved,
        IS_MEASUREMENT=recipe.scales != "block",
        HAS_SCALES=False,
    )
    shape = rows.B, heads, -(-rows.longest // block)
    found = torch.empty(shape, dtype=torch.float32, device=x.device)
    kernel.quantize(x, out, found, config, **named)
    if recipe.scales == "block":
        return found
    # The first pass stored a scale for each block; the largest one fits all blocks.
    descale = shared(found, recipe, kv_heads)
    descale = torch.where(descale > 0, descale, 1.0)
    again = replace(config, IS_MEASUREMENT=False, HAS_SCALES=True)
    kernel.quantize(x, out, descale, again, **named)
    return descale


@memoised(32)
def signs(dim: int, seed: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, float]:
    """`rotation` as a matrix with entries 0, 1 and -1, and the factor to multiply it by."""
    unit = (dim & -dim) ** -0.5
    return (rotation(dim, seed) / unit).round().to(device, dtype), unit
