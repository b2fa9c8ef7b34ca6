"""Words that the backward alone needs, beside those of `verbs.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..shared.softmax import nothing


@builtin
def recast(tile, dtype, shape, layout, _semantic=None):
    """The same shared memory as another tile; the versions of Triton call it differently."""
    dtype, shape, layout = (_unwrap_if_constexpr(x) for x in (dtype, shape, layout))
    shape = [_unwrap_if_constexpr(size) for size in shape]
    return _semantic.memdesc_reinterpret(tile, dtype, shape, layout)


@builtin
def _reduce_add(tensor_desc, coord, src, _semantic=None):
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


# Triton 3.6 has the operation, and no word for it.
add_to_global = getattr(tma, "async_atomic_add", None) or _reduce_add


# All warps of a role wait for each other, where the compiler knows it.
meet = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def hidden_zero(i):
    """Zero, which the compiler does not know: what is indexed with it inside of a loop is not
    computed before the loop and kept in registers (48 of them)."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def hidden_zeros(COLUMNS: gl.constexpr):
    """An accumulator (64, COLUMNS) of zeros that the compiler does not know to be zeros: it would
    start the first product without them, and take the loop apart."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=f,f", [nothing(COLUMNS)], dtype=gl.float32, is_pure=False, pack=1
    )
