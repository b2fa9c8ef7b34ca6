"""Forward and backward for NVIDIA Hopper (sm_90): Gluon kernels with asynchronous copies and
products.

Triton is imported with the first launch, not with this module, so that `unsupported_reasons` can
say that it is missing.
"""

from __future__ import annotations

from torch import Tensor

from ...problem import AttentionProblem, Operands
from .. import Gradients
from . import fp8_plan, plan
from .backward_plan import describe_backward

__all__ = [
    "HINTS",
    "backward",
    "describe_plan",
    "forward",
    "probabilities",
    "unsupported_reasons",
]

HINTS = ()


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Why this backend cannot run `problem`; empty when it can."""
    if problem.dtype == fp8_plan.DTYPE:
        return fp8_plan.float8_reasons(problem)
    return plan.unsupported_reasons(problem)


def describe_plan(problem: AttentionProblem) -> str:
    """The plan in words, for `explain`."""
    if problem.dtype == fp8_plan.DTYPE:
        return fp8_plan.describe_float8(problem)
    return f"{plan.describe_forward(problem)}\n{describe_backward(problem)}"


def forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of a problem."""
    if problem.dtype == fp8_plan.DTYPE:
        from . import fp8_launch

        return fp8_launch.forward(problem, operands)
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
