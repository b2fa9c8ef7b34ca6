"""Chunked prefill: convert a call with many queries over a cache to a call over packed sequences.

The fastest kernels for many queries read packed sequences, but neither pages nor the used part of
cache rows. Adjacent cache rows already are packed sequences, of which only the first tokens are
used. Pages are first copied into one tensor, which takes a few per cent of the time of the call.
"""

from __future__ import annotations

from torch import Tensor

from .. import autograd
from ..ops.gather.op import gather_pages
from ..problem import AttentionProblem, Operands
from . import dispatch
from .packing import as_batch, starts

# Smallest number of queries for which the copy pays off: times the query heads of one key head.
FEWEST_QUERIES = 2048
# Largest size in bytes of the copy, which has room for the longest possible sequences.
LARGEST_COPY = 2**30


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


def attend(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of a cached call after the append, in the layout of the given queries."""
    if problem.layout != "packed":
        return autograd.attend(problem, operands)
    out, lse = autograd.attend(problem, _as_packed(operands, problem))
    if operands.cu_seqlens_q is not None:
        return out, lse
    return as_batch(out, lse, problem.B, problem.M)


def _as_packed(operands: Operands, problem: AttentionProblem) -> Operands:
    """The operands of a `packed_problem`, from those of the cached call."""
    q, k, v, used = operands.q, operands.k, operands.v, operands.seqused_k
    assert used is not None
    if operands.page_table is not None:
        k, v = gather_pages(k, v, operands.page_table, used)
    given = operands.cu_seqlens_q
    return operands._replace(
        q=q if given is not None else q.flatten(0, 1),
        k=k.flatten(0, 1),
        v=v.flatten(0, 1),
        cu_seqlens_q=starts(problem.B, problem.M, q.device) if given is None else given,
        cu_seqlens_k=starts(problem.B, problem.N, q.device),
        page_table=None,
    )
