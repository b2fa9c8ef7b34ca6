"""Words that Gluon has not, for float8 tiles: inline assembly on the registers of a thread."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def four_to_float8(x):
    """Four neighbours, float32, rounded to e4m3 in one int32; the other three are zero. What is
    larger than the largest number becomes that; NaN stays NaN."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high;"
        " cvt.rn.satfinite.e4m3x2.f32 low, $5, $4; cvt.rn.satfinite.e4m3x2.f32 high, $7, $6;"
        " mov.b32 $0, {low, high}; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }",
        "=r,=r,=r,=r,r,r,r,r",
        [x],
        dtype=gl.int32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def same_float8(words):
    """The four numbers of `four_to_float8`, as float8."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [words], dtype=gl.float8e4nv, is_pure=True, pack=4
    )


@gluon.constexpr_function
def _exponential_assembly():
    """Eight times 2**x, the first by a parabola on the fraction of x in [-1/2, 1/2], good to
    2**-9: the sum of x and 1.5 * 2**23 has the whole part in its last bits, which become the
    exponent."""
    units = " ".join(f"ex2.approx.ftz.f32 ${i}, ${i + 8};" for i in range(1, 8))
    return (
        "{ .reg .f32 x, whole, fraction, y; .reg .b32 exponent;"
        " max.f32 x, $8, 0fC2F00000; add.rn.f32 whole, x, 0f4B400000;"
        " sub.rn.f32 fraction, whole, 0f4B400000; sub.rn.f32 fraction, x, fraction;"
        " fma.rn.f32 y, fraction, 0f3E7424E8, 0f3F341459; fma.rn.f32 y, y, fraction, 0f3F800E81;"
        " mov.b32 exponent, whole; shl.b32 exponent, exponent, 23;"
        " { .reg .b32 bits; mov.b32 bits, y; add.s32 bits, bits, exponent; mov.b32 $0, bits; }"
        f" {units} }}"
    )


@gluon.jit
def some_by_polynomial(x):
    """2**x, one in eight of a thread's numbers without the unit for exponentials; those below
    2**-120 come out as that."""
    return gl.inline_asm_elementwise(
        _exponential_assembly(),
        "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=8,
    )


@gluon.jit
def ratio(x, y):
    """x / y, exact for powers of two."""
    return gl.inline_asm_elementwise(
        "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1
    )
