"""Softmax of float8 tiles, in addition to `shared/softmax.py`.

The layouts of an accumulator and of a float8 left operand differ: of 16 columns, thread t holds 2t,
2t + 1, 2t + 8 and 2t + 9 of an accumulator, but 4t to 4t + 3 of an operand. The keys are therefore
permuted in shared memory, so that these columns of S belong to those keys. TMA does this: it reads
16 rows of K as (a, t, b), row 2a + 4t + b. Then the weights that a thread has computed are its part
of P, and the keys of V keep their order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared.intrinsics import left_operand

# Rows of K that are stored together, as groups of (2, 4, 2).
KEY_GROUP = gl.constexpr(16)

# Weights are multiplied by 2**8 before they are rounded to e4m3: they stay below its largest
# number, 448, and most of them are far from its subnormal numbers.
WEIGHT_LOG2 = gl.constexpr(8.0)

# Lazy row max, in base 2: 2**8.75 is 431. Nine in ten new maxima of random scores stay below it.
SLACK_LOG2 = gl.constexpr(0.75)


@gluon.jit
def masked(s, start, stop, n0, cfg: gl.constexpr):
    """-inf where a key of the block that starts at n0 is outside its row's [start, stop), both
    (64,).

    Column 16 c + 8 a + 2 t + b holds key 16 c + 2 a + 4 t + b. As in `softmax.masked`, c and a are
    constants of a register, and t and b are subtracted from the row's bound.
    """
    by_eights = s.reshape([64, cfg.BLOCK_N // 8, 8])
    LAYOUT: gl.constexpr = by_eights.type.layout
    COUNT: gl.constexpr = cfg.BLOCK_N // 8
    eight = gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    key = (eight // 2 * 16 + eight % 2 * 2)[None, :, None]
    visible = key < bounds(stop - n0, LAYOUT)
    if cfg.HAS_LEFT:
        visible = visible & (key >= bounds(start - n0, LAYOUT))
    by_eights = gl.where(visible, by_eights, -float("inf"))
    return gl.convert_layout(by_eights.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def bounds(bound, LAYOUT: gl.constexpr):
    """Convert a bound on keys (64,) to a bound on `key` in `masked`: (64, 1, 8)."""
    bound = gl.convert_layout(bound, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    return bound[:, None, None] - (column // 2 * 4 + column % 2)[None, None, :]


@gluon.jit
def exponentials(x, IS_MASKED: gl.constexpr, cfg: gl.constexpr):
    """2**x. If cfg.HAS_POLYNOMIAL, a polynomial computes one in eight, except in masked blocks."""
    if cfg.HAS_POLYNOMIAL and not IS_MASKED:
        p = some_by_polynomial(x)
    else:
        p = gl.exp2(x)
    return p


@gluon.jit
def packed_weights(p, COLUMNS: gl.constexpr):
    """P (64, keys) in e4m3, four numbers in an int32, in the registers of the operand of a product
    that accumulates (64, COLUMNS). Of four neighbours in the result, the first holds all four.

    The compiler would use one register for each float8 loop variable.
    """
    KEYS: gl.constexpr = p.shape[1]
    in_order = p.reshape([64, KEYS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, KEYS])
    in_order = gl.convert_layout(in_order, left_operand(COLUMNS, 8), assert_trivial=True)
    return four_to_float8(in_order)


@gluon.jit
def weights_operand(packed):
    """`packed_weights` as the operand of a product."""
    return same_float8(packed)


# Inline assembly on the registers of a thread


@gluon.jit
def four_to_float8(x):
    """Round four float32 neighbours to e4m3 in the first int32; the other three are zero.
    Saturates; NaN stays NaN.
    """
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
def same_float8(packed):
    """The four numbers of `four_to_float8`, as float8."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [packed], dtype=gl.float8e4nv, is_pure=True, pack=4
    )


@gluon.constexpr_function
def _exponential_assembly():
    """2**x of eight numbers, the first by a parabola in the fraction of x in [-1/2, 1/2], with an
    error of 2**-9: the last bits of x + 1.5 * 2**23 hold the integer part, which becomes the
    exponent.
    """
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
    """2**x; a polynomial computes one in eight of a thread's numbers, whose results are at least
    2**-120.
    """
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
