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
been summed before in float32: what is lost does not grow with the number of tiles. Where all terms
have one sign, losses do not cancel. Those of P V and dO V^T matter most, because dS is the small
difference of dP = dO V^T and delta = rowsum(dO * O). So these two are summed in halves, and so is
Q K^T above head dim 64.

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
def product(x, y, cfg: tl.constexpr):
    """x y^T of two operands, in float32."""
    if cfg.IS_BF16X6:
        found = sum_of_columns(x, y, 64)
    else:
        found = tl.dot(x, tl.trans(y), input_precision="ieee")
    return found


@triton.jit
def product_in_halves(x, y, cfg: tl.constexpr):
    """`product`, but parts are summed in two halves."""
    if cfg.IS_BF16X6:
        found = sum_of_columns(x, y, 16)
    else:
        found = tl.dot(x, tl.trans(y), input_precision="ieee")
    return found


@triton.jit
def add_product(acc, x, y, cfg: tl.constexpr):
    """`acc` (float32) and x y of two operands."""
    if cfg.IS_BF16X6:
        acc += tl.dot(x[0], y[0], small_terms(x, y))
    else:
        acc = tl.dot(x, y, acc, input_precision="ieee")
    return acc


@triton.jit
def add_product_in_halves(acc, x, y, cfg: tl.constexpr):
    """`add_product`, but parts are summed in two halves."""
    if cfg.IS_BF16X6:
        acc += sum_of_columns(x, transposed(y), 16)
    else:
        acc = tl.dot(x, y, acc, input_precision="ieee")
    return acc


@triton.jit
def transposed(x):
    """The transpose of an operand in parts."""
    return tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2])


@triton.jit
def sum_of_columns(x, y, LONGEST: tl.constexpr):
    """x y^T of two operands in parts. Of more than LONGEST columns (at least 16, which a tensor
    core sums), it is a sum over even columns and one over odd columns.
    """
    small = small_terms(x, transposed(y))
    if x[0].shape[1] > LONGEST:
        even_x, odd_x = even_and_odd(x[0])
        even_y, odd_y = even_and_odd(y[0])
        found = tl.dot(even_x, tl.trans(even_y), small) + tl.dot(odd_x, tl.trans(odd_y))
    else:
        found = tl.dot(x[0], tl.trans(y[0]), small)
    return found


@triton.jit
def even_and_odd(x):
    """The even columns and the odd columns."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def small_terms(x, y):
    """The terms of x y beside the product of the first parts, the smallest first.

    They are NaN next to an infinity, which only the first parts represent, and then left out.
    """
    small = tl.dot(x[2], y[0])
    small = tl.dot(x[0], y[2], small)
    small = tl.dot(x[1], y[1], small)
    small = tl.dot(x[1], y[0], small)
    small = tl.dot(x[0], y[1], small)
    return tl.where(small == small, small, 0.0)
