"""How many scores a piece of a document has, to balance the ranks by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ..masks import Chunk, Visibility, Window

Facts = tuple[Window | Chunk, ...]


class Work:
    """Visible scores of pieces, summed over the layers of a model.

    Between two multiples of `grain` the number of keys that a query sees is taken to change
    linearly. That is exact for a causal mask, and close enough for balancing others.

    Args:
        masks: the mask rules of a kind of layer, and how many layers have them.
        keys: the number of keys of every document, when it is not the number of its queries.
        grain: pieces begin at multiples of this many tokens.
    """

    def __init__(
        self,
        masks: Sequence[tuple[Facts, int]],
        lengths: Sequence[int],
        keys: Sequence[int] | None = None,
        grain: int = 128,
    ) -> None:
        self.masks, self.grain = tuple(masks), grain
        self.lengths, self.keys = tuple(lengths), tuple(lengths if keys is None else keys)
        self._prefixes: dict[tuple[int, int], list[float]] = {}

    def scores(self, document: int, start: int, stop: int) -> float:
        """Visible scores of the queries ``[start, stop)`` of a document."""
        return self._before(document, stop) - self._before(document, start)

    def total(self) -> float:
        """Visible scores of all documents."""
        return sum(self.scores(d, 0, n) for d, n in enumerate(self.lengths))

    def _before(self, document: int, position: int) -> float:
        M, N = self.lengths[document], self.keys[document]
        if (M, N) not in self._prefixes:
            self._prefixes[M, N] = self._prefix(M, N)
        prefix = self._prefixes[M, N]
        block, inside = divmod(position, self.grain)
        if not inside:
            return prefix[block]
        width = min(self.grain, M - block * self.grain)
        return prefix[block] + (prefix[block + 1] - prefix[block]) * inside / width

    def _prefix(self, M: int, N: int) -> list[float]:
        """Scores before every multiple of the grain, and before the end."""
        blocks = [(m0, min(m0 + self.grain, M)) for m0 in range(0, M, self.grain)]
        seen = [self._seen(M, N, m0) + self._seen(M, N, m1 - 1) for m0, m1 in blocks]
        areas = [(m1 - m0) * both / 2 for (m0, m1), both in zip(blocks, seen, strict=True)]
        return list(accumulate(areas, initial=0.0))

    def _seen(self, M: int, N: int, row: int) -> float:
        """Keys that a row sees, over all layers."""
        total = 0.0
        for facts, layers in self.masks:
            start, stop = Visibility(facts, M, N).key_range(row)
            total += layers * max(0, stop - start)
        return total
