"""Scores that depend on the distance of a key and a query: `relative_bias`, and the gradients of
its table and of ALiBi's slopes.

In a tile of adjacent rows and keys the distance is the same along each diagonal. So a tile of the
bias is cut from one number for each diagonal, and the gradients need only the sums of dS over the
diagonals, which are numbered from the lower left corner.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...masks import Visibility
from .segments import KeyRun


class Columns(NamedTuple):
    """Columns of a tile whose keys stand at adjacent positions."""

    columns: slice
    distance: Tensor  # key position minus query position on each diagonal, int64 (rows + keys - 1,)


def adjacent_columns(
    visibility: Visibility, rows: tuple[int, int], run: KeyRun
) -> Iterator[Columns]:
    """The tile of `rows` and the keys of `run`, in parts whose keys stand at adjacent positions: a
    single part if the tensors hold whole sequences.
    """
    m0, m1 = rows
    for start, stop, position in _adjacent_keys(visibility, run):
        lowest = position - visibility.position(m1 - 1)
        distance = torch.arange(lowest, lowest + m1 - m0 + stop - start - 1)
        yield Columns(slice(start - run.start, stop - run.start), distance)


def _adjacent_keys(visibility: Visibility, run: KeyRun) -> Iterator[tuple[int, int, int]]:
    """Keys ``[start, stop)`` of a run, and the position of the first one."""
    if visibility.keys is None:
        yield run.start, run.stop, run.start
        return
    for row, position, length in visibility.keys.runs:
        start, stop = max(run.start, row), min(run.stop, row + length)
        if start < stop:
            yield start, stop, position + start - row


def table_index(distance: Tensor, table: Tensor) -> Tensor:
    """The columns of the `table` (heads, 2 R + 1) for given distances."""
    R = table.shape[-1] // 2
    return distance.clamp(-R, R) + R


def bias_tile(table: Tensor, distance: Tensor, rows: int) -> Tensor:
    """``table[h, clamp(j - p, -R, R) + R]`` of a tile with these diagonals, (heads, rows, keys)."""
    diagonals = table[:, table_index(distance, table)]
    return diagonals.unfold(-1, diagonals.shape[-1] - rows + 1, 1).flip(-2)


def diagonal_sums(x: Tensor) -> Tensor:
    """The sums of x (..., rows, keys) over each diagonal, (..., rows + keys - 1)."""
    rows, keys = x.shape[-2:]
    # Rows padded to rows + keys numbers, read as rows of one number less, move right by one each.
    flat = F.pad(x.flip(-2), (0, rows)).flatten(-2)
    return flat[..., : rows * (rows + keys - 1)].unflatten(-1, (rows, -1)).sum(-2)


class DistanceGradients(NamedTuple):
    """Sums to which each tile of a segment adds its part; float64, because single numbers have as
    many terms as there are scores. None where they are not needed.
    """

    dslopes: Tensor | None  # (batch or 1, heads)
    dtable: Tensor | None  # (heads, 2 R + 1)

    def add(self, dS: Tensor, visibility: Visibility, rows: tuple[int, int], run: KeyRun) -> None:
        """Add the part of a tile with dS (batch, heads, rows, keys)."""
        for columns, distance in adjacent_columns(visibility, rows, run):
            sums = diagonal_sums(dS[..., columns]).double()
            if self.dslopes is not None:
                part = -(sums @ distance.abs().double())
                self.dslopes.add_(part.sum_to_size(self.dslopes.shape))
            if self.dtable is not None:
                self.dtable.index_add_(1, table_index(distance, self.dtable), sums.sum(0))
