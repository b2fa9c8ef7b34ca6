"""The portable GPU backend: Triton kernels for CUDA (sm_80 and newer) and ROCm.

The first launch imports Triton, not this module, so that `unsupported_reasons` can report that
Triton is missing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...backend_interface import Gradients, Results, Run, RunBackward, Tensors
from ...gpu.hardware import multiprocessors
from ...problem import FLOAT8, AttentionProblem, NewTokens, Operands
from . import float8, plan, support
from .splits import one_program_has_all_queries, splits_of

__all__ = [
    "HINTS",
    "append_and_forward",
    "appends",
    "backward",
    "describe_plan",
    "forward",
    "prepared_backward",
    "prepared_forward",
    "probabilities",
    "unsupported_reasons",
]

HINTS = ("num_splits",)


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Why this backend cannot run `problem`; empty when it can."""
    if problem.dtype in FLOAT8:
        return float8.unsupported_reasons(problem)
    return support.unsupported_reasons(problem)


def describe_plan(problem: AttentionProblem) -> str:
    """The plan as text, for `explain`."""
    if problem.dtype in FLOAT8:
        forward_plan = describe_plan(float8.over_float8_keys(problem)).splitlines()[0]
        return f"{forward_plan}, 16-bit queries and weights with float8 keys and values"
    config = plan.plan(problem, True).split.config
    count = multiprocessors(torch.device(problem.device_type))
    splits = splits_of(problem, config, count, problem.B * problem.M)
    return plan.describe_plan(problem, splits)


def forward(problem: AttentionProblem, operands: Operands, into: Results | None = None) -> Results:
    """(out, lse) of a problem."""
    from . import launch

    if problem.dtype in FLOAT8:
        problem, operands = float8.over_float8_keys(problem), float8.with_wide_queries(operands)
    if into is not None:
        return launch.forward_into(problem, operands, into)
    return launch.forward(problem, operands)


def prepared_forward(problem: AttentionProblem, tensors: Tensors) -> Run | None:
    """The forward of calls like one that has been made; None if it was not prepared."""
    from . import launch

    if problem.dtype in FLOAT8:  # whose queries are converted first
        return None
    return launch.prepared_forward(problem, tensors)


def appends(problem: AttentionProblem) -> bool:
    """Whether the attention kernel appends new tokens by itself: only if each key belongs to one
    program, which then needs no other one to have stored it.
    """
    if (
        problem.layout != "dense"
        or problem.dtype in FLOAT8
        or problem.D > plan.MAX_HEAD_DIM
        or problem.block_tile is not None
        or problem.spans
        or problem.has_block_descale
    ):
        return False
    kernels = plan.plan(problem, True)
    return all(
        one_program_has_all_queries(problem, kernel.config)
        for kernel in (kernels.forward, kernels.split)
    )


def append_and_forward(
    problem: AttentionProblem, operands: Operands, new: NewTokens
) -> tuple[Tensor, Tensor]:
    """(out, lse), with `new` appended to the cache in place."""
    from . import launch

    return launch.forward(problem, operands, new)


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
    from . import launch

    return launch.backward(problem, operands, out, lse, dout, dlse, add_to)


def prepared_backward(problem: AttentionProblem, tensors: Tensors) -> RunBackward | None:
    """The backward of calls like one that has been made; None if it was not prepared."""
    from . import launch

    return launch.prepared_backward(problem, tensors)


def probabilities(problem: AttentionProblem, operands: Operands, lse: Tensor) -> Tensor:
    """Softmax probabilities (batch, heads, M, N) in q's dtype, negative where dropped; 0 outside of
    the mask."""
    from . import launch

    return launch.probabilities(problem, operands, lse)
