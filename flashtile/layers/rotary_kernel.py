"""The rotation of `rotary.py` by one kernel launch: tensors on a GPU, called eagerly.

A compiler fuses the formula by itself, and function transforms and learned tables want a formula
to look into, so they keep it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gpu.hardware import OLDEST_CAPABILITY, TRITON_IS_INSTALLED

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_library = torch.library.Library("flashtile", "FRAGMENT")
# `out` may be `x`; the offset counts where there are no offsets.
_library.define(
    "rotate_tokens(Tensor x, Tensor(a!) out, Tensor cos, Tensor sin, Tensor? offsets, "
    "SymInt offset, Tensor? cu_seqlens, bool interleaved, bool backward) -> ()"
)


def runs_as_kernel(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel can rotate `x` here and now."""
    if not x.is_cuda or x.dtype not in _DTYPES or not TRITON_IS_INSTALLED:
        return False
    transformed = (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
    )
    return not transformed and torch.cuda.get_device_capability(x.device) >= OLDEST_CAPABILITY


def turn_in_place(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    interleaved: bool,
) -> None:
    """Rotate `x` (batch, seq, heads, head_dim), or packed, where it lies; records no gradient."""
    _turn(x, x, cos, sin, offsets, cu_seqlens, interleaved, False)
    if not x.is_inference():  # a backward that saved `x` must notice, as of any write in place
        torch.autograd.graph.increment_version(x)


class KernelRotation(torch.autograd.Function):
    """The rotation into a new tensor; its derivative turns by the opposite angle."""

    @staticmethod
    def forward(
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        offsets: int | Tensor,
        cu_seqlens: Tensor | None,
        interleaved: bool,
        backward: bool,
    ) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _turn(x, out, cos, sin, offsets, cu_seqlens, interleaved, backward)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, cos, sin, ctx.offsets, cu_seqlens, ctx.interleaved, ctx.is_backward = inputs
        ctx.save_for_backward(cos, sin, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin, cu_seqlens = ctx.saved_tensors
        how = (ctx.offsets, cu_seqlens, ctx.interleaved, not ctx.is_backward)
        return KernelRotation.apply(grad, cos, sin, *how), *(None,) * 6


def _turn(
    x: Tensor,
    out: Tensor,
    cos: Tensor,
    sin: Tensor,
    offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    backward: bool,
) -> None:
    given = (offsets, 0) if isinstance(offsets, Tensor) else (None, offsets)
    torch.ops.flashtile.rotate_tokens(x, out, cos, sin, *given, cu_seqlens, interleaved, backward)


def _rotate_on_gpu(x: Tensor, out: Tensor, *rest: Any) -> None:
    from ..ops.rotary.kernel import rotate

    rotate(x, out, *rest)


def _fake_rotate(*args: Any) -> None:
    return None


_library.impl("rotate_tokens", _rotate_on_gpu, "CUDA")
torch.library.register_fake("flashtile::rotate_tokens", _fake_rotate, lib=_library)
