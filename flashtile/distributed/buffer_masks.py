"""Masks that count keys in the whole document, for a call whose keys are the rows of a buffer.

The rows of a sequence in a buffer are sorted by position. Its rows inside an interval of positions
are therefore an interval, too, whatever keys the buffer lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..masks import EMPTY
from ..positions import Positions
from ..problem import Operands
from .schedule import Schedule, Stage
from .sequence_tensors import indices


def of_heads(x: Any, heads: slice) -> Any:
    """Some heads of a tensor (batch, heads or 1, ...), if there is one."""
    return x[:, heads] if x is not None and x.shape[1] > 1 else x


def rows_before(ends: Tensor, queries: Sequence[Positions], keys: Sequence[Positions]) -> Tensor:
    """Ends of intervals of keys as rows of the buffer.

    Args:
        ends: (1, heads or 1, tokens, intervals) int32, numbers of keys in their document.
        queries: of every sequence, one after the other in `ends`.
        keys: of the same sequences in the buffer.

    Returns:
        For each end, how many rows of its sequence stand before it.
    """
    ends = ends.clamp(min=0)  # so that no difference overflows
    sequences = ends.split([positions.length for positions in queries], dim=2)
    rows = [torch.zeros_like(x) for x in sequences]
    for total, x, positions in zip(rows, sequences, keys, strict=True):
        for run in positions.runs:
            total += (x - run.position).clamp(0, run.length)
    return torch.cat(rows, dim=2) if rows else ends


def tiles_of_buffer(operands: Operands, schedule: Schedule, stage: Stage) -> Operands:
    """The operands with the tiles of a block mask that the rows of each sequence meet in a buffer,
    (sequences, heads or 1, row tiles, key tiles). Rows and keys begin at multiples of the tile."""
    kinds, index, partial = operands.tile_kinds, operands.partial_index, operands.partial_tiles
    if kinds is None or index is None or partial is None:
        return operands
    _, BM, BN = partial.shape
    numbers = [
        positions.shifted(-shift)  # queries count from the first one of their document
        for positions, shift in zip(schedule.queries, schedule.shifts, strict=True)
    ]
    beyond = tuple(kinds.shape[2:])  # an empty tile after the last one fills up short sequences
    rows = _tile_numbers(numbers, BM, beyond[0], kinds.device)[:, None, :, None]
    keys = _tile_numbers(stage.keys, BN, beyond[1], kinds.device)[:, None, None, :]
    documents = schedule.documents if kinds.shape[0] > 1 else (0,) * len(schedule.documents)
    sequences = indices(documents, kinds.device).view(-1, 1, 1, 1)
    heads = torch.arange(kinds.shape[1], device=kinds.device).view(1, -1, 1, 1)
    kinds, index = (
        pad(x, (0, 1, 0, 1), value=outside)[sequences, heads, rows, keys]
        for x, outside in ((kinds, EMPTY), (index, -1))
    )
    return operands._replace(tile_kinds=kinds, partial_index=index)


def _tile_numbers(
    sides: Sequence[Positions], size: int, beyond: int, device: torch.device
) -> Tensor:
    """The numbers of the tiles that the rows of every sequence fill, (sequences, most tiles)."""
    tiles = [[n for a, b in x.spans for n in range(a // size, -(-b // size))] for x in sides]
    most = max(map(len, tiles), default=0)
    filled = (n for mine in tiles for n in (*mine, *(beyond,) * (most - len(mine))))
    return indices(tuple(filled), device).view(len(tiles), most)
