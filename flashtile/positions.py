"""Where rows stand in their sequence, when a process holds only parts of it.

With context parallelism the rows of a tensor are tokens of several parts of a sequence. Inside a
sequence they are sorted by position, so a few runs of adjacent positions describe them. The map
from rows to positions increases; therefore an interval of positions, which is what every mask rule
of `masks` shows to a query, is an interval of rows, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

Span = tuple[int, int]  # [start, stop)


class Run(NamedTuple):
    """Rows ``row, row + 1, ...`` that stand at ``position, position + 1, ...``."""

    row: int
    position: int
    length: int


class Positions(NamedTuple):
    """The positions of rows ``0, 1, ..., length - 1``, which increase from row to row."""

    runs: tuple[Run, ...]

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Positions:
        """The positions of rows that hold the disjoint `spans`, sorted; neighbours are joined."""
        runs: list[Run] = []
        row = 0
        for start, stop in sorted(spans):
            if runs and runs[-1].position + runs[-1].length == start:
                runs[-1] = runs[-1]._replace(length=runs[-1].length + stop - start)
            elif start < stop:
                runs.append(Run(row, start, stop - start))
            row += stop - start
        return cls(tuple(runs))

    @property
    def length(self) -> int:
        """The number of rows."""
        return self.runs[-1].row + self.runs[-1].length if self.runs else 0

    @property
    def spans(self) -> tuple[Span, ...]:
        """The intervals of positions, from left to right."""
        return tuple((run.position, run.position + run.length) for run in self.runs)

    def at(self, row: int) -> int:
        """The position of a row."""
        run = next(run for run in reversed(self.runs) if run.row <= row)
        return run.position + row - run.row

    def below(self, position: int) -> int:
        """How many rows stand before `position`: the row at which an interval that starts at
        `position` begins."""
        return sum(min(max(position - run.position, 0), run.length) for run in self.runs)

    def begin_at_multiples(self, step: int) -> bool:
        """Whether the first row and the first position of every run are multiples of `step`."""
        return all(run.row % step == run.position % step == 0 for run in self.runs)

    def shifted(self, by: int) -> Positions:
        """The same rows `by` positions further to the right."""
        return Positions(tuple(run._replace(position=run.position + by) for run in self.runs))


class Dealt(NamedTuple):
    """The positions of one rank's rows when tokens are dealt out in blocks, like cards: token t of
    a sequence is on rank ``t // block % ranks``.

    A sequence that grows fills the ranks evenly, and the rows that a rank has stay where they are.
    Positions may be ints or tensors of integers.
    """

    block: int
    ranks: int
    rank: int

    def owner(self, position: Any) -> Any:
        """The rank that holds a token."""
        return position // self.block % self.ranks

    def row(self, position: Any) -> Any:
        """The row of a token on the rank that holds it."""
        return position // (self.block * self.ranks) * self.block + position % self.block

    def at(self, row: Any) -> Any:
        """The position of one of this rank's rows."""
        block, inside = row // self.block, row % self.block
        return (block * self.ranks + self.rank) * self.block + inside

    def below(self, position: Any) -> Any:
        """How many of this rank's rows stand before `position`: its rows of a sequence of that
        many tokens."""
        period = self.block * self.ranks
        inside = position % period - self.rank * self.block
        if isinstance(position, int):
            inside = min(max(inside, 0), self.block)
        else:
            inside = inside.clamp(0, self.block)
        return position // period * self.block + inside

    def most_rows(self, tokens: int) -> int:
        """The most rows that a rank has of a sequence: those of the first rank."""
        return int(self._replace(rank=0).below(tokens))

    def tokens_in(self, rows: int) -> int:
        """The most tokens of a sequence for which no rank needs more than `rows` rows."""
        return rows // self.block * self.block * self.ranks + rows % self.block

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """The intervals of this rank's positions from `start` to `stop`, a block each at most."""
        period = self.block * self.ranks
        for first in range(start // period * period + self.rank * self.block, stop, period):
            span = max(first, start), min(first + self.block, stop)
            if span[0] < span[1]:
                yield span
