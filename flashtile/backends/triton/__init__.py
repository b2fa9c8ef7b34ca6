"""The portable GPU backend: Triton kernels for CUDA (sm_80 and newer) and ROCm.

The first launch imports Triton, not this module, so that `unsupported_reasons` can report that
Triton is missing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...backend_interface import Gradients, Results, Run, RunBackward, Tensors
from ...gpu.hardware import multiprocessors
from ...problem import FLOAT8, AttentionProblem, NewTokens, Operands, output_dtype
from . import plan, support
from .plan import one_program_has_all_queries, splits_of

__all__ = [
    "HINTS",
    "append_and_forward",
    "appends",
    "backward",
    "column_sums",
    "defers",
    "describe_plan",
    "forward",
    "gradients_of_scores",
    "prepared_backward",
    "prepared_forward",
    "probabilities",
    "tangents",
    "unsupported_reasons",
]

HINTS = ("num_splits",)
defers = None
_OF_LAUNCH = "backward", "column_sums", "gradients_of_scores", "prepared_backward", "probabilities"


def __getattr__(name: str) -> Any:
    """The rest of the interface is that of `launch`, whose import imports Triton."""
    if name not in _OF_LAUNCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import launch

    return getattr(launch, name)


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Why this backend cannot run `problem`; empty when it can."""
    if problem.dtype not in FLOAT8:
        return support.unsupported_reasons(problem)
    reasons = support.unsupported_reasons(_over_float8_keys(problem))
    not_here = {
        "gradients": problem.needs_grad,
        "probabilities": problem.wants_probabilities,
    }
    return reasons + [f"{what} (not in float8)" for what, asked in not_here.items() if asked]


def _over_float8_keys(problem: AttentionProblem) -> AttentionProblem:
    """The problem of float8 queries as the kernel for 16-bit queries on a float8 cache runs it.

    bfloat16 holds every float8 number, so converting the queries rounds nothing. Weights stay in 16
    bits, whereas Hopper's float8 kernel rounds them to float8.
    """
    return problem._replace(dtype=output_dtype(problem.dtype), has_float8_keys=True)


def describe_plan(problem: AttentionProblem) -> str:
    """The plan as text, for `explain`."""
    if problem.dtype in FLOAT8:
        forward_plan = describe_plan(_over_float8_keys(problem)).splitlines()[0]
        return f"{forward_plan}, 16-bit queries and weights with float8 keys and values"
    config = plan.plan(problem, True).split.config
    count = multiprocessors(torch.device(problem.device_type))
    splits = splits_of(problem, config, count, problem.B * problem.M)
    return plan.describe_plan(problem, splits)


def forward(
    problem: AttentionProblem, operands: Operands, into: Results | None = None
) -> tuple[Tensor, ...]:
    """(out, lse) of a problem, and its statistics of rows."""
    from . import launch

    if problem.dtype in FLOAT8:
        operands = operands._replace(q=operands.q.to(output_dtype(operands.q.dtype)))
        problem = _over_float8_keys(problem)
    if into is not None:
        return launch.forward_into(problem, operands, into)
    return launch.forward(problem, operands)[:4]


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
        or problem.has_own_mask
        or problem.has_block_descale
        or problem.options.k_unpack
    ):
        return False
    kernels = plan.plan(problem, True)
    return all(
        one_program_has_all_queries(problem, kernel.config)
        for kernel in (kernels.forward, kernels.split)
    )


def append_and_forward(
    problem: AttentionProblem, operands: Operands, new: NewTokens
) -> tuple[Tensor, ...]:
    """(out, lse), with `new` appended to the cache in place."""
    from . import launch

    return launch.forward(problem, operands, new)


def tangents(
    problem: AttentionProblem, operands: Operands, out: Tensor, lse: Tensor, moved: Tensors
) -> Results | None:
    """The tangents of out and lse, from those of the differentiable operands, `moved`; None if no
    kernel has them."""
    has_cache = operands.page_table is not None or operands.cache_batch_idx is not None
    # Kernels have the derivative of a score function in the score, if it has been recorded.
    has_derivative = problem.options.score_mod == "" or problem.options.score_mod_gradient != ""
    by_others = any(x is not None for x in moved[5:])  # captured, ALiBi's slopes, relative bias
    if has_cache or by_others or not has_derivative or problem.has_key_index:
        return None
    if unsupported_reasons(problem._replace(needs_grad=True)):
        return None
    from . import launch

    return launch.tangents(problem, operands, out, lse, moved[:5])
