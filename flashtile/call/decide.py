"""Decide how a checked call runs: by which backend, and a cached call in which form.

A cached call runs in one of three forms. With few new tokens the backend may append them while it
attends. With many queries (chunked prefill) the call may become one over packed sequences: the
fastest kernels for many queries read these, but neither pages nor the used part of cache rows.
Adjacent cache rows already are packed sequences, of which only the first tokens are used; pages are
first copied into one tensor, which takes a few per cent of the time of the call. Else the backend
attends to the cache after the append.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..problem import Appending, AttentionProblem, Operands
from . import dispatch
from .layouts import Cached, Layout

# Largest number of new tokens of a sequence that the attention appends: the programs that attend
# share the work by keys, so one of them has to store all of them.
MOST_NEW_TOKENS = 16
# Smallest number of queries for which the copy pays off: times the query heads of one key head.
FEWEST_QUERIES = 2048
# Largest size in bytes of the copy, which has room for the longest possible sequences.
LARGEST_COPY = 2**30


class Checked(NamedTuple):
    """A call that has passed all checks, before the choice of its backend."""

    problem: AttentionProblem
    operands: Operands
    layout: Layout
    given: Mapping[str, Any]  # options that the caller passed
    backend: str | None  # the one that the caller names


def decide(call: Checked) -> AttentionProblem:
    """The problem with its backend; or the problem over packed sequences, if another backend runs
    that; or the problem of appending and attending at once, if the backend can do that.
    """
    problem, operands, layout, _, backend = call
    options = problem.options._replace(backend=dispatch.select(problem, backend))
    problem = problem._replace(options=options)
    if not isinstance(layout, Cached):
        return problem
    packed = packed_problem(problem, operands, backend)
    return packed or appending_problem(problem, operands, layout) or problem


def packed_problem(
    problem: AttentionProblem, operands: Operands, backend: str | None
) -> AttentionProblem | None:
    """The problem over packed sequences, if its backend is not the one that is already chosen."""
    k, v = operands.k, operands.v
    side_by_side = all(x.stride(0) == x.shape[1] * x.stride(1) for x in (k, v))
    copied = problem.B * problem.N * problem.Hk * (problem.D + problem.Dv) * k.element_size()
    if (
        problem.M * problem.group < FEWEST_QUERIES
        or operands.seqused_k is None
        or problem.spans > 0
        or operands.leftpad_k is not None
        or operands.cache_batch_idx is not None
        or (copied > LARGEST_COPY if problem.page_size else not side_by_side)
    ):
        return None
    packed = problem._replace(layout="packed", page_size=0)
    chosen = dispatch.select(packed, backend)
    if chosen == problem.options.backend:
        return None
    return packed._replace(options=problem.options._replace(backend=chosen))


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
