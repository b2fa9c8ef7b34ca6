"""Quantise q, k and v to float8: with a kernel on Hopper, elsewhere with the formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...autocast import without_autocast
from ...gpu.hardware import TRITON_IS_INSTALLED, capability, multiprocessors
from ...lru import memoised
from ...problem import FLOAT8_KEY_BLOCK, FLOAT8_QUERY_BLOCK
from .. import rotary as rotary_op
from . import formula
from .formula import (
    E4M3,
    ROW_STEP,
    Quantized,
    Recipe,
    Rows,
    keys_adjacent_like,
    means_of,
    rotation,
    shared,
)

# The quantising kernel runs on the GPUs that have a kernel for float8 attention.
CAPABILITY = (9, 0)
DTYPES = (torch.float16, torch.bfloat16)

# The matrices, by the arguments of `signs`, that CUDA graphs read. A graph does not keep alive what
# was allocated before its capture.
_matrices_of_graphs: dict[tuple[Any, ...], Tensor] = {}


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
    return capability(q.device) == CAPABILITY


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
    q8, k8 = (torch.empty(x.shape, dtype=E4M3, device=x.device) for x in (q, k))
    v8 = keys_adjacent_like(v)
    q_descale, k_descale, v_descale = _quantize(
        (
            Given(q, q8, rows_q, FLOAT8_QUERY_BLOCK, recipe.hadamard, rotary),
            Given(k, k8, rows_k, FLOAT8_KEY_BLOCK, recipe.hadamard, rotary, k_mean),
            Given(v, v8, rows_k, FLOAT8_KEY_BLOCK, recipe.hadamard_v),
        ),
        recipe,
        **launch,
    )
    return Quantized(q8, k8, v8, q_descale, k_descale, v_descale, k_mean)


class Given(NamedTuple):
    """A tensor to quantise."""

    x: Tensor
    out: Tensor
    rows: Rows
    block: int
    rotates: bool
    rotary: Rotary | None = None
    mean: Tensor | None = None


def _quantize(given: tuple[Given, Given, Given], recipe: Recipe, **launch: Any) -> Any:
    """Quantise q, k and v, and return the three scales."""
    from . import kernel

    q, k, _ = given
    sizes: dict[str, Any] = {
        "B": q.rows.B,
        "M": q.rows.longest,
        "N": k.rows.longest,
        "total_q": q.x.shape[0],
        "total_k": k.x.shape[0],
        "multiprocessors": launch.get("multiprocessors") or multiprocessors(q.x.device),
    }
    kv_heads = k.x.shape[-2]
    is_interleaved = q.rotary is not None and q.rotary.interleaved

    def launch_with(descales: list[Tensor], is_second_pass: bool = False) -> None:
        def configs() -> list[Any]:
            found = [config_of(x, kv_heads, recipe) for x in given]
            if not is_second_pass:
                return found
            return [replace(x, IS_MEASUREMENT=False, HAS_SCALES=True) for x in found]

        tensors = [tensors_of(x, y, recipe) for x, y in zip(given, descales, strict=True)]
        kernel.quantize(tensors, configs, (recipe, is_interleaved, is_second_pass), sizes)

    descales = [_scales_of_blocks(x) for x in given]
    launch_with(descales)
    if recipe.scales == "block":
        return descales
    # The first pass stored a scale for each block; the largest one fits all blocks.
    descales = [shared(x, recipe, kv_heads) for x in descales]
    descales = [torch.where(x > 0, x, 1.0) for x in descales]
    launch_with(descales, is_second_pass=True)
    return descales


def _scales_of_blocks(given: Given) -> Tensor:
    """Uninitialised, (B, heads, blocks)."""
    shape = given.rows.B, given.x.shape[-2], -(-given.rows.longest // given.block)
    return torch.empty(shape, dtype=torch.float32, device=given.x.device)


def config_of(given: Given, kv_heads: int, recipe: Recipe) -> Any:
    """The `QuantizeConfig` of the first pass."""
    from . import kernel

    heads, dim = given.x.shape[-2:]
    power = dim & -dim
    width = min(max(16, 1 << (dim - 1).bit_length()), kernel.WIDTH)
    is_padded = given.out.stride(-1) != 1 and given.rows.cu_seqlens is None
    rotary = given.rotary
    return kernel.QuantizeConfig(
        ROWS=given.block,
        DIM=dim,
        WIDTH=width,
        TILES=-(-dim // width),
        LEVELS=max(power // width, 1).bit_length() - 1 if given.rotates else 0,
        UNIT=power**-0.5 if given.rotates else 1.0,
        IS_IDENTITY=not given.rotates,
        IS_TRANSPOSED=given.out.stride(-1) != 1,
        HEADS=heads,
        GROUP=heads // kv_heads,
        ROW_STEP=ROW_STEP if is_padded else 1,
        HALF=0 if rotary is None else rotary.cos.shape[1],
        IS_INTERLEAVED=rotary is not None and rotary.interleaved,
        IS_MEASUREMENT=recipe.scales != "block",
        HAS_SCALES=False,
        # Rotary embedding reads too much to prefetch.
        STAGES=kernel.STAGES if rotary is None else 1,
    )


def tensors_of(given: Given, descale: Tensor, recipe: Recipe) -> tuple[Tensor | None, ...]:
    """What the `Job` of a tensor is made of."""
    cos, sin = (None, None) if given.rotary is None else (given.rotary.cos, given.rotary.sin)
    matrix = matrix_of(given, recipe)
    return given.x, given.out, descale, matrix, given.mean, cos, sin, given.rows.cu_seqlens


def matrix_of(given: Given, recipe: Recipe) -> Tensor:
    """What x is multiplied by, up to a factor; see `signs`."""
    x = given.x
    wanted = x.shape[-1], recipe.seed if given.rotates else None, x.dtype, x.device
    matrix = signs(*wanted)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        _matrices_of_graphs[wanted] = matrix
    return matrix


@memoised(32)
def signs(dim: int, seed: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`rotation` times the square root of the size of its blocks, with entries 0, 1 and -1; the
    identity without a seed.
    """
    if seed is None:
        return torch.eye(dim, dtype=dtype, device=device)
    return (rotation(dim, seed) * (dim & -dim) ** 0.5).round().to(device, dtype)
