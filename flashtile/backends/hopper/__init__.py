"""The forward pass for NVIDIA Hopper (sm_90): Gluon kernels with asynchronous copies and products.

Not in `dispatch.ORDER` yet: in the one run on an H200, of older code, 79 of 81 configurations were
right, and two (a causal window over short sequences, a packed batch) did not repeat bit for bit.

Triton is imported with the first launch, not with this module, so that `unsupported_reasons` can
say that it is missing.
"""

from __future__ import annotations

from torch import Tensor

from ...problem import AttentionProblem, Operands
from .. import Gradients
from .plan import describe_plan, unsupported_reasons

__all__ = [
    "backward",
    "describe_plan",
    "forward",
    "probabilities",
    "unsupported_reasons",
]


def forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of a problem."""
    from . import launch

    return launch.forward(problem, operands)


def backward(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """Not here: `unsupported_reasons` refuses problems that need gradients."""
    raise NotImplementedError("backend 'hopper' has no backward; backend 'triton' has")


def probabilities(problem: AttentionProblem, operands: Operands, lse: Tensor) -> Tensor:
    """Not here: they take quadratic memory and need no fast path."""
    raise NotImplementedError("backend 'hopper' has no probabilities; backend 'triton' has")
