"""Activations and their derivatives, with the names of ``flash_attn.ops.activations`` and
``flash_attn.ops.triton.k_activations``; the latter are functions of Triton's tensors there.

x, y, g and the results have one shape and dtype; g is the gradient of the result.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def relu(x: Tensor) -> Tensor:
    """The larger of x and 0."""
    return F.relu(x)


def leaky_relu(x: Tensor) -> Tensor:
    """x, a hundredth of it where it is negative."""
    return F.leaky_relu(x)


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution function of x."""
    return F.gelu(x)


def gelu_approx(x: Tensor) -> Tensor:
    """`gelu` with the approximation by tanh."""
    return F.gelu(x, approximate="tanh")


gelu_fwd = fast_gelu_impl = gelu_approx


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return torch.tanh(x)


def cosh(x: Tensor) -> Tensor:
    """The hyperbolic cosine."""
    return torch.cosh(x)


def sqrelu_fwd(x: Tensor) -> Tensor:
    """``relu(x) ** 2`` (So et al. 2021, "Primer", https://arxiv.org/abs/2109.08668)."""
    return F.relu(x).square()


squared_relu = sqrelu_fwd


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """``silu(x) * y`` (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""
    return F.silu(x) * y


swiglu_fwd = swiglu


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """``gelu(y + bias)`` with the approximation by tanh."""
    return gelu_approx(y + bias)


bias_gelu_impl = bias_gelu


def gelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of x in ``gelu_fwd(x)``."""
    return torch.ops.aten.gelu_backward(g, x, approximate="tanh")


def relu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of x in ``relu(x)``; g where x is 0."""
    return g.where(x >= 0, 0.0).to(x.dtype)


def sqrelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of x in ``sqrelu_fwd(x)``."""
    return (2.0 * g * F.relu(x)).to(x.dtype)


def swiglu_bwd(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and y in ``swiglu(x, y)``."""
    return torch.ops.aten.silu_backward(g * y, x), F.silu(x) * g


def bias_gelu_back(g: Tensor, y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of y (rows, features) and bias (features,) in ``bias_gelu(y, bias)``."""
    dy = gelu_bwd(g, y + bias).to(y.dtype)
    return dy, dy.sum(0, dtype=bias.dtype)


def gelu_grad(x: Tensor) -> Tensor:
    """Derivative of `gelu`."""
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x)


def gelu_approx_grad(x: Tensor) -> Tensor:
    """Derivative of `gelu_approx`."""
    return gelu_bwd(torch.ones_like(x), x)


def relu_grad(x: Tensor) -> Tensor:
    """Derivative of `relu`; 1 at 0."""
    return (x >= 0).to(x.dtype)


def squared_relu_grad(x: Tensor) -> Tensor:
    """Derivative of `squared_relu`."""
    return 2.0 * F.relu(x)


def leaky_relu_grad(x: Tensor) -> Tensor:
    """Derivative of `leaky_relu`; 1 at 0."""
    return torch.ones_like(x).where(x >= 0, 0.01)


class Activation(str, enum.Enum):
    """Names of activations."""

    SquaredReLU = "squared_relu"
    GeLU = "gelu"
    GeLUApprox = "gelu_approx"
    LeakyReLU = "leaky_relu"
    ReLU = "relu"


# Name -> (function, its derivative).
_BOTH: dict[str, tuple[Function, Function]] = {
    "squared_relu": (squared_relu, squared_relu_grad),
    "gelu": (gelu, gelu_grad),
    "gelu_approx": (gelu_approx, gelu_approx_grad),
    "leaky_relu": (leaky_relu, leaky_relu_grad),
    "relu": (relu, relu_grad),
}


def get_triton_activation_kernel(activation: str | None) -> Function | None:
    """The function of that name, or None."""
    return _BOTH[activation][0] if activation else None


def get_triton_activation_bwd_kernel(activation: str | None) -> Function | None:
    """The derivative of the function of that name, or None."""
    return _BOTH[activation][1] if activation else None
