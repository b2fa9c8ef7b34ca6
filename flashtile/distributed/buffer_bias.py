"""A bias that has all keys of a document, for a call whose keys are the rows of a buffer.

The bias of a rank, (documents or 1, heads or 1, rows or 1, keys or 1), has the rank's rows of every
document, as a dense batch, or (by_token) the rank's tokens of all documents one after the other. A
call gets (sequences or 1, heads or 1, rows or 1, keys or 1), where a sequence has its rows and the
keys of its buffer first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from .schedule import Schedule, Stage, starts

Index = tuple[slice, slice, slice, slice]


class _Part(NamedTuple):
    """The slices of a rank's bias and of a call's bias that hold the same numbers."""

    of_rank: Index
    of_call: Index


def bias_of_buffer(bias: Tensor, schedule: Schedule, stage: Stage, by_token: bool) -> Tensor:
    """The bias of a stage's call."""
    parts = list(_parts(bias, schedule, stage, by_token))
    is_alike = _are_alike(bias, schedule, stage, by_token)
    if len(parts) == 1 and (is_alike or len(schedule.documents) == 1):
        return bias[parts[0].of_rank]
    longest = [max(x.length for x in side) for side in (schedule.queries, stage.keys)]
    sizes = [1 if n == 1 else m for n, m in zip(bias.shape[2:], longest, strict=True)]
    batch = bias.shape[0] if is_alike else len(schedule.documents)
    made = bias.new_zeros(batch, bias.shape[1], *sizes)
    for part in parts:
        made[part.of_call] = bias[part.of_rank]
    return made


def add_bias_gradient(
    total: Tensor, gradient: Tensor, schedule: Schedule, stage: Stage, by_token: bool
) -> None:
    """Add the gradient of what `bias_of_buffer` has made to that of the rank's bias."""
    for part in _parts(total, schedule, stage, by_token):
        total[part.of_rank] += gradient[part.of_call]


def _parts(bias: Tensor, schedule: Schedule, stage: Stage, by_token: bool) -> Iterator[_Part]:
    everything = slice(None)
    is_alike = _are_alike(bias, schedule, stage, by_token)
    rows_before = starts(schedule.queries)
    for number, document in enumerate(schedule.documents):
        of_rank = slice(document, document + 1) if bias.shape[0] > 1 else everything
        of_call = slice(number, number + 1)
        if is_alike:
            of_rank = of_call = everything
        rows = rows_of_rank = everything
        if bias.shape[2] > 1:
            rows = slice(0, schedule.queries[number].length)
            first = rows_before[number] if by_token else 0
            rows_of_rank = slice(first, first + rows.stop)
        keys = [(everything, everything)]
        if bias.shape[3] > 1:
            keys = [
                (slice(position, position + length), slice(row, row + length))
                for row, position, length in stage.keys[number].runs
            ]
        for of_document, of_buffer in keys:
            yield _Part(
                (of_rank, everything, rows_of_rank, of_document),
                (of_call, everything, rows, of_buffer),
            )
        if is_alike:
            return


def _are_alike(bias: Tensor, schedule: Schedule, stage: Stage, by_token: bool) -> bool:
    """Whether all documents of the bias are here, with the same rows and keys."""
    if by_token or bias.shape[0] not in (1, len(schedule.documents)):
        return False
    return len({*zip(schedule.queries, stage.keys, strict=True)}) == 1
