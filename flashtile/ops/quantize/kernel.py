"""Quantise 16-bit tensors to float8 in one pass: rotary embedding, smoothing, Hadamard rotation,
scale, rounding.

A program loops over blocks of one tensor; a block consists of rows of one head. With per-block
scales one pass is enough; otherwise a first pass of the same kernel computes the scales of the
blocks. `formula.py` defines the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...gpu.launch import Launch, run
from ...gpu.rows import rows_of

# Programs that share a multiprocessor (SM).
PROGRAMS = 4


@dataclass(frozen=True)
class QuantizeConfig:
    """Compile-time parameters of the kernel."""

    ROWS: int
    DIM: int
    BLOCK_D: int
    UNIT: float  # of the matrix, whose entries are stored as 0 and plus or minus 1
    ROW_STEP: int  # rows of `out` are adjacent in memory, padded to a multiple of this; else 1
    HALF: int  # pairs of features that rotary embedding rotates
    IS_INTERLEAVED: bool
    IS_MEASUREMENT: bool  # stores only scales, 0 for blocks of zeros
    HAS_SCALES: bool  # reads the scales, one for each group of heads, instead of computing them


@triton.jit
def power_of_two(magnitude):
    """(scale, 1 / scale), where scale is the smallest power of two such that scale times 448
    (1.75 * 2**8, e4m3's largest number) is at least `magnitude`; 1 for 0.
    """
    # Adding less than a quarter of a binade carries into the exponent above 1.75.
    exponent = ((magnitude.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    exponent = tl.where(magnitude > 0.0, tl.maximum(exponent, 1), 127)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return scale, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def largest_finite(tile):
    """The largest finite magnitude of a tile."""
    magnitudes = tl.abs(tile)
    return tl.max(tl.max(tl.where(magnitudes < float("inf"), magnitudes, 0.0), 1), 0)


@triton.jit
def rotated(x, tile, base, rows, inside, cos_ptr, sin_ptr, recipe: tl.constexpr):
    """Apply rotary embedding to the tile, by the angles of its rows."""
    HALF: tl.constexpr = recipe.HALF
    d = tl.arange(0, recipe.BLOCK_D)
    if recipe.IS_INTERLEAVED:
        partner, pair, first = d ^ 1, d // 2, d % 2 == 0
    else:
        partner, pair, first = tl.where(d < HALF, d + HALF, d - HALF), d % HALF, d < HALF
    moves = d < 2 * HALF
    known = inside & moves[None, :]
    other = tl.load(base + rows[:, None] * x.row + partner[None, :] * x.dim, mask=known, other=0.0)
    offs = rows[:, None] * HALF + pair[None, :]
    c = tl.load(cos_ptr + offs, mask=known, other=1.0).to(tl.float32)
    s = tl.load(sin_ptr + offs, mask=known, other=0.0).to(tl.float32)
    s = tl.where(first[None, :], -s, s)
    return tile.to(tl.float32) * c + other.to(tl.float32) * s


@triton.jit(do_not_specialize=["M", "total", "tiles"])
def quantize_kernel(
    x, out, descale_ptr, matrix_ptr, mean_ptr, cos_ptr, sin_ptr, cu_seqlens_ptr, M, total, tiles,
    HEADS: tl.constexpr, GROUP: tl.constexpr, recipe: tl.constexpr,
):  # fmt: skip
    """Store blocks of `x` in float8 and their scales (B, heads, blocks), or use given scales (B,
    heads / GROUP).
    """
    dtype: tl.constexpr = x.ptr.dtype.element_ty
    ROWS: tl.constexpr = recipe.ROWS
    d = tl.arange(0, recipe.BLOCK_D)
    blocks = tl.cdiv(M, ROWS)
    if matrix_ptr is not None:
        # (BLOCK_D, BLOCK_D)
        real = (d[:, None] < recipe.DIM) & (d[None, :] < recipe.DIM)
        hadamard = tl.load(matrix_ptr + d[:, None] * recipe.DIM + d[None, :], mask=real, other=0.0)
    for index in range(tl.program_id(0), tiles, tl.num_programs(0)):
        head = index % HEADS
        block = index // HEADS % blocks
        b = index // HEADS // blocks
        start, count = b * 0, M
        batch = b.to(tl.int64)
        if cu_seqlens_ptr is not None:
            start = tl.load(cu_seqlens_ptr + b).to(tl.int32)
            stop = tl.minimum(tl.load(cu_seqlens_ptr + b + 1).to(tl.int32), total)
            start = tl.minimum(tl.maximum(start, 0), total)
            count = tl.minimum(stop - start, M)
            batch = batch * 0
        rows = block * ROWS + tl.arange(0, ROWS)
        inside = (rows < count)[:, None] & (d < recipe.DIM)[None, :]
        offset = batch * x.batch + start.to(tl.int64) * x.row + head * x.head
        base = x.ptr + offset
        rows = rows.to(tl.int64)
        # (ROWS, BLOCK_D)
        tile = tl.load(base + rows[:, None] * x.row + d[None, :] * x.dim, mask=inside, other=0.0)
        if recipe.HALF > 0:
            tile = rotated(x, tile, base, rows, inside, cos_ptr, sin_ptr, recipe).to(dtype)
        if mean_ptr is not None:
            taken = tl.load(mean_ptr + (b * HEADS + head) * recipe.DIM + d, mask=d < recipe.DIM)
            tile = tl.where(inside, tile.to(tl.float32) - taken[None, :], 0.0).to(dtype)
        if matrix_ptr is not None:
            tile = tl.dot(tile, hadamard)
        tile = tile.to(tl.float32)
        scale_index = (b * HEADS + head).to(tl.int64) * blocks + block
        if recipe.HAS_SCALES:
            scale = tl.load(descale_ptr + b * (HEADS // GROUP) + head // GROUP)
            inverse = ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        else:
            magnitude = largest_finite(tile) * recipe.UNIT
            scale, inverse = power_of_two(magnitude)
            if recipe.IS_MEASUREMENT:  # a block of zeros must not affect the shared scale
                scale = tl.where(magnitude > 0.0, scale, 0.0)
            tl.store(descale_ptr + scale_index, scale)
        if not recipe.IS_MEASUREMENT:
            # Adding tile * 0 makes infinities NaN and leaves finite numbers unchanged.
            small = (tile * (inverse * recipe.UNIT) + tile * 0.0).to(tl.float8e4nv)
            offset = batch * out.batch + start.to(tl.int64) * out.row + head * out.head
            offs = rows[:, None] * out.row + d[None, :] * out.dim
            if recipe.ROW_STEP > 1:
                # Rows are adjacent, so a mask that ends at any row would need single stores.
                step = block * (ROWS // recipe.ROW_STEP) + tl.arange(0, ROWS) // recipe.ROW_STEP
                kept = step < tl.cdiv(count, recipe.ROW_STEP)
                inside = kept[:, None] & (d < recipe.DIM)[None, :]
            tl.store(out.ptr + offset + offs, small, mask=inside)


def quantize_launch(
    x: Tensor,
    out: Tensor,
    descale: Tensor,
    recipe: QuantizeConfig,
    *,
    matrix: Tensor | None,
    mean: Tensor | None,
    rotary: tuple[Tensor, Tensor] | tuple[None, None],
    cu_seqlens: Tensor | None,
    longest: int,
    group: int,
    programs: int,
) -> Launch:
    """Quantise `x` (batch, rows, heads, dim), or packed, into the float8 tensor `out`."""
    B = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    heads = x.shape[-2]
    tiles = B * heads * -(-longest // recipe.ROWS)
    arguments: dict[str, Any] = {
        "x": rows_of(x),
        "out": rows_of(out),
        "descale_ptr": descale,
        "matrix_ptr": matrix,
        "mean_ptr": mean,
        "cos_ptr": rotary[0],
        "sin_ptr": rotary[1],
        "cu_seqlens_ptr": cu_seqlens,
        "M": longest,
        "total": x.shape[0],
        "tiles": tiles,
        "HEADS": heads,
        "GROUP": group,
        "recipe": recipe,
    }
    # 32 numbers per thread, so that several programs fit on an SM and hide memory latency.
    size = recipe.ROWS * recipe.BLOCK_D
    warps = min(max(size // 1024, 4), 16)
    # Prefetch tiles if shared memory also holds the matrix: two where one program fills an SM.
    stages = 1
    if recipe.BLOCK_D <= 128 and recipe.HALF == 0:
        stages = 3 if size >= 128 * 128 else 2
    return Launch(quantize_kernel, (min(programs, tiles),), arguments, warps, stages)


def quantize(x: Tensor, *arguments: Any, **named: Any) -> None:
    """Launch on the device of `x`."""
    if "programs" not in named:
        properties = torch.cuda.get_device_properties(x.device)
        named["programs"] = PROGRAMS * properties.multi_processor_count
    run([quantize_launch(x, *arguments, **named)], x)
