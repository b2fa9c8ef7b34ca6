"""`quantize_qkv` by one kernel launch a tensor: 16 bits on a GPU that has float8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..call.layouts import Packed
from ..gpu.hardware import TRITON_IS_INSTALLED
from ..lru import memoised
from ..problem import FLOAT8_KEY_BLOCK, FLOAT8_QUERY_BLOCK
from .rotation import rotation
from .rows import Rows
from .tensors import (
    E4M3,
    ROW_STEP,
    Quantized,
    Recipe,
    Rotary,
    keys_adjacent_like,
    means_of,
    rows_of,
    shared,
)

# Where the attention kernel is, too. Elsewhere the formula runs, operation by operation.
CAPABILITY = (9, 0)
DTYPES = (torch.float16, torch.bfloat16)


def runs_as_kernel(q: Tensor) -> bool:
    """Whether the kernel can quantise tensors like `q` here and now."""
    if not q.is_cuda or q.dtype not in DTYPES or not TRITON_IS_INSTALLED:
        return False
    if torch.compiler.is_compiling():
        return False
    return torch.cuda.get_device_capability(q.device) == CAPABILITY


def quantized_on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Recipe,
    layout: Packed | None,
    rotary: Rotary | None,
    **launch: Any,
) -> Quantized:
    """As `tensors.quantized`."""
    rows_q, rows_k = rows_of(q, k, layout)
    cu_q, cu_k = (None, None) if layout is None else (layout.cu_seqlens_q, layout.cu_seqlens_k)
    k_mean = None
    if recipe.centre_k:
        if rotary is not None:
            q, k, rotary = rotary.turn(q, rows_q, cu_q), rotary.turn(k, rows_k, cu_k), None
        k_mean = means_of(k.float(), rows_k)
    kv_heads = k.shape[-2]

    def one(x: Tensor, out: Tensor, rows: Rows, cu_seqlens: Tensor | None, **how: Any) -> Tensor:
        block = FLOAT8_QUERY_BLOCK if x is q else FLOAT8_KEY_BLOCK
        named = launch | {"cu_seqlens": cu_seqlens, "longest": rows.longest} | how
        return _quantize(x, out, block, rows, kv_heads, recipe, named)

    q8, k8 = (torch.empty(x.shape, dtype=E4M3, device=x.device) for x in (q, k))
    v8 = keys_adjacent_like(v)
    turned = {"rotates": recipe.rotate, "rotary": rotary}
    q_descale = one(q, q8, rows_q, cu_q, **turned)
    k_descale = one(k, k8, rows_k, cu_k, **turned, mean=k_mean)
    v_descale = one(v, v8, rows_k, cu_k, rotates=recipe.rotate_v)
    return Quantized(q8, k8, v8, q_descale, k_descale, v_descale, k_mean)


def _quantize(
    x: Tensor, out: Tensor, block: int, rows: Rows, kv_heads: int, recipe: Recipe, how: Any
) -> Tensor:
    """Fill `out`; the scales."""
    from ..ops.quantize import kernel as quantize

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
    compiled = quantize.Recipe(
        ROWS=block,
        DIM=dim,
        BLOCK_D=max(16, 1 << (dim - 1).bit_length()),
        UNIT=unit,
        ROW_STEP=ROW_STEP if out.stride(-1) != 1 and how["cu_seqlens"] is None else 1,
        HALF=0 if rotary is None else rotary.cos.shape[1],
        IS_INTERLEAVED=rotary is not None and rotary.interleaved,
        MEASURES=recipe.scales != "block",
        HAS_SCALES=False,
    )
    shape = rows.B, heads, -(-rows.longest // block)
    found = torch.empty(shape, dtype=torch.float32, device=x.device)
    quantize.quantize(x, out, found, compiled, **named)
    if recipe.scales == "block":
        return found
    # The largest scale is that of the largest magnitude.
    descale = shared(found, recipe, kv_heads)
    descale = torch.where(descale > 0, descale, 1.0)
    again = replace(compiled, MEASURES=False, HAS_SCALES=True)
    quantize.quantize(x, out, descale, again, **named)
    return descale


@memoised(32)
def signs(dim: int, seed: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, float]:
    """`rotation` as a matrix of 0 and plus or minus 1, and the number that it is to be multiplied
    with."""
    unit = (dim & -dim) ** -0.5
    return (rotation(dim, seed) / unit).round().to(device, dtype), unit
