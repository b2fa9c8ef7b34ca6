"""Products of tiles in float32, on tensor cores that multiply 16 bits.

A float32 number is exactly the sum of three bfloat16 numbers, x = x0 + x1 + x2: its first 8 bits,
the next 8, and what is left. Six of the nine products of the parts are enough (Henry, Tang and
Heinecke 2019, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
computations"):

    x y = x0 y0 + (x0 y1 + x1 y0) + (x0 y2 + x1 y1 + x2 y0) + ...

The three that are left out are below 2^-22 |x y|, of random sign because x1 and x2 are rounded to
nearest, and 2^-26 |x y| on average. Three products in TF32 cost as much, but leave out 2^-22 |x y|,
cannot be read transposed from shared memory, and are summed in shorter steps.

Tensor cores truncate every partial sum. So each product starts from zero, and is added to what has
been summed before in float32: what is lost does not grow with the number of tiles.

An operand is a tile, or its three parts where `cfg.IS_BF16X6`: `plan.is_bf16x6` says when.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.intrinsics import IS_INTERPRETED


@triton.jit
def operand(tile, cfg: tl.constexpr):
    """What `product` multiplies: the tile, or its parts."""
    if cfg.IS_BF16X6:
        found = parts(tile)
    else:
        found = tile
    return found


@triton.jit
def parts(tile):
    """The three bfloat16 numbers that add up to each float32 number.

    The first is cut off rather than rounded, so that a large finite number has no infinite part.
    """
    if IS_INTERPRETED:
        first = first_bits(tile, 0)
        second = first_bits(tile - first, 0x8000)
        third = tile - first - second
    else:  # Triton would convert the numbers one by one, which takes four times as long
        first, second, third = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, low, high;
            cvt.rz.bf16x2.f32 $0, $4, $3;
            shl.b32 low, $0, 16;
            and.b32 high, $0, 0xffff0000;
            sub.f32 a, $3, low;
            sub.f32 b, $4, high;
            cvt.rn.bf16x2.f32 $1, b, a;
            shl.b32 low, $1, 16;
            and.b32 high, $1, 0xffff0000;
            sub.f32 a, a, low;
            sub.f32 b, b, high;
            cvt.rn.bf16x2.f32 $2, b, a;
            }""",
            "=r,=r,=r,r,r", [tile], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=2,
        )  # fmt: skip
    return first, second, third


@triton.jit
def first_bits(x, ADDED: tl.constexpr):
    """Numbers that bfloat16 represents, as float32, because the interpreter multiplies only that.

    ADDED to the bits: 0 to cut off, 0x8000 to round to nearest.
    """
    return ((x.to(tl.int32, bitcast=True) + ADDED) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def transposed(x, cfg: tl.constexpr):
    """An operand's transpose."""
    if cfg.IS_BF16X6:
        found = tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2])
    else:
        found = tl.trans(x)
    return found


@triton.jit
def product(x, y, cfg: tl.constexpr):
    """The product of two operands, in float32."""
    if cfg.IS_BF16X6:
        found = product_of_parts(x, y)
    else:
        found = tl.dot(x, y, input_precision="ieee")
    return found


@triton.jit
def add_product(acc, x, y, cfg: tl.constexpr):
    """`acc` (float32) and the product of two operands."""
    if cfg.IS_BF16X6:
        acc += product_of_parts(x, y)
    else:
        acc = tl.dot(x, y, acc, input_precision="ieee")
    return acc


@triton.jit
def product_of_parts(x, y):
    """The product of two operands in parts, the small terms first.

    They are NaN next to an infinity, which only the first parts represent, and then left out.
    """
    small = tl.dot(x[2], y[0])
    small = tl.dot(x[0], y[2], small)
    small = tl.dot(x[1], y[1], small)
    small = tl.dot(x[1], y[0], small)
    small = tl.dot(x[0], y[1], small)
    small = tl.where(small == small, small, 0.0)
    return tl.dot(x[0], y[0], small)
