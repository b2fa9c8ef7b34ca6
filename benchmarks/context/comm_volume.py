"""How many keys ranks exchange, and how many scores they compute: counted without a `schedule`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flashtile.distributed.partition import Facts, ShardMap, TileMap
from flashtile.lru import memoised
from flashtile.masks import Span, Visibility

SAMPLES = 8  # intervals of a piece, over which the number of keys is taken as linear


class Transfer(NamedTuple):
    """What a rank and the rank at one distance do for each other."""

    received: int  # keys
    sent: int
    source: int
    target: int
    scores: float


class _Sample(NamedTuple):
    """Some queries of a piece, and the keys that the first and the last of them see."""

    queries: int
    first_and_last: tuple[int, int]
    ends: tuple[Span, Span]

    def scores(self, start: int, stop: int) -> float:
        """Visible scores with the keys ``[start, stop)``."""
        (a, b), (c, d) = self.ends
        first = max(0, min(b, stop) - max(a, start))
        return self.queries * (first + max(0, min(d, stop) - max(c, start))) / 2


class CommVolume:
    """The transfers of every rank.

    Args:
        queries, keys: who holds which tokens.
        facts: the mask rules.
        tiles: the block mask.
    """

    def __init__(
        self, queries: ShardMap, keys: ShardMap, facts: Facts, tiles: TileMap | None = None
    ) -> None:
        self.queries, self.keys, self.ranks = queries, keys, queries.ranks
        self._tiles = tiles
        lengths = zip(queries.lengths, keys.lengths, strict=True)
        self._visibilities = [Visibility(facts, M, N) for M, N in lengths]
        # Of every document: where pieces of keys stop, and those pieces with their owners.
        owned: list[list[tuple[int, int, int]]] = [[] for _ in keys.lengths]
        for rank, mine in enumerate(keys.pieces):
            for document, start, stop in mine:
                owned[document].append((start, stop, rank))
        self._owned = [sorted(pieces) for pieces in owned]
        self._stops = [[stop for _, stop, _ in pieces] for pieces in self._owned]
        # Of every document: the ranks with queries of it, and the keys that they need.
        self._needs: list[dict[int, list[Span]]] = [{} for _ in keys.lengths]
        for rank, mine in enumerate(queries.pieces):
            for document, start, stop in mine:
                visibility = self._visibilities[document]
                # Neither end of the visible keys moves left from one query to the next.
                hull = visibility.key_range(start)[0], visibility.key_range(stop - 1)[1]
                needs = self._needs[document].setdefault(rank, [])
                if tiles is None:
                    _add(needs, hull)
                else:
                    needs[:] = _joined([*needs, *tiles.seen(document, (start, stop), hull)])

    def transfers(self, rank: int) -> list[Transfer]:
        """By distance, 0 first."""
        received, sent, scores = ([0] * self.ranks, [0] * self.ranks, [0.0] * self.ranks)
        for document in dict.fromkeys(piece.document for piece in self.queries.pieces[rank]):
            for need in self._needs[document][rank]:
                for start, stop, owner in self._pieces(document, *need):
                    received[owner] += stop - start
        for document, start, stop in self.queries.pieces[rank]:
            self._add_scores(scores, document, start, stop)
        for document, start, stop in self.keys.pieces[rank]:
            for reader, needs in self._needs[document].items():
                sent[reader] += sum(max(0, min(b, stop) - max(a, start)) for a, b in needs)
        sent[rank] = received[rank] = 0
        found = []
        for distance in range(self.ranks):
            source, target = (rank - distance) % self.ranks, (rank + distance) % self.ranks
            found.append(Transfer(received[source], sent[target], source, target, scores[source]))
        return found

    def _pieces(self, document: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The parts of ``[start, stop)`` by owner."""
        pieces = self._owned[document]
        for number in range(bisect_right(self._stops[document], start), len(pieces)):
            first, last, owner = pieces[number]
            if first >= stop:
                return
            yield max(first, start), min(last, stop), owner

    def _add_scores(self, scores: list[float], document: int, start: int, stop: int) -> None:
        """Add the visible scores of the queries ``[start, stop)`` to those of the keys' owners."""
        step = 1 if self._tiles is None else self._tiles.BM
        samples = _samples(self._visibilities[document], start, stop, step)
        if self._tiles is not None:
            self._add_scores_of_tiles(scores, document, samples, self._tiles)
            return
        left, right = samples[0].ends[0], samples[-1].ends[1]
        for a, b, owner in self._pieces(document, left[0], right[1]):
            if right[0] <= a and b <= left[1]:  # all queries see all of these keys
                scores[owner] += (stop - start) * (b - a)
            else:
                scores[owner] += sum(sample.scores(a, b) for sample in samples)

    def _add_scores_of_tiles(
        self, scores: list[float], document: int, samples: list[_Sample], tiles: TileMap
    ) -> None:
        """The same with the tiles that the first and the last query of each sample see."""
        for sample in samples:
            for query, (start, stop) in zip(sample.first_and_last, sample.ends, strict=True):
                for tile in _joined(tiles.seen(document, (query, query + 1), (start, stop))):
                    seen = max(tile[0], start), min(tile[1], stop)
                    for a, b, owner in self._pieces(document, *seen):
                        scores[owner] += sample.queries * (b - a) / 2


@memoised(4096)
def _samples(visibility: Visibility, start: int, stop: int, step: int) -> list[_Sample]:
    """The queries ``[start, stop)``. Often the same when more neighbours exchange heads."""
    width = max(1, -(-(stop - start) // (SAMPLES * step))) * step
    samples = []
    for first in range(start, stop, width):
        last = min(first + width, stop) - 1
        ends = visibility.key_range(first), visibility.key_range(last)
        samples.append(_Sample(last + 1 - first, (first, last), ends))
    return samples


def _joined(spans: Iterable[Span]) -> list[Span]:
    """The union of some spans."""
    joined: list[Span] = []
    for span in sorted(spans):
        _add(joined, span)
    return joined


def _add(spans: list[Span], span: Span) -> None:
    """Add a span that starts no further left than the last one, and join both if they touch."""
    if spans and span[0] <= spans[-1][1]:
        spans[-1] = (spans[-1][0], max(spans[-1][1], span[1]))
    elif span[0] < span[1]:
        spans.append(span)
