"""What a rank sends, receives and computes: plain data, made once for a layout and a mask.

A stage is one exchange of keys and one attention call over what it brings. Its buffer holds, for
each document of which the rank has queries, the keys that some of these queries see, sorted by
position. One packed call attends to it: a sequence is a document, and the positions of its rows
(`masks.Positions`) make every mask rule right. Keys that no query of a rank sees do not travel.

`gather` needs one stage: all keys at once. With more stages the buffer is smaller, and their
results are merged; they take the sources in the order in which a ring would pass them on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from ..lru import memoised
from ..masks import Positions, Span, Visibility
from .partition import Facts, ShardMap, TileMap

Mask = tuple[Facts, TileMap | None]
Seen = dict[int, tuple[Span, ...]]  # positions of keys, by document
Located = tuple[tuple[int, int], Span]  # (document, first position) of keys, rows of their tensor


class Message(NamedTuple):
    """Rows of keys between two ranks."""

    peer: int
    spans: tuple[Span, ...]  # rows of the sender's tensor, in the order in which they travel

    @property
    def rows(self) -> int:
        """How many they are."""
        return sum(stop - start for start, stop in self.spans)


class Rows(NamedTuple):
    """Rows from `start` to `stop` of a source of a buffer."""

    source: int  # 0 is the rank's own tensor, n the n-th message of those that the stage receives
    start: int
    stop: int


class Stage(NamedTuple):
    """One exchange and one call."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    order: tuple[Rows, ...]  # the buffer
    keys: tuple[Positions, ...]  # of the buffer, for every sequence of the call
    # Whether positions differ from row numbers in some sequence.
    has_parts: bool

    @property
    def rows(self) -> int:
        """Keys in the buffer."""
        return sum(positions.length for positions in self.keys)


class Schedule(NamedTuple):
    """The stages of a rank. All ranks have equally many."""

    documents: tuple[int, ...]  # of which the rank has queries: the sequences of its calls
    queries: tuple[Positions, ...]  # of every one, aligned to the end of the keys
    shifts: tuple[int, ...]  # of the positions of queries from their numbers in the document
    stages: tuple[Stage, ...]


@memoised(256)
def schedule(
    queries: ShardMap,
    keys: ShardMap,
    facts: Facts,
    rank: int,
    stages: int = 1,
    tiles: TileMap | None = None,
) -> Schedule:
    """The schedule of `rank`. The layers of a model and the steps of a layout share it: between two
    calls of a kernel there is no time to make it again.

    Args:
        queries, keys: who holds which queries and which keys; the same for self-attention.
        facts: the mask rules of the call.
        tiles: its block mask; pieces begin at multiples of the tile.
        stages: 1 to have all keys at once, or the rank's own keys in the first stage and those of
            the others in ``stages - 1`` further ones.

    Raises:
        ValueError: `stages` is not from 1 to the number of ranks.
    """
    ranks = queries.ranks
    if not 1 <= stages <= ranks:
        raise ValueError(f"stages: got {stages}, want 1 to {ranks}, the number of ranks")
    documents = tuple(queries.documents(rank))
    # The last query stands at the last key.
    shifts = tuple(keys.lengths[d] - queries.lengths[d] for d in documents)
    rows = tuple(
        Positions.of(queries.spans(rank, document)).shifted(shift)
        for document, shift in zip(documents, shifts, strict=True)
    )
    stages_of_rank = [
        _stage(queries, keys, (facts, tiles), rank, away, rows) for away in distances(ranks, stages)
    ]
    return Schedule(documents, rows, shifts, tuple(stages_of_rank))


def distances(ranks: int, stages: int) -> list[tuple[int, ...]]:
    """How far away the sources of every stage are: rank r receives from r - distance."""
    if stages == 1:
        return [tuple(range(ranks))]
    others = list(range(1, ranks))
    size = -(-len(others) // (stages - 1))
    groups = [tuple(others[i * size : (i + 1) * size]) for i in range(stages - 1)]
    return [(0,), *groups]


def _stage(
    queries: ShardMap,
    keys: ShardMap,
    mask: Mask,
    rank: int,
    away: tuple[int, ...],
    rows: tuple[Positions, ...],
) -> Stage:
    ranks = queries.ranks
    seen = seen_keys(queries, keys, mask, rank)
    sources = [(rank - distance) % ranks for distance in away]  # the rank itself comes first
    located = {source: list(_located(keys, source, seen)) for source in sources}
    receives = [
        Message(source, tuple(span for _, span in pairs))
        for source, pairs in located.items()
        if source != rank and pairs
    ]
    sends = []
    for peer in ((rank + distance) % ranks for distance in away):
        if peer != rank:
            of_peer = _located(keys, rank, seen_keys(queries, keys, mask, peer))
            sends.append(Message(peer, tuple(span for _, span in of_peer)))
    spans: dict[int, list[Span]] = {document: [] for document in queries.documents(rank)}
    for pairs in located.values():
        for (document, position), (start, stop) in pairs:
            spans[document].append((position, position + stop - start))
    buffered = tuple(map(Positions.of, spans.values()))
    return Stage(
        tuple(message for message in sends if message.spans),
        tuple(receives),
        _order(located, rank, [message.peer for message in receives]),
        buffered,
        any(
            positions.spans != ((0, positions.length),)
            or own.spans != ((positions.length - own.length, positions.length),)
            for own, positions in zip(rows, buffered, strict=True)
        ),
    )


def seen_keys(queries: ShardMap, keys: ShardMap, mask: Mask, rank: int) -> Seen:
    """The keys that some query of `rank` sees, whoever holds them; whole tiles of a block mask."""
    facts, tiles = mask
    seen: Seen = {}
    for document in queries.documents(rank):
        length = keys.lengths[document]
        visibility = Visibility(facts, queries.lengths[document], length)
        hulls: list[Span] = []
        for start, stop in queries.spans(rank, document):
            # Neither end of the visible keys moves left from one query to the next.
            hull = visibility.key_range(start)[0], visibility.key_range(stop - 1)[1]
            hulls += [hull] if tiles is None else tiles.seen(document, (start, stop), hull)
        joined: list[Span] = []
        for start, stop in sorted((max(a, 0), min(b, length)) for a, b in hulls):
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            elif start < stop:
                joined.append((start, stop))
        seen[document] = tuple(joined)
    return seen


@memoised(64)
def keys_received(queries: ShardMap, keys: ShardMap, mask: Mask) -> list[list[int]]:
    """How many keys every rank receives from every other one."""
    counts = []
    for rank in range(queries.ranks):
        seen = seen_keys(queries, keys, mask, rank)
        counts.append(
            [
                sum(stop - start for _, (start, stop) in _located(keys, source, seen))
                for source in range(queries.ranks)
            ]
        )
        counts[rank][rank] = 0
    return counts


def _located(keys: ShardMap, source: int, seen: Seen) -> Iterator[Located]:
    """The keys of `source` among those that a rank sees."""
    row = 0
    for document, start, stop in keys.pieces[source]:
        for first, last in seen.get(document, ()):
            a, b = max(start, first), min(stop, last)
            if a < b:
                yield (document, a), (row + a - start, row + b - start)
        row += stop - start


def _order(
    by_source: Mapping[int, Sequence[Located]], rank: int, peers: Sequence[int]
) -> tuple[Rows, ...]:
    """The keys found with all sources in the order of documents and positions.

    Args:
        peers: those whose messages arrive.
    """
    located: list[tuple[tuple[int, int], Rows]] = []
    for number, source in enumerate((rank, *peers)):
        row = 0  # of the message
        for position, (start, stop) in by_source.get(source, ()):
            if number:
                start, stop = row, row + stop - start
            located.append((position, Rows(number, start, stop)))
            row += stop - start
    joined: list[Rows] = []
    for _, rows in sorted(located):
        if joined and joined[-1][::2] == (rows.source, rows.start):
            joined[-1] = joined[-1]._replace(stop=rows.stop)
        else:
            joined.append(rows)
    return tuple(joined)


def starts(positions: Sequence[Positions]) -> tuple[int, ...]:
    """The cumulative lengths of the sequences of one side."""
    return tuple(accumulate((p.length for p in positions), initial=0))


class Step(NamedTuple):
    """One exchange and the call on what it brings."""

    number: int
    query_heads: slice
    key_heads: slice
    stage: Stage
    is_first: bool  # of the stages of these heads
    has_call: bool  # there is something to compute
    has_all_heads: bool
    # Of a step without messages: its keys, if they are rows of the rank's own in one piece.
    own: Span | None

    def has_own_rows(self, rows: int) -> bool:
        """Whether all of the rank's own keys lie in the buffer, in one piece."""
        own = [(start, stop) for source, start, stop in self.stage.order if source == 0]
        return own == [(0, rows)]

    def of_queries(self, x: Tensor) -> Tensor:
        """Its heads of a tensor (tokens, query heads, ...)."""
        return x if self.has_all_heads else x[:, self.query_heads]


def steps_of(schedule: Schedule, head_groups: int, heads: tuple[int, int]) -> list[Step]:
    """The steps in their order. The first call of some heads handles rows without keys, too.

    Args:
        heads: those of queries and of keys on this rank.
    """
    counts = [count // head_groups for count in heads]
    steps: list[Step] = []
    for group in range(head_groups):
        of_queries, of_keys = (slice(group * count, (group + 1) * count) for count in counts)
        for number, stage in enumerate(schedule.stages):
            is_first = number == 0
            has_call = counts[0] > 0 and len(stage.keys) > 0 and (is_first or stage.rows > 0)
            whole = head_groups == 1
            is_local = not stage.sends and not stage.receives and len(stage.order) == 1
            own = stage.order[0][1:] if whole and is_local else None
            steps.append(
                Step(len(steps), of_queries, of_keys, stage, is_first, has_call, whole, own)
            )
    return steps
