"""Float8 queries, by the kernel that reads a float8 cache under queries of 16 bits.

bfloat16 holds every float8 number, so the conversion of the queries rounds nothing. Their scale and
that of the keys both multiply the scores: one factor for each key head is enough. Weights stay in
16 bits, where Hopper's float8 kernel rounds them to float8.
"""

from __future__ import annotations

from torch import Tensor

from ...problem import AttentionProblem, Operands, output_dtype
from . import plan


def over_float8_keys(problem: AttentionProblem) -> AttentionProblem:
    """The problem with its queries in 16 bits."""
    return problem._replace(dtype=output_dtype(problem.dtype), has_float8_keys=True)


def with_wide_queries(operands: Operands) -> Operands:
    """The operands of `over_float8_keys`."""
    return operands._replace(
        q=operands.q.to(output_dtype(operands.q.dtype)),
        q_descale=None,
        k_descale=_product(operands.q_descale, operands.k_descale),
    )


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Why the Triton backend cannot run a problem of float8 queries, keys and values."""
    reasons = plan.unsupported_reasons(over_float8_keys(problem))
    not_here = {
        "scales of blocks of rows": problem.has_block_descale,
        "gradients": problem.needs_grad,
        "probabilities": problem.wants_probabilities,
    }
    return reasons + [f"{what} (not in float8)" for what, asked in not_here.items() if asked]


def _product(q_descale: Tensor | None, k_descale: Tensor | None) -> Tensor | None:
    """(batch, kv_heads), of what there is."""
    if q_descale is None or k_descale is None:
        return k_descale if q_descale is None else q_descale
    return q_descale.float() * k_descale.float()
