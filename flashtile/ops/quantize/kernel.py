"""Quantise 16-bit tensors to float8 in one pass: rotary embedding, smoothing, Hadamard rotation,
scale, rounding.

One launch quantises q, k and v. A program loops over blocks of each tensor; a block consists of
rows of one head. With per-block scales one pass is enough; otherwise a first pass of the same
kernel computes the scales of the blocks. `formula.py` defines the results.

A block is a tuple of tiles with up to 64 columns. The Hadamard matrix of 64 n columns is the
Kronecker product of those of n and of 64: the tensor cores multiply each tile by the latter, and
additions in float32 multiply the tuple by the former. Without a rotation the matrix is the
identity, because a product reads prefetched tiles and transposes them at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...gpu.launch import Launch
from ...gpu.launch_cache import Tensors, run_all
from ...gpu.rows import Rows, rows_of

# Columns of a tile.
WIDTH = 64

# Warps on a multiprocessor (SM), and registers of a thread: together they fill its register file.
WARPS = 16
REGISTERS = 128

# Blocks of a tensor in shared memory: one in use and one on the way.
STAGES = 2


@dataclass(frozen=True)
class QuantizeConfig:
    """Compile-time parameters for one tensor."""

    ROWS: int
    DIM: int
    TILES: int
    WIDTH: int
    LEVELS: int  # the rotation mixes 2**LEVELS tiles
    UNIT: float  # factor of the matrix, whose stored entries are 0, 1 and -1
    IS_IDENTITY: bool  # the matrix is the identity
    IS_TRANSPOSED: bool  # rows of `out` are adjacent in memory
    HEADS: int
    GROUP: int  # heads that share one of the scales that are read
    ROW_STEP: int  # rows of `out` are padded to a multiple of this
    HALF: int  # pairs of features that rotary embedding rotates
    IS_INTERLEAVED: bool
    IS_MEASUREMENT: bool  # stores only scales, 0 for blocks of zeros
    HAS_SCALES: bool  # reads the scales, one for each group of heads, instead of computing them
    STAGES: int  # blocks of x in shared memory


class Job(NamedTuple):
    """The pointers for one tensor."""

    x: Rows  # (batch, rows, heads, dim), or packed
    out: Rows  # float8
    descale_ptr: Any  # (B, heads, blocks), or (B, heads / GROUP) to read
    matrix_ptr: Any  # (dim, dim)
    mean_ptr: Any  # (B, heads, dim)
    cos_ptr: Any  # (positions, HALF)
    sin_ptr: Any
    cu_seqlens_ptr: Any

    @classmethod
    def of(cls, x: Any, out: Any, *pointers: Tensor | None) -> Job:
        """The job of these tensors, in the order of the fields."""
        return cls(rows_of(x), rows_of(out), *pointers)


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
def larger(x, y):
    """The larger number; NaN if one of them is NaN."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(tiles):
    """The largest magnitude of all tiles; NaN if one is NaN."""
    COUNT: tl.constexpr = len(tiles)
    found = tl.abs(tiles[0])
    for n in tl.static_range(1, COUNT):
        found = larger(found, tl.abs(tiles[n]))
    return tl.reduce(found.reshape([found.numel], can_reorder=True), 0, larger)


@triton.jit
def where_finite(tile, other):
    """The tile with `other` in place of NaN and infinities."""
    return tl.where(tl.abs(tile) < float("inf"), tile, other)


@triton.jit
def mixed(tiles, LEVELS: tl.constexpr):
    """Every 2**LEVELS tiles times Sylvester's Hadamard matrix of that size."""
    COUNT: tl.constexpr = len(tiles)
    for level in tl.static_range(LEVELS):
        found = ()
        for n in tl.static_range(COUNT):
            if n >> level & 1:
                # For mypy a tuple has one length; this one grows, unrolled by the compiler.
                found += (tiles[n - (1 << level)] - tiles[n],)  # type: ignore[assignment]
            else:
                # For mypy a tuple has one length; this one grows, unrolled by the compiler.
                found += (tiles[n] + tiles[n + (1 << level)],)  # type: ignore[assignment]
        tiles = found
    return tiles


@triton.jit
def matrices_of(matrix_ptr, recipe: tl.constexpr):
    """A matrix (WIDTH, WIDTH) for each tile: the rows of its features, and the columns of the first
    tile that it is mixed with, where the signs of the mixing are all positive. With
    recipe.IS_TRANSPOSED, each matrix is transposed.
    """
    TILES: tl.constexpr = recipe.TILES
    WIDTH: tl.constexpr = recipe.WIDTH
    found = ()
    for n in tl.static_range(TILES):
        d = n * WIDTH + tl.arange(0, WIDTH)
        column = (n >> recipe.LEVELS << recipe.LEVELS) * WIDTH + tl.arange(0, WIDTH)
        real = (d < recipe.DIM)[:, None] & (column < recipe.DIM)[None, :]
        matrix = tl.load(
            matrix_ptr + d[:, None] * recipe.DIM + column[None, :], mask=real, other=0.0
        )
        if recipe.IS_TRANSPOSED:
            matrix = tl.trans(matrix)
        # For mypy a tuple has one length; this one grows, unrolled by the compiler.
        found += (matrix,)  # type: ignore[assignment]
    return found


@triton.jit
def places(NUMBER: tl.constexpr, IS_TRANSPOSED: tl.constexpr, recipe: tl.constexpr):
    """The rows and the features of tile NUMBER of a block, shaped such that they broadcast to
    (ROWS, WIDTH), or transposed.
    """
    rows = tl.arange(0, recipe.ROWS)
    d = NUMBER * recipe.WIDTH + tl.arange(0, recipe.WIDTH)
    if IS_TRANSPOSED:
        rows, d = rows[None, :], d[:, None]
    else:
        rows, d = rows[:, None], d[None, :]
    return rows, d


@triton.jit
def embedded(tile, x, base, rows, d, inside, angles, cos_ptr, sin_ptr, recipe: tl.constexpr):
    """Apply rotary embedding to the features `d` of the rows, by the angles of their positions."""
    HALF: tl.constexpr = recipe.HALF
    if recipe.IS_INTERLEAVED:
        partner, pair, first = d ^ 1, d // 2, d % 2 == 0
    else:
        partner, pair, first = tl.where(d < HALF, d + HALF, d - HALF), d % HALF, d < HALF
    known = inside & (d < 2 * HALF)
    other = tl.load(base + rows * x.row + partner * x.dim, mask=known, other=0.0)
    offs = angles * HALF + pair
    c = tl.load(cos_ptr + offs, mask=known, other=1.0).to(tl.float32)
    s = tl.load(sin_ptr + offs, mask=known, other=0.0).to(tl.float32)
    s = tl.where(first, -s, s)
    return tile.to(tl.float32) * c + other.to(tl.float32) * s


@triton.jit
def load_tile(
    job, base, block, count, head_index, NUMBER: tl.constexpr, IS_TRANSPOSED: tl.constexpr,
    recipe: tl.constexpr,
):  # fmt: skip
    """Tile NUMBER of a block, (ROWS, WIDTH) or transposed, after rotary embedding and smoothing."""
    x = job.x
    dtype: tl.constexpr = x.ptr.dtype.element_ty
    rows, d = places(NUMBER, IS_TRANSPOSED, recipe)
    rows = rows.to(tl.int64)
    inside = (rows < count) & (d < recipe.DIM)
    tile = tl.load(base + rows * x.row + d * x.dim, mask=inside, other=0.0)
    if recipe.HALF > 0:
        angles = block * recipe.ROWS + rows
        tables = job.cos_ptr, job.sin_ptr
        tile = embedded(tile, x, base, rows, d, inside, angles, *tables, recipe).to(dtype)
    if job.mean_ptr is not None:
        mean = tl.load(job.mean_ptr + head_index * recipe.DIM + d, mask=d < recipe.DIM)
        tile = tl.where(inside, tile.to(tl.float32) - mean, 0.0).to(dtype)
    return tile


@triton.jit
def load_tiles(job, base, block, count, head_index, recipe: tl.constexpr):
    """A block: TILES of (ROWS, WIDTH), or transposed."""
    TILES: tl.constexpr = recipe.TILES
    found = ()
    for n in tl.static_range(TILES):
        tile = load_tile(job, base, block, count, head_index, n, False, recipe)
        if recipe.IS_TRANSPOSED:
            tile = tl.trans(tile)
        # For mypy a tuple has one length; this one grows, unrolled by the compiler.
        found += (tile,)  # type: ignore[assignment]
    return found


@triton.jit
def rotated(tiles, matrices, recipe: tl.constexpr):
    """The tiles of a block times the matrix, in float32."""
    TILES: tl.constexpr = recipe.TILES
    found = ()
    for n in tl.static_range(TILES):
        if recipe.IS_TRANSPOSED:
            tile = tl.dot(matrices[n], tiles[n])
        else:
            tile = tl.dot(tiles[n], matrices[n])
        # For mypy a tuple has one length; this one grows, unrolled by the compiler.
        found += (tile,)  # type: ignore[assignment]
    return mixed(found, recipe.LEVELS)


@triton.jit
def exact_tile(
    job, tiles, base, block, count, head_index, NUMBER: tl.constexpr, recipe: tl.constexpr
):  # fmt: skip
    """`tiles[NUMBER]` of a block with NaN or infinities. Products with the identity would spread
    them over a row, so it is loaded again.
    """
    if recipe.IS_IDENTITY:
        # Not the prefetched tile's addresses transposed: they would stay in registers in every
        # block, for this rare case.
        tile = load_tile(
            job, base, block, count, head_index, NUMBER, recipe.IS_TRANSPOSED, recipe
        ).to(tl.float32)
    else:
        tile = tiles[NUMBER]
    return tile


@triton.jit
def store_tile(out, base, tile, count, NUMBER: tl.constexpr, recipe: tl.constexpr):
    """Round tile NUMBER of a block to float8 and store it."""
    STEP: tl.constexpr = recipe.ROW_STEP
    rows, d = places(NUMBER, recipe.IS_TRANSPOSED, recipe)
    # Where rows are adjacent, a mask that ends at any row would need single stores.
    inside = (rows // STEP < tl.cdiv(count, STEP)) & (d < recipe.DIM)
    offs = rows.to(tl.int64) * out.row + d * out.dim
    tl.store(base + offs, tile.to(tl.float8e4nv), mask=inside)


@triton.jit
def quantize_block(
    job, tiles, matrices, base, out_base, descale_ptr, block, count, head_index,
    recipe: tl.constexpr,
):  # fmt: skip
    """Quantise the loaded tiles of a block of `count` rows."""
    TILES: tl.constexpr = recipe.TILES
    out = job.out
    tiles = rotated(tiles, matrices, recipe)
    magnitude = largest(tiles)
    is_finite = magnitude < float("inf")
    if not is_finite:  # rare
        magnitude = 0.0
        for n in tl.static_range(TILES):
            tile = exact_tile(job, tiles, base, block, count, head_index, n, recipe)
            magnitude = tl.maximum(magnitude, largest((where_finite(tile, 0.0),)))
    if recipe.HAS_SCALES:
        scale = tl.load(descale_ptr)
        inverse = ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    else:
        magnitude = magnitude * recipe.UNIT
        scale, inverse = power_of_two(magnitude)
        if recipe.IS_MEASUREMENT:  # a block of zeros must not affect the shared scale
            scale = tl.where(magnitude > 0.0, scale, 0.0)
        tl.store(descale_ptr, scale)
    if not recipe.IS_MEASUREMENT:
        factor = inverse * recipe.UNIT
        if is_finite:
            for n in tl.static_range(TILES):
                store_tile(out, out_base, tiles[n] * factor, count, n, recipe)
        else:
            for n in tl.static_range(TILES):
                tile = exact_tile(job, tiles, base, block, count, head_index, n, recipe)
                tile = where_finite(tile, float("nan")) * factor
                store_tile(out, out_base, tile, count, n, recipe)


@triton.jit
def quantize_tensor(job, first, B, M, total, recipe: tl.constexpr):
    """Quantise this program's blocks of a tensor, from block `first`; return its first block of the
    next tensor.
    """
    HEADS: tl.constexpr = recipe.HEADS
    x, out = job.x, job.out
    programs = tl.num_programs(0)
    blocks = tl.cdiv(M, recipe.ROWS)
    matrices = matrices_of(job.matrix_ptr, recipe)
    for index in tl.range(first, B * HEADS * blocks, programs, num_stages=recipe.STAGES):
        head = index % HEADS
        block = index // HEADS % blocks
        b = index // HEADS // blocks
        start, count = b * 0, M
        batch = b.to(tl.int64)
        if job.cu_seqlens_ptr is not None:
            start = tl.load(job.cu_seqlens_ptr + b).to(tl.int32)
            stop = tl.minimum(tl.load(job.cu_seqlens_ptr + b + 1).to(tl.int32), total)
            start = tl.minimum(tl.maximum(start, 0), total)
            count = tl.minimum(stop - start, M)
            batch = batch * 0
        row = start.to(tl.int64) + block * recipe.ROWS
        count -= block * recipe.ROWS
        head_index = b * HEADS + head
        base = x.ptr + (batch * x.batch + row * x.row + head * x.head)
        tiles = load_tiles(job, base, block, count, head_index, recipe)
        descale_ptr = job.descale_ptr
        if recipe.HAS_SCALES:
            descale_ptr += b * (HEADS // recipe.GROUP) + head // recipe.GROUP
        else:
            descale_ptr += head_index.to(tl.int64) * blocks + block
        out_base = out.ptr + (batch * out.batch + row * out.row + head * out.head)
        # Only packed batches have blocks without rows. All blocks are computed in a branch, because
        # then the compiler issues the next block's loads before the branch, not after the product.
        if count > 0:
            quantize_block(
                job, tiles, matrices, base, out_base, descale_ptr, block, count, head_index, recipe
            )
        elif not recipe.HAS_SCALES:
            tl.store(descale_ptr, 0.0 if recipe.IS_MEASUREMENT else 1.0)
    return (first + programs - B * HEADS * blocks % programs) % programs


@triton.jit(do_not_specialize=["B", "M", "N", "total_q", "total_k"])
def quantize_kernel(
    q, k, v, B, M, N, total_q, total_k, RECIPE_Q: tl.constexpr, RECIPE_K: tl.constexpr,
    RECIPE_V: tl.constexpr,
):  # fmt: skip
    """Quantise q, k and v: compute their scales, or read them, or compute only the scales. q comes
    last, because its blocks are the smallest.
    """
    first = tl.program_id(0)
    first = quantize_tensor(k, first, B, N, total_k, RECIPE_K)
    first = quantize_tensor(v, first, B, N, total_k, RECIPE_V)
    quantize_tensor(q, first, B, M, total_q, RECIPE_Q)


def quantize_launch(
    jobs: Sequence[Job],
    recipes: Sequence[QuantizeConfig],
    *,
    B: int,
    M: int,
    N: int,
    total_q: int,
    total_k: int,
    multiprocessors: int,
) -> Launch:
    """Quantise q, k and v, of at most M and N rows in each of B sequences; packed, of `total_q` and
    `total_k` rows.
    """
    warps = warps_of(recipes)
    arguments: dict[str, Any] = {
        **dict(zip("qkv", jobs, strict=True)),
        "B": B,
        "M": M,
        "N": N,
        "total_q": total_q,
        "total_k": total_k,
        **{f"RECIPE_{name}": recipe for name, recipe in zip("QKV", recipes, strict=True)},
    }
    blocks = sum(x.HEADS * -(-n // x.ROWS) for x, n in zip(recipes, (M, N, N), strict=True))
    programs = min(multiprocessors * (WARPS // warps), B * blocks)
    return Launch(quantize_kernel, (programs,), arguments, warps, registers=REGISTERS)


def quantize(
    tensors: Sequence[Tensors],
    recipes_of: Callable[[], Sequence[QuantizeConfig]],
    call: Any,
    sizes: dict[str, int],
) -> None:
    """Launch `quantize_launch`.

    Args:
        tensors: of the jobs of q, k and v, in the order of the fields.
        recipes_of: returns the recipes, for this call and for those like it.
        call: hashable; together with the tensors' metadata, it determines the recipes.
        sizes: the named arguments.
    """

    def describe(given: Tensors, made: Tensors) -> list[Launch]:
        count = len(Job._fields)
        jobs = [Job.of(*given[start : start + count]) for start in range(0, len(given), count)]
        return [quantize_launch(jobs, recipes_of(), **sizes)]

    given = tuple(x for each in tensors for x in each)
    run_all("quantize", (call, *sizes.values()), given, (), describe)


def warps_of(recipes: Sequence[QuantizeConfig]) -> int:
    """Warps such that a thread holds at most 64 numbers of a block."""
    largest = max(x.ROWS * x.TILES * x.WIDTH for x in recipes)
    return min(max(triton.next_power_of_2(largest) // (32 * 64), 4), WARPS)
