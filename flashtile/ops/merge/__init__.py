"""The op ``flashtile::combine``, which merges any number of partial attention results."""

from __future__ import annotations

import torch
from torch import Tensor

from ...gpu.hardware import TRITON_IS_INSTALLED
from ...operators import library, ops, register_fake
from . import formula

library.define(
    "combine(Tensor out_partial, Tensor lse_partial, ScalarType dtype) -> (Tensor, Tensor)"
)


def merge_parts(
    out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`formula.merge_parts`, on a GPU if possible by a kernel that reads each part once.

    The kernel records no gradient and computes in float32, so other calls use the formula.
    """
    has_gradient = torch.is_grad_enabled() and (
        out_partial.requires_grad or lse_partial.requires_grad
    )
    by_op = out_partial.is_cuda and lse_partial.dtype == torch.float32 and not has_gradient
    by_op = by_op and torch.float64 not in (out_partial.dtype, dtype)
    combine = ops.combine if by_op else formula.merge_parts
    merged: tuple[Tensor, Tensor] = combine(out_partial, lse_partial, dtype)
    return merged


def merge_parts_on_gpu(
    out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`formula.merge_parts` of float32 log-sum-exps by one kernel launch, without gradients."""
    from . import kernel

    return kernel.merge_parts(out_partial, lse_partial, dtype)


def _fake_combine(
    out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    out = out_partial.new_empty(out_partial.shape[1:], dtype=dtype)
    return out, lse_partial.new_empty(lse_partial.shape[1:])


library.impl("combine", formula.merge_parts, "CompositeExplicitAutograd")
if TRITON_IS_INSTALLED:
    library.impl("combine", merge_parts_on_gpu, "CUDA")
register_fake("combine", _fake_combine)
