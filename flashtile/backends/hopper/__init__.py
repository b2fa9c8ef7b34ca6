"""Forward and backward for NVIDIA Hopper (sm_90): Gluon kernels with asynchronous copies and
products.

Triton is imported with the first launch, not with this module, so that `unsupported_reasons` can
say that it is missing.
"""

from __future__ import annotations

from torch import Tensor

from ...problem import AttentionProblem, Operands
from .. import Gradients
from .backward_plan import describe_backward
from .plan import describe_forward, unsupported_reasons

__all__ = [
    "backward",
    "describe_plan",
    "forward",
    "probabilities",
    "unsupported_reasons",
]


def describe_plan(problem: AttentionProblem) -> str:
    """The plan in words, for `explain`."""
    return f"{describe_forward(problem)}\n{describe_backward(problem)}"


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
    """Gradients of a problem."""
    from . import backward_launch

    return backward_launch.backward(problem, operands, out, lse, dout, dlse)


def probabilities(problem: AttentionProblem, operands: Operands, lse: Tensor) -> Tensor:
    """Not here: they take quadratic memory and need no fast path; `unsupported_reasons` refuses a
    call that wants them."""
    raise NotImplementedError("backend 'hopper' has no probabilities; backend 'triton' has")
