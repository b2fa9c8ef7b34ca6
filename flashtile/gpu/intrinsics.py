"""Constants and small functions that kernels share, those in Gluon too."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.core import builtin

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# The interpreter cannot run assembly.
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@builtin
def compiles_to_ptx(_semantic: Any = None) -> Any:
    """Whether the kernel is compiled for an NVIDIA GPU."""
    return tl.constexpr(_semantic.builder.options.backend_name == "cuda")


@triton.constexpr_function
def _load(bits: int, is_guarded: bool) -> str:
    """The assembly that loads a number; if it is guarded, where the third operand is not zero, and
    0 elsewhere.
    """
    result, widen = ("x", "cvt.u32.u16 $0, x;") if bits == 16 else ("$0", "")
    guard = f"setp.ne.u32 inside, $2, 0; mov.b{bits} {result}, 0; @inside" if is_guarded else ""
    return f"""{{
        .reg .pred inside;
        .reg .b16 x;
        {guard} ld.global.nc.b{bits} {result}, [$1];
        {widen}
        }}"""


@triton.constexpr_function
def _constraints(bits: int, is_guarded: bool) -> str:
    return ("=l,l" if bits == 64 else "=r,l") + (",r" if is_guarded else "")


@triton.jit
def load_each(pointers, inside=None):
    """Numbers of 16, 32 or 64 bits, for a tile whose neighbours lie anywhere, from memory that no
    kernel writes meanwhile; 0 where not `inside`.

    Each thread loads the numbers of its own scores. Triton's own loads order the threads by
    address, and exchange the numbers through shared memory afterwards: with a barrier for every
    few numbers, or with room for several tiles. The compiler loads equal addresses once.
    """
    IS_GUARDED: tl.constexpr = inside is not None
    if not IS_INTERPRETED and compiles_to_ptx():
        dtype: tl.constexpr = pointers.dtype.element_ty
        BITS: tl.constexpr = dtype.primitive_bitwidth
        operands = (pointers,)
        if IS_GUARDED:
            pointers, inside = tl.broadcast(pointers, inside)
            operands = pointers, inside.to(tl.int32)
        ASSEMBLY: tl.constexpr = _load(BITS, IS_GUARDED)
        CONSTRAINTS: tl.constexpr = _constraints(BITS, IS_GUARDED)
        if BITS == 64:
            x = tl.inline_asm_elementwise(
                ASSEMBLY, CONSTRAINTS, operands, dtype=tl.int64, is_pure=True, pack=1
            )
        else:
            x = tl.inline_asm_elementwise(
                ASSEMBLY, CONSTRAINTS, operands, dtype=tl.int32, is_pure=True, pack=1
            )
            if BITS == 16:
                x = x.to(tl.int16)
        x = x.to(dtype, bitcast=True)
    elif IS_GUARDED:
        x = tl.load(pointers, mask=inside, other=0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def reciprocal(x):
    """1 / x for float32 numbers that are neither subnormal nor huge, within one ulp on NVIDIA GPUs.

    Triton compiles a division to `div.full`, which scales such numbers at more than twice the cost.
    """
    if IS_INTERPRETED:
        y = 1.0 / x
    elif compiles_to_ptx():
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / x
    return y


@triton.jit
def bounded_tanh(x):
    """tanh for float32 numbers within 8.8, where it rounds to 1: the rational function of this
    degree with the least relative error, 2**-26.

    With every rounding, the error is about 2**-24 in the root mean square and at most 6 times that.
    """
    z = x * x
    p = 1.371606384026336e-08 * z + 2.086650965793524e-05
    p = p * z + 3.511125687509775e-03
    p = p * z + 0.13394083082675934
    p = p * z + 1.0
    q = 7.923396196929389e-07 * z + 3.311112232040614e-04
    q = q * z + 2.5936009362339973e-02
    q = q * z + 0.4672740399837494
    q = q * z + 1.0
    return x * p * reciprocal(q)


@triton.jit
def tanh(x):
    """tanh of float32 numbers, to about one rounding; NaN stays NaN.

    A tile is mapped one number at a time: the assembler keeps the order of long computations, and
    would spill the temporaries of a whole tile.
    """
    x = tl.clamp(x, -8.8, 8.8, tl.PropagateNan.ALL)
    if IS_INTERPRETED or len(x.shape) == 0:
        y = bounded_tanh(x)
    else:
        y = tl.map_elementwise(bounded_tanh, x)
    return y


@triton.jit
def atan(x):
    """atan of float32 numbers, to about one rounding: within 1, the polynomial of this degree with
    the least relative error, 2**-26; beyond, that of 1 / x.
    """
    size = tl.abs(x)
    t = tl.where(size > 1.0, 1.0 / size, size)
    z = t * t
    p = 2.849886323328417e-03 * z - 1.606861580124134e-02
    p = p * z + 4.269149794665906e-02
    p = p * z - 7.504292740389207e-02
    p = p * z + 0.10640933185486506
    p = p * z - 0.14203644253719108
    p = p * z + 0.19992619365208372
    p = p * z - 0.3333307334380132
    p = t * (p * z + 0.9999999847656746)
    p = tl.where(size > 1.0, 1.5707963267948966 - p, p)
    return tl.where(x < 0, -p, p)


@triton.jit
def tanh_of_scores(x):
    """tanh of float32 scores of 16-bit numbers, which does not need all digits: one instruction of
    NVIDIA GPUs with a relative error of up to 2**-11, one rounding of float16.
    """
    if not IS_INTERPRETED and compiles_to_ptx():
        y = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tanh(x)
    return y


# Programmatic dependent launch (Hopper and newer): the programs of a kernel that is launched early
# are ready when the previous kernel ends. Until they have waited, they touch nothing that the
# previous kernel writes.


@triton.jit
def wait_for_earlier_kernels():
    """Wait until all earlier launches have ended and their writes are visible."""
    tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_kernel_start():
    """Let the next kernel, if launched early, occupy free multiprocessors and wait there."""
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def rows_base(x, batch, row, head):
    """Pointer to one head of one row of `x`; 64-bit, as tensors may have over 2**31 elements."""
    return (
        x.ptr + batch.to(tl.int64) * x.batch + row.to(tl.int64) * x.row + head.to(tl.int64) * x.head
    )
