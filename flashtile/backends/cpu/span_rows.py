"""The spans of one segment: which keys its rows see, and between which keys a tile has to look."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...problem import Operands


class SpanRows(NamedTuple):
    """The intervals of keys of the rows of a segment: (batch or 1, heads or 1, M, R)."""

    starts: Tensor
    stops: Tensor

    @classmethod
    def of(
        cls, operands: Operands, batch: slice, heads: slice, rows: slice, is_packed: bool
    ) -> SpanRows | None:
        """The spans of some sequences, query heads and query rows of a call; None without them."""
        starts, stops = operands.span_starts, operands.span_stops
        if starts is None or stops is None:
            return None
        index = (
            slice(None) if is_packed or starts.shape[0] == 1 else batch,
            slice(None) if starts.shape[1] == 1 else heads,
            rows,
        )
        return cls(starts[index], stops[index])

    def hulls(self, m0: int, m1: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Disjoint intervals inside ``[start, stop)``, from left to right, outside of which no row
        of ``[m0, m1)`` sees a key.
        """
        if start >= stop:
            return []
        starts = self.starts[:, :, m0:m1].clamp(start, stop)
        stops = self.stops[:, :, m0:m1].clamp(start, stop)
        is_empty = starts >= stops
        first = starts.masked_fill(is_empty, stop).amin((0, 1, 2)).tolist()
        last = stops.masked_fill(is_empty, start).amax((0, 1, 2)).tolist()
        found: list[tuple[int, int]] = []
        for a, b in sorted(zip(first, last, strict=True)):
            if a >= b:
                continue
            if found and a <= found[-1][1]:
                found[-1] = (found[-1][0], max(b, found[-1][1]))
            else:
                found.append((a, b))
        return found

    def full_ranges(self, m0: int, m1: int) -> list[tuple[int, int]]:
        """The keys ``[start, stop)`` that all rows of ``[m0, m1)`` see by the same interval."""
        starts = self.starts[:, :, m0:m1].amax((0, 1, 2)).tolist()
        stops = self.stops[:, :, m0:m1].amin((0, 1, 2)).tolist()
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def visible(self, m0: int, m1: int, n0: int, n1: int) -> Tensor | None:
        """Bool (batch or 1, heads or 1, rows, keys); None if every row sees all of the keys."""
        if any(start <= n0 and n1 <= stop for start, stop in self.full_ranges(m0, m1)):
            return None
        keys = torch.arange(n0, n1)
        starts, stops = self.starts[:, :, m0:m1, :, None], self.stops[:, :, m0:m1, :, None]
        seen = ((keys >= starts) & (keys < stops)).any(-2)
        return None if bool(seen.all()) else seen
