"""The rotation of a tensor's tokens, and its registered op ``flashtile::rotate_tokens``.

In eager mode on a GPU, one kernel launch rotates a tensor. The formula runs everywhere else: a
compiler can fuse it, and function transforms and learned tables can differentiate it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...gpu.hardware import OLDEST_CAPABILITY, TRITON_IS_INSTALLED, capability
from ...operators import library, ops, register_fake
from . import formula
from .formula import Angles

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# `out` may be `x`. `offset` applies if `offsets` is None.
library.define(
    "rotate_tokens(Tensor x, Tensor(a!) out, Tensor cos, Tensor sin, Tensor? offsets, "
    "SymInt offset, Tensor? cu_seqlens, bool interleaved, bool backward) -> ()"
)


def rotate(x: Tensor, angles: Angles, interleaved: bool) -> Tensor:
    """Rotate `x` (batch, seq, heads, head_dim), or packed (total, heads, head_dim)."""
    if runs_as_kernel(x, angles.cos, angles.sin):
        return _rotated(x, angles, interleaved, False)
    return formula.rotate(x, angles, interleaved)


def rotate_in_place(x: Tensor, angles: Angles, interleaved: bool) -> None:
    """Rotate `x` in place."""
    recorded = torch.is_grad_enabled() and x.requires_grad
    if not recorded and runs_as_kernel(x, angles.cos, angles.sin):
        _rotate_tokens(x, x, angles, interleaved, False)
        if not x.is_inference():  # a backward that saved `x` must notice the write in place
            torch.autograd.graph.increment_version(x)
        return
    head = x[..., : 2 * angles.cos.shape[-1]]
    head.copy_(rotate(head, angles, interleaved))


def runs_as_kernel(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel can rotate `x` in this context."""
    if not x.is_cuda or x.dtype not in _KERNEL_DTYPES or not TRITON_IS_INSTALLED:
        return False
    transformed = (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
    )
    return not transformed and capability(x.device) >= OLDEST_CAPABILITY


class _KernelRotation(torch.autograd.Function):
    """The rotation into a new tensor; its derivative rotates by the opposite angle."""

    # Without `setup_context`, for which `apply` takes three times as long: it is for transforms.
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        offsets: int | Tensor,
        cu_seqlens: Tensor | None,
        interleaved: bool,
        backward: bool,
    ) -> Tensor:
        ctx.offsets, ctx.interleaved, ctx.is_backward = offsets, interleaved, backward
        ctx.save_for_backward(cos, sin, cu_seqlens)
        return _rotated(x, Angles(cos, sin, offsets, cu_seqlens), interleaved, backward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin, cu_seqlens = ctx.saved_tensors
        angles = Angles(cos, sin, ctx.offsets, cu_seqlens)
        return _rotated(grad, angles, ctx.interleaved, not ctx.is_backward), *(None,) * 6


def _rotated(x: Tensor, angles: Angles, interleaved: bool, backward: bool) -> Tensor:
    """A new tensor, recorded for gradients if one may be asked for."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _KernelRotation.apply(x, *angles, interleaved, backward)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate_tokens(x, out, angles, interleaved, backward)
    return out


def _rotate_tokens(
    x: Tensor, out: Tensor, angles: Angles, interleaved: bool, backward: bool
) -> None:
    cos, sin, offsets, cu_seqlens = angles
    given = (offsets, 0) if isinstance(offsets, Tensor) else (None, offsets)
    ops.rotate_tokens(x, out, cos, sin, *given, cu_seqlens, interleaved, backward)


def _rotate_tokens_on_gpu(x: Tensor, out: Tensor, *args: Any) -> None:
    from . import kernel

    kernel.rotate(x, out, *args)


def _fake_rotate_tokens(*args: Any) -> None:
    return None


library.impl("rotate_tokens", _rotate_tokens_on_gpu, "CUDA")
register_fake("rotate_tokens", _fake_rotate_tokens)
