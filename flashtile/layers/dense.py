"""Linear layers and what follows them, with the names of ``flash_attn.ops.fused_dense``,
``flash_attn.ops.triton.linear`` and ``flash_attn.ops.triton.mlp``.

Nothing is fused here: that is the compiler's work.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call.checks import ignored
from .activations import (
    gelu_approx,
    get_triton_activation_bwd_kernel,
    get_triton_activation_kernel,
    relu,
    squared_relu,
)
from .tensor_parallel import Group, shared

MLP_ACTIVATIONS = {"gelu_approx": gelu_approx, "relu": relu, "sqrelu": squared_relu}


def fused_dense_func(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    return_residual: bool = False,
    process_group: Group | None = None,
    sequence_parallel: bool = True,
) -> Any:
    """``F.linear``; with return_residual (result, x).

    Args:
        x: (..., in_features).
        process_group: the weight is this process's part of the output features, as in
            `ColumnParallelLinear`.
        sequence_parallel: with a group, x is this process's part of the rows.
    """
    rows = x if process_group is None else shared(x, process_group, sequence_parallel)
    out = F.linear(rows, weight, bias)
    return (out, x) if return_residual else out


class FusedDense(nn.Linear):
    """``torch.nn.Linear`` with `return_residual`, as in `fused_dense_func`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.return_residual = return_residual

    def forward(self, x: Tensor, process_group: Group | None = None) -> Any:
        """`fused_dense_func` of x (..., in_features)."""
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)


def fused_mlp_func(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    activation: str = "gelu_approx",
    save_pre_act: bool = True,
    return_residual: bool = False,
    checkpoint_lvl: int = 0,
    heuristic: int = 0,
    process_group: Group | None = None,
    sequence_parallel: bool = True,
) -> Any:
    """``linear(activation(linear(x)))``; with return_residual (result, x).

    Args:
        activation: "gelu_approx", "relu" or "sqrelu"; KeyError for others.
        save_pre_act, checkpoint_lvl, heuristic: which kernels flash_attn takes and what it keeps
            for the backward; they change nothing here.
        process_group, sequence_parallel: as in `fused_dense_func`. The result is this process's
            part of a sum.
    """
    ignored("fused_mlp_func", checkpoint_lvl=checkpoint_lvl, heuristic=heuristic)
    hidden = fused_dense_func(x, weight1, bias1, False, process_group, sequence_parallel)
    out = F.linear(MLP_ACTIVATIONS[activation](hidden), weight2, bias2)
    return (out, x) if return_residual else out


def triton_linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "id",
    save_act_input: bool = False,
) -> Any:
    """``activation(F.linear(x, weight, bias))``, by a name of `activations.Activation` or "id";
    with save_act_input also the input of the activation.
    """
    act_input = F.linear(x, weight, bias)
    function = get_triton_activation_kernel("" if activation == "id" else activation)
    out = act_input if function is None else function(act_input)
    return (out, act_input) if save_act_input else out


def triton_dgrad_act(
    grad_output: Tensor,
    weight: Tensor,
    activation: str = "id",
    act_input: Tensor | None = None,
) -> Tensor:
    """``(grad_output @ weight) * derivative(act_input)``, the gradient of the activation's input
    in ``F.linear(activation(act_input), weight)``; ValueError for an activation without act_input.
    """
    gradient = grad_output @ weight
    derivative = get_triton_activation_bwd_kernel("" if activation == "id" else activation)
    if derivative is None:
        return gradient
    if act_input is None:
        raise ValueError(f"act_input: needed with activation={activation!r}, got None")
    return gradient * derivative(act_input)


def fused_dense_sqrelu_dense_function(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    checkpoint_lvl: int = 0,
) -> Tensor:
    """`fused_mlp_func` with ``activation="sqrelu"``."""
    weights = (weight1, weight2, bias1, bias2)
    return fused_mlp_func(x, *weights, "sqrelu", checkpoint_lvl=checkpoint_lvl)
