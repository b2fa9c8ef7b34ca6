"""Which keys a query may see: small frozen rules that can be combined.

A query at row ``i`` of ``M`` has the position ``p = i + N - M`` among the ``N`` keys (bottom-right
alignment, as in FlashAttention since 2.1). Every rule maps ``p`` to one interval of visible
keys; several rules intersect. Neither end of an interval moves left as ``p`` grows, so four
integers decide whether a whole tile of the score matrix is empty, full or partial. Empty tiles are
skipped, and full tiles are not masked.

With context parallelism the rows of a tensor are tokens of several parts of a sequence. Inside a
sequence they are sorted by position, so a few runs of adjacent positions describe them
(`Positions`). The map from rows to positions increases; therefore an interval of positions, which
is what every rule shows to a query, is an interval of rows, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .block_mask import EMPTY, FULL, PARTIAL

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

    @property
    def stop(self) -> int:
        """One past the last position; 0 without rows."""
        return self.runs[-1].position + self.runs[-1].length if self.runs else 0

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


class Window(NamedTuple):
    """Keys ``p - left <= j <= p + right``; ``None`` makes a side unbounded, and a negative side
    moves the window past the query's own position. Causal attention is ``Window(None, 0)``.
    """

    left: int | None
    right: int | None

    def key_range(self, p: Any, n: Any) -> tuple[Any, Any]:
        """First visible key and one past the last, for a query at position ``p`` (an int or a
        tensor).
        """
        start = 0 * p if self.left is None else p - self.left
        stop = 0 * p + n if self.right is None else p + self.right + 1
        return start, stop

    def under(self, causal: bool) -> Window:
        """The window that a call uses, given its `causal` argument: `causal` sets the right side to
        0, and a window without any key (``left + right < 0``) is ignored, as in FlashAttention-4.
        """
        left, right = self.left, 0 if causal else self.right
        if left is not None and right is not None and left + right < 0:
            return Window(None, 0 if causal else None)
        return Window(left, right)


# Wider windows are clamped to this size, so that positions in kernels fit into 32 bits.
WIDEST = 2**30


def as_kernel_number(size: int | None) -> int:
    """A window side or a chunk as an integer for kernels, which ignore the value of an unbounded
    side."""
    return 0 if size is None else max(-WIDEST, min(size, WIDEST))


class Chunk(NamedTuple):
    """A query sees only keys of its own chunk of ``size`` positions: ``floor(j / size) ==
    floor(p / size)`` (Llama 4).
    """

    size: int

    def key_range(self, p: Any, n: Any) -> tuple[Any, Any]:
        """First visible key and one past the last, for a query at position ``p`` (an int or a
        tensor).
        """
        start = p - p % self.size
        return start, start + self.size


def structure(
    window_left: int | None, window_right: int | None, attention_chunk: int
) -> tuple[Window | Chunk, ...]:
    """The mask rules of a call, from its options (None is an unbounded side, 0 is no chunk)."""
    facts: list[Window | Chunk] = []
    if window_left is not None or window_right is not None:
        facts.append(Window(window_left, window_right))
    if attention_chunk > 0:
        facts.append(Chunk(attention_chunk))
    return tuple(facts)


class CausalSquare(NamedTuple):
    """Rows from `m0` on, and as many keys ``[n0, n1)``: of each row those up to the diagonal."""

    m0: int
    n0: int
    n1: int


class Visibility(NamedTuple):
    """Mask rules, intersected, for one sequence of ``M`` queries and ``N`` keys.

    The tensors may hold a part of the sequence: then `rows` and `keys` say where they stand in it.
    Positions increase from row to row, so a rule's interval of positions is an interval of keys,
    and everything here that looks at the first and the last row of a tile still holds.
    """

    facts: tuple[Window | Chunk, ...]
    M: int
    N: int
    rows: Positions | None = None  # None: query i stands at i + N - M
    keys: Positions | None = None  # None: key j stands at j

    def position(self, i: int) -> int:
        """Where query row ``i`` stands among the keys."""
        return i + self.N - self.M if self.rows is None else self.rows.at(i)

    def key_range(self, i: int) -> tuple[int, int]:
        """Visible keys ``[start, stop)`` of query row ``i``; empty when ``stop <= start``."""
        start, stop = 0, self.N
        end = self.N if self.keys is None else self.keys.stop
        for fact in self.facts:
            fact_start, fact_stop = fact.key_range(self.position(i), end)
            if self.keys is not None:
                fact_start, fact_stop = self.keys.below(fact_start), self.keys.below(fact_stop)
            start, stop = max(start, fact_start), min(stop, fact_stop)
        return start, stop

    def causal_square(self, m0: int, m1: int) -> CausalSquare | None:
        """The square under the causal diagonal of rows ``[m0, m1)``, without rows before the first
        key. None if the mask is not causal, or if it has a left edge inside the square.
        """
        if not any(isinstance(fact, Window) and fact.right == 0 for fact in self.facts):
            return None
        m0 = max(m0, m0 - self.position(m0))
        if m0 >= m1:
            return None
        n0, n1 = self.position(m0), self.position(m1 - 1) + 1
        if self.keys is not None:
            n0, n1 = self.keys.below(n0), self.keys.below(n1)
            if n1 - n0 != m1 - m0:  # some of the keys that stand beside the rows are not here
                return None
        if self.key_range(m1 - 1)[0] > self.key_range(m0)[0]:
            return None
        return CausalSquare(m0, n0, n1)

    def row_positions(self, m0: int, m1: int, device: torch.device | None = None) -> Tensor:
        """The positions of the rows ``[m0, m1)``, int64."""
        if self.rows is None:
            return torch.arange(m0, m1, device=device) + (self.N - self.M)
        return _positions(self.rows, m0, m1, device)

    def key_positions(self, n0: int, n1: int, device: torch.device | None = None) -> Tensor:
        """The positions of the keys ``[n0, n1)``, int64."""
        if self.keys is None:
            return torch.arange(n0, n1, device=device)
        return _positions(self.keys, n0, n1, device)

    def classify(self, m0: int, m1: int, n0: int, n1: int) -> int:
        """EMPTY, FULL or PARTIAL for the tile of rows ``[m0, m1)`` and keys ``[n0, n1)``."""
        first_start, first_stop = self.key_range(m0)
        last_start, last_stop = self.key_range(m1 - 1)
        if n1 <= first_start or n0 >= last_stop:
            return EMPTY
        return FULL if last_start <= n0 and n1 <= first_stop else PARTIAL

    def dense(
        self,
        rows: tuple[int, int] | None = None,
        keys: tuple[int, int] | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """The mask, element by element: bool of shape (rows, keys), True where visible."""
        m0, m1 = rows or (0, self.M)
        n0, n1 = keys or (0, self.N)
        p = self.row_positions(m0, m1, device)[:, None]
        j = self.key_positions(n0, n1, device)[None, :]
        end = self.N if self.keys is None else self.keys.stop
        visible = torch.ones(m1 - m0, n1 - n0, dtype=torch.bool, device=device)
        for fact in self.facts:
            start, stop = fact.key_range(p, end)
            visible &= (j >= start) & (j < stop)
        return visible


def _positions(positions: Positions, first: int, last: int, device: Any) -> Tensor:
    """The positions of the rows ``[first, last)``."""
    parts = [torch.arange(start, stop, device=device) for start, stop in positions.spans]
    return torch.cat([*parts, torch.arange(0, device=device)])[first:last]
