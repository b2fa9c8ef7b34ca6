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
from .latent.plan import describe_latent, has_few_rows, is_latent, latent_reasons
from .relative_bias import relative_bias_reasons, with_program, with_table

__all__ = [
    "HINTS",
    "backward",
    "defers",
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
    reasons, problem = relative_bias_reasons(problem), with_program(problem)
    if problem.dtype == float8.DTYPE:
        return reasons + float8.float8_reasons(problem)
    if is_latent(problem):
        return reasons + latent_reasons(problem)
    return reasons + plan.unsupported_reasons(problem) + backward_reasons(problem)


def defers(problem: AttentionProblem) -> str:
    """Why Triton's kernels come first; empty if they do not."""
    if problem.relative_distance is not None:
        return "here huge relative biases would lose their differences"
    if problem.has_score_gradients:
        return "gradients of what scores read were not timed here"
    if is_latent(problem):
        return "most rows of a tile would be padding" if has_few_rows(problem) else ""
    return plan.few_tiles(problem)


def describe_plan(problem: AttentionProblem) -> str:
    """The plan as text, for `explain`."""
    problem = with_program(problem)
    if problem.dtype == float8.DTYPE:
        return float8.describe_float8(problem)
    if is_latent(problem):
        return describe_latent(problem)
    return f"{plan.describe_forward(problem)}\n{describe_backward(problem)}"


def forward(
    problem: AttentionProblem, operands: Operands, into: Results | None = None
) -> tuple[Tensor, ...]:
    """(out, lse) of a problem, and its statistics of rows."""
    if problem.dtype == float8.DTYPE:  # never of parts of sequences, so `into` is None
        from .float8 import launch as float8_launch

        return float8_launch.forward(problem, operands)
    if is_latent(problem):
        from .latent import launch as latent_launch

        return latent_launch.forward(problem, operands, into)
    from .forward import launch

    operands = Operands(*with_table(operands))  # type: ignore[arg-type]  # its fields
    return launch.forward(with_program(problem), operands, into)


def prepared_forward(problem: AttentionProblem, tensors: Tensors) -> Run | None:
    """The forward of calls like one that has been made; None if it was not prepared."""
    if is_latent(problem):
        from .latent import launch as latent_launch

        return latent_launch.prepared_forward(problem, tensors)
    from .forward import launch

    run = launch.prepared_forward(with_program(problem), with_table(tensors))
    if run is None or problem.relative_distance is None:
        return run
    return lambda tensors: run(with_table(tensors))


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

    operands = Operands(*with_table(operands))  # type: ignore[arg-type]  # its fields
    return launch.backward(with_program(problem), operands, out, lse, dout, dlse, add_to)


def prepared_backward(problem: AttentionProblem, tensors: Tensors) -> RunBackward | None:
    """The backward of calls like one that has been made; None if it was not prepared."""
    from .backward import launch

    run = launch.prepared_backward(with_program(problem), with_table(tensors))
    if run is None or problem.relative_distance is None:
        return run
    return lambda tensors: run(with_table(tensors))


def probabilities(problem: AttentionProblem, operands: Operands, lse: Tensor) -> Tensor:
    """Not implemented: probabilities take quadratic memory and need no fast path.
    `unsupported_reasons` refuses a call that asks for them.
    """
    raise NotImplementedError("backend 'hopper' has no probabilities; backend 'triton' has")
