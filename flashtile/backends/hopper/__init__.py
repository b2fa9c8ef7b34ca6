"""Forward and backward for NVIDIA Hopper (sm_90): Gluon kernels with asynchronous copies and
products.

The first launch imports Triton, not this module, so that `unsupported_reasons` can report that
Triton is missing.
"""

from __future__ import annotations

from torch import Tensor

from ...backend_interface import Gradients, Results, Run, RunBackward, Tensors
from ...problem import AttentionProblem, Operands
from .backward.plan import backward_reasons, describe_backward
from .float8 import plan as float8
from .forward import plan

__all__ = [
    "HINTS",
    "backward",
    "describe_plan",
    "forward",
    "prepared_backward",
    "prepared_forward",
    "probabilities",
    "unsupported_reasons",
]

HINTS = ()


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Why this backend cannot run `problem`; empty when it can."""
    if problem.options.batch_invariant:
        return ["batch_invariant (the triton backend has tiles for every call)"]
    if problem.options.k_unpack:
        return ["a cache_format (the triton backend has its tiles)"]
    if problem.dtype == float8.DTYPE:
        return float8.float8_reasons(problem)
    return plan.unsupported_reasons(problem) + backward_reasons(problem)


def describe_plan(problem: AttentionProblem) -> str:
    """The plan as text, for `explain`."""
    if problem.dtype == float8.DTYPE:
        return float8.describe_float8(problem)
    return f"{plan.describe_forward(problem)}\n{describe_backward(problem)}"


def forward(problem: AttentionProblem, operands: Operands, into: Results | None = None) -> Results:
    """(out, lse) of a problem."""
    if problem.dtype == float8.DTYPE:  # never of parts of sequences, so `into` is None
        from .float8 import launch as float8_launch

        return float8_launch.forward(problem, operands)
    from .forward import launch

    return launch.forward(problem, operands, into)


def prepared_forward(problem: AttentionProblem, tensors: Tensors) -> Run | None:
    """The forward of calls like one that has been made; None if it was not prepared."""
    from .forward import launch

    return launch.prepared_forward(problem, tensors)


def backward(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    add_to: Tensor | None = None,
) -> Gradients:
    """Gradients of a problem."""
    from .backward import launch

    return launch.backward(problem, operands, out, lse, dout, dlse, add_to)


def prepared_backward(problem: AttentionProblem, tensors: Tensors) -> RunBackward | None:
    """The backward of calls like one that has been made; None if it was not prepared."""
    from .backward import launch

    return launch.prepared_backward(problem, tensors)


def probabilities(problem: AttentionProblem, operands: Operands, lse: Tensor) -> Tensor:
    """Not implemented: probabilities take quadratic memory and need no fast path.
    `unsupported_reasons` refuses a call that asks for them.
    """
    raise NotImplementedError("backend 'hopper' has no probabilities; backend 'triton' has")
