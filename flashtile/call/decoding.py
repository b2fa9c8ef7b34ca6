"""Decoding steps: a few new tokens that the backend appends to the cache while it attends."""

from __future__ import annotations

import torch

from ..problem import Appending, AttentionProblem, Operands
from . import dispatch
from .layouts import Cached

# Largest number of new tokens of a sequence that the attention appends: the programs that attend
# share the work by keys, so one of them has to store all of them.
MOST_NEW_TOKENS = 16


def appending_problem(
    problem: AttentionProblem, operands: Operands, layout: Cached
) -> AttentionProblem | None:
    """The problem of appending and attending at once, if its backend can do that."""
    k, cos = layout.k_new, layout.rotary_cos
    if (
        torch.compiler.is_compiling()
        or k is None
        or layout.cu_seqlens_k_new is not None
        or not 0 < k.shape[1] <= MOST_NEW_TOKENS
        or k.shape[-1] != problem.D  # with `qv`, which needs the new tokens in the cache first
        # A backend may copy other caches, and would then append to the copy.
        or not operands.k.stride(-1) == operands.v.stride(-1) == 1
    ):
        return None
    appender = dispatch.appender(problem.options.backend)
    appending = Appending(
        tokens=1 << (k.shape[1] - 1).bit_length(),
        pairs=0 if cos is None else cos.shape[1],
        is_interleaved=layout.rotary_interleaved,
        has_own_positions=bool(problem.facts),
    )
    described = problem._replace(appending=appending)
    return described if appender is not None and appender.appends(described) else None


def is_one_call(problem: AttentionProblem, layout: Cached) -> bool:
    """Whether the backend's forward gets the tensors of the cached call as they are: nothing is
    appended before it, and its keys stay where they are.
    """
    return problem.layout != "packed" and (layout.k_new is None or problem.appending is not None)
