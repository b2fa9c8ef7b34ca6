"""Products of tiles in float32, on tensor cores.

`cfg.PRECISION` says how (`plan.precision`):

- "ieee": fused multiply-adds, without tensor cores. Tiles of 16 bits, too: tensor cores multiply
  them exactly.
- "tf32": one product of numbers that are rounded to 11 bits.
- "bf16x6": six products, which together are about as exact as float32.

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
difference of dP = dO V^T and delta = rowsum(dO * O). So P V is summed in two halves. Of terms of
one sign, dO V^T is about delta; it starts from -delta / 2, so that partial sums are at most half as
large, and what negative ones lose has the other sign. Q K^T is summed in the same order in the
forward and in the backward, so that both see the same scores.

An operand is a tile, rounded to TF32 for "tf32", or its three parts for "bf16x6".
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.intrinsics import IS_INTERPRETED


@triton.jit
def operand(tile, cfg: tl.constexpr):
    """What `product` multiplies: the tile, rounded or in parts as `cfg.PRECISION` says."""
    if cfg.PRECISION == "bf16x6":
        found = parts(tile)
    elif cfg.PRECISION == "tf32":
        found = rounded_to_tf32(tile)
    else:
        found = tile
    return found


@triton.jit
def rounded_to_tf32(tile):
    """The nearest numbers with 11 bits: tensor cores would cut off the others."""
    if IS_INTERPRETED:
        found = first_bits(tile, 13, 0x1000)
    else:
        found = tl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,r", [tile], dtype=tl.float32, is_pure=True, pack=1
        )
    return found


@triton.jit
def parts(tile):
    """The three bfloat16 numbers that add up to each float32 number.

    The first is cut off rather than rounded, so that a large finite number has no infinite part.
    """
    if IS_INTERPRETED:
        first = first_bits(tile, 16, 0)
        second = first_bits(tile - first, 16, 0x8000)
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
def first_bits(x, CLEARED: tl.constexpr, ADDED: tl.constexpr):
    """Numbers whose last CLEARED bits are zero, as float32, because the interpreter multiplies only
    that.

    ADDED to the bits before: 0 to cut off, half of the last bit that is left to round to nearest.
    """
    bits = x.to(tl.int32, bitcast=True) + ADDED
    return (bits >> CLEARED << CLEARED).to(tl.float32, bitcast=True)


@triton.jit
def product(x, y, cfg: tl.constexpr, centre=None):
    """x y^T of two operands, in float32.

    centre: about half of the product, where all terms may have one sign and the caller knows it.
    """
    # (M, D) @ (D, N) -> (M, N)
    if cfg.PRECISION == "bf16x6":
        y = transposed(y)
        small = small_terms(x, y)
        if centre is None:
            found = tl.dot(x[0], y[0], small)
        else:
            found = tl.dot(x[0], y[0], small - centre) + centre
    else:
        found = tl.dot(x, tl.trans(y), input_precision=cfg.PRECISION)
    return found


@triton.jit
def add_product(acc, x, y, cfg: tl.constexpr):
    """`acc` (float32) plus x y, for two operands."""
    # (M, N) @ (N, D) -> (M, D)
    if cfg.PRECISION == "bf16x6":
        acc += tl.dot(x[0], y[0], small_terms(x, y))
    else:
        acc = tl.dot(x, y, acc, input_precision=cfg.PRECISION)
    return acc


@triton.jit
def add_product_in_halves(acc, x, y, cfg: tl.constexpr):
    """`add_product`, but the product is two sums, over the first half of the terms and the second.

    Both read all of y, next to zeros for the other half: adding zeros is exact on tensor cores,
    and half of a tile would be copied through shared memory. An infinity in y gives NaN, because
    zero times infinity is NaN.
    """
    # (M, N) @ (N, D) -> (M, D)
    if cfg.PRECISION == "bf16x6":
        # Not zero at the start of either sum: Triton fuses z + dot(a, b, 0) into dot(a, b, z).
        half = small_terms(x, y) * 0.5
        TERMS: tl.constexpr = x[0].shape[1]
        is_first = (tl.arange(0, TERMS) < TERMS // 2)[None, :]
        first = tl.dot(tl.where(is_first, x[0], 0.0), y[0], half)
        acc += first + tl.dot(tl.where(is_first, 0.0, x[0]), y[0], half)
    else:
        acc = tl.dot(x, y, acc, input_precision=cfg.PRECISION)
    return acc


@triton.jit
def transposed(x):
    """The transpose of an operand in parts."""
    return tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2])


@triton.jit
def small_terms(x, y):
    """The terms of x y beside the product of the first parts, the smallest first.

    Only the first part of an infinity is infinite. Its other parts are NaN, and so are these terms;
    NaN terms are replaced by zero.
    """
    # (M, TERMS) @ (TERMS, N) -> (M, N)
    small = tl.dot(x[2], y[0])
    small = tl.dot(x[0], y[2], small)
    small = tl.dot(x[1], y[1], small)
    small = tl.dot(x[1], y[0], small)
    small = tl.dot(x[0], y[1], small)
    return tl.where(small == small, small, 0.0)
