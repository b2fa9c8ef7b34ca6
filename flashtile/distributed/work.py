"""How many scores a piece of a document has, to balance the ranks by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ..call import checks
from ..call.options import WindowSize
from ..masks import BlockMask, Chunk, Visibility, Window, structure
from .tile_map import TileMap

Facts = tuple[Window | Chunk, ...]
Layers = tuple[Facts, TileMap | None, int]  # what a kind of layer shows, and how many there are


class Mask(NamedTuple):
    """A kind of layer to balance the ranks for, and how many layers of it a model has."""

    causal: bool = False
    window_size: WindowSize = (-1, -1)
    attention_chunk: int = 0
    block_mask: BlockMask | None = None
    layers: int = 1

    def work(self, is_shared: bool) -> Layers:
        """What the layers show; `is_shared` when all sequences of a batch are divided alike."""
        window = checks.window(self.window_size).under(self.causal)
        facts = structure(window.left, window.right, self.attention_chunk)
        tiles = None if self.block_mask is None else TileMap.of(self.block_mask)
        return facts, tiles.shared() if tiles and is_shared else tiles, self.layers


class Work:
    """Visible scores of pieces, summed over the layers of a model.

    Between two multiples of `grain` the number of keys that a query sees is taken to change
    linearly. That is exact for a causal mask, and close enough for balancing others.

    Args:
        masks: the mask rules and the block mask of a kind of layer, and how many layers have them.
        keys: the number of keys of every document, when it is not the number of its queries.
        grain: pieces begin at multiples of this many tokens, except where `balance.refine` cuts off
            the end of a document.
        unit: a divisor of the grain at whose multiples all pieces begin.
    """

    def __init__(
        self,
        masks: Sequence[Layers],
        lengths: Sequence[int],
        keys: Sequence[int] | None = None,
        grain: int = 128,
        unit: int = 1,
    ) -> None:
        self.masks, self.grain, self.unit = tuple(masks), grain, unit
        # Documents of equal lengths have equal work, unless each has a block mask of its own.
        self._is_own = any(tiles and len(tiles.columns) > 1 for _, tiles, _ in self.masks)
        self.lengths, self.keys = tuple(lengths), tuple(lengths if keys is None else keys)
        self._prefixes: dict[tuple[int, int, int], list[float]] = {}

    def scores(self, document: int, start: int, stop: int) -> float:
        """Visible scores of the queries ``[start, stop)`` of a document."""
        return self._before(document, stop) - self._before(document, start)

    def total(self) -> float:
        """Visible scores of all documents."""
        return sum(self.scores(d, 0, n) for d, n in enumerate(self.lengths))

    def _before(self, document: int, position: int) -> float:
        M, N = self.lengths[document], self.keys[document]
        kind = (M, N, document if self._is_own else 0)
        if kind not in self._prefixes:
            self._prefixes[kind] = self._prefix(*kind)
        prefix = self._prefixes[kind]
        block, inside = divmod(position, self.grain)
        if not inside:
            return prefix[block]
        width = min(self.grain, M - block * self.grain)
        return prefix[block] + (prefix[block + 1] - prefix[block]) * inside / width

    def _prefix(self, M: int, N: int, document: int) -> list[float]:
        """Scores before every multiple of the grain, and before the end."""
        areas = [0.0]
        for m0 in range(0, M, self.grain):
            m1 = min(m0 + self.grain, M)
            areas.append(0.0)
            for facts, tiles, layers in self.masks:
                visibility = Visibility(facts, M, N)
                areas[-1] += layers * area(visibility, tiles, document, m0, m1)
        return list(accumulate(areas))


def area(visibility: Visibility, tiles: TileMap | None, document: int, m0: int, m1: int) -> float:
    """Visible scores of the rows ``[m0, m1)`` in one layer; all scores of partial tiles."""
    area = 0.0
    step = m1 - m0 if tiles is None else tiles.BM
    for a in range(m0, m1, step):
        b = min(a + step, m1)
        for row in (a, b - 1):
            start, stop = visibility.key_range(row)
            seen = stop - start if tiles is None else tiles.keys_of(document, row, (start, stop))
            area += (b - a) * max(0, seen) / 2
    return area
