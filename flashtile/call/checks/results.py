"""Checks of the tensors that a call writes to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...gpu.workspace import workspace_size
from ...problem import DIFFERENTIABLE, Operands, Options, output_dtype
from .tensors import no_shared_elements, rank, same_device, shape, tensor


def output(out: Any, operands: Operands) -> None:
    """Check the tensor to write the result to."""
    if out is None:
        return
    tensor("out", out)
    q = operands.q
    shape("out", out, (*q.shape[:-1], operands.v.shape[-1]), "q's shape with v's head dim")
    same_device("out", out, q)
    if out.dtype != output_dtype(q.dtype):
        raise TypeError(f"out: got dtype {out.dtype}, want {output_dtype(q.dtype)}")
    no_shared_elements("out", out)
    _not_recording("out", (out, *operands[:DIFFERENTIABLE]))


def workspace(operands: Operands, options: Options) -> None:
    """Check that a workspace consists of contiguous bytes and is large enough for the call."""
    given, q = operands.workspace, operands.q
    if given is None:
        return
    rank("workspace", given, "bytes")
    if given.dtype != torch.uint8:
        raise TypeError(f"workspace: got dtype {given.dtype}, want torch.uint8")
    same_device("workspace", given, q)
    _not_recording("workspace", operands[:DIFFERENTIABLE])
    if torch.compiler.is_compiling():  # a tracer knows neither the offset nor the GPU
        return
    if not given.is_contiguous() or given.storage_offset() % 16:
        raise ValueError(
            f"workspace: got stride {given.stride(0)} and offset {given.storage_offset()}, want "
            "contiguous bytes with an offset that is a multiple of 16"
        )
    tokens, heads, value_head_dim = q.shape[:-2].numel(), q.shape[-2], operands.v.shape[-1]
    wanted = workspace_size(tokens, heads, value_head_dim, options.num_splits, q.device)
    if given.numel() < wanted:
        raise ValueError(
            f"workspace: got {given.numel()} bytes, want at least {wanted} (see workspace_size)"
        )


def _not_recording(name: str, tensors: tuple[Tensor | None, ...]) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(
            f"{name}: cannot be used while recording gradients; wrap the call in torch.no_grad()"
        )
