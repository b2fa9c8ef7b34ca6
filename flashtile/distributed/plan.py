"""The plan of a call: what this rank does in all calls of its kind in a layout, made once.

The layers of a model and the steps of a layout share it, and it is all that a repeated call looks
up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..lru import Memo
from ..problem import Operands, Options
from .arguments import PackedCall, UsedTokens
from .collectives import Communicator, Subgroup
from .layout import Layout
from .partition import first_documents
from .schedule import Schedule, Step, schedule, steps_of
from .strategy import Strategy
from .ulysses import Exchange, HeadShare, Ulysses, merged, share_heads


class Plan(NamedTuple):
    """Neighbours exchange heads; those with the same index among their neighbours, keys."""

    strategy: Strategy
    ulysses: Ulysses | None  # the neighbours of this rank
    schedule: Schedule  # of this rank and its neighbours
    steps: list[Step]
    comm: Communicator  # of the ranks that exchange keys
    options: Options  # of the whole call; the lengths are replaced
    backend: str | None  # forced by the caller
    first_head: int  # the number of the first query head here in the whole call
    gradient_dtype: torch.dtype | None  # of dK and dV as they are sent; None is that of their sums
    used: UsedTokens
    wants_lse: bool = True  # otherwise nobody sees lse, and it has no gradient
    has_packed_bias: bool = False  # its rows are those of q: see `buffers`
    reserved_processors: int = 0  # see `AttentionProblem`
    # Rows of q and of k and v without padding, if these have padding; then out has it, too.
    tokens: tuple[int, int] | None = None
    # What earlier calls with this plan have found out: only if all of them have tensors with the
    # same metadata, and none but q, k and v.
    memo: Memo[Any, Any] | None = None

    def without_padding(self, operands: Operands) -> Operands:
        """The operands without the rows of padding."""
        if self.tokens is None:
            return operands
        queries, keys = self.tokens
        q, k, v = operands[:3]
        return operands._replace(q=q[:queries], k=k[:keys], v=v[:keys])


def plan_of(
    call: PackedCall,
    layout: Layout,
    strategy: Strategy,
    gradient_dtype: torch.dtype | None,
    **more: Any,
) -> Plan:
    """The plan of a call in its layout.

    Args:
        gradient_dtype: of dK and dV as they are sent; None is that of their sums.
        more: further fields of the plan.
    """
    comm, size = layout.comm, strategy.ulysses
    outer, inner = divmod(comm.rank, size)
    groups = [range(first, first + size) for first in range(0, comm.ranks, size)]
    queries, keys = (merged(x, groups) for x in (call.used.queries, call.used.keys))
    planned = schedule(queries, keys, call.options.facts, outer, strategy.stages, call.tiles)
    shares = share_heads(*call.heads, size)
    ulysses = None
    if size > 1:
        ulysses = _ulysses(call, layout, groups[outer], shares, gradient_dtype)
        comm = Subgroup(comm, [group[inner] for group in groups])
    return Plan(
        strategy,
        ulysses,
        planned,
        steps_of(planned, strategy.head_groups, shares[inner].counts),
        comm,
        call.options,
        first_head=shares[inner].queries.start,
        gradient_dtype=gradient_dtype,
        used=call.used,
        has_packed_bias=call.bias_has_rows and not layout.sequences,
        **more,
    )


def _ulysses(
    call: PackedCall,
    layout: Layout,
    members: range,
    shares: list[HeadShare],
    gradient_dtype: torch.dtype | None,
) -> Ulysses:
    """How this rank and its neighbours exchange tokens for heads."""
    comm = Subgroup(layout.comm, members)
    bias, rows = call.operands.bias, None
    if bias is not None and call.bias_has_rows:
        shards = call.used.queries
        if layout.sequences:  # where the bias has no batch, the rows of one stand for all
            shards = first_documents(layout.queries, bias.shape[0])
        rows = Exchange.of(comm, shards, members)
    return Ulysses(
        tuple(shares),
        Exchange.of(comm, call.used.queries, members),
        Exchange.of(comm, call.used.keys, members),
        rows,
        call.heads,
        gradient_dtype,
    )
