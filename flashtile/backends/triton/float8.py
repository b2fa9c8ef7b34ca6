"""Float8 queries, run by the kernel for 16-bit queries on a float8 cache.

bfloat16 holds every float8 number, so converting the queries rounds nothing. Weights stay in 16
bits, whereas Hopper's float8 kernel rounds them to float8.
"""

from __future__ import annotations

from ...problem import AttentionProblem, Operands, output_dtype
from . import support


def over_float8_keys(problem: AttentionProblem) -> AttentionProblem:
    """The problem with 16-bit queries."""
    return problem._replace(dtype=output_dtype(problem.dtype), has_float8_keys=True)


def with_wide_queries(operands: Operands) -> Operands:
    """The operands of `over_float8_keys`."""
    return operands._replace(q=operands.q.to(output_dtype(operands.q.dtype)))


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Why the Triton backend cannot run a problem of float8 queries, keys and values."""
    reasons = support.unsupported_reasons(over_float8_keys(problem))
    not_here = {
        "gradients": problem.needs_grad,
        "probabilities": problem.wants_probabilities,
    }
    return reasons + [f"{what} (not in float8)" for what, asked in not_here.items() if asked]
