"""The steps of a call on one rank: the heads and the keys of each."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..positions import Span
from ..problem import Operands
from .schedule import Schedule, Stage


class Step(NamedTuple):
    """One exchange and the call on what it brings."""

    number: int
    query_heads: slice
    key_heads: slice
    stage: Stage
    is_first: bool  # of the stages of these heads
    has_call: bool  # there is something to compute
    has_all_heads: bool
    own: Span | None  # of a step without messages: its keys, as rows of the rank's own

    def has_own_rows(self, rows: int) -> bool:
        """Whether all of the rank's own keys lie in the buffer, in one piece."""
        own = [(start, stop) for source, start, stop in self.stage.order if source == 0]
        return own == [(0, rows)]

    def of_queries(self, x: Tensor) -> Tensor:
        """Its heads of a tensor (tokens, query heads, ...)."""
        return x if self.has_all_heads else x[:, self.query_heads]


def steps_of(schedule: Schedule, head_groups: int, operands: Operands) -> list[Step]:
    """The steps in their order. The first call of some heads handles rows without keys, too."""
    heads = [x.shape[1] // head_groups for x in operands[:2]]
    steps: list[Step] = []
    for group in range(head_groups):
        of_queries, of_keys = (slice(group * count, (group + 1) * count) for count in heads)
        for number, stage in enumerate(schedule.stages):
            is_first = number == 0
            has_call = heads[0] > 0 and len(stage.keys) > 0 and (is_first or stage.rows > 0)
            whole = head_groups == 1
            own = _own_keys(stage) if whole else None
            steps.append(
                Step(len(steps), of_queries, of_keys, stage, is_first, has_call, whole, own)
            )
    return steps


def _own_keys(stage: Stage) -> Span | None:
    """The keys of a stage, if they are rows of the rank's own that lie in one piece."""
    if stage.sends or stage.receives or len(stage.order) != 1:
        return None
    _, start, stop = stage.order[0]
    return start, stop
