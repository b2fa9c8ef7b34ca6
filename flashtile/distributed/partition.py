"""Which rank holds which tokens, and how documents are divided among ranks.

A causal mask shows few keys to the first tokens of a document and many to its last ones. Zigzag
gives each rank one piece from the front and one from the back of a sequence, so that the ranks have
equal work (ring-flash-attention; Striped Attention, Brandon et al. 2023, has the problem). Zigzag
over every document cuts short documents into crumbs, and most keys have to travel. `carve`
therefore divides long documents among as few ranks as they need and leaves short ones whole;
`refine` then exchanges tokens until no rank has much more work than the mean.

Every way gives each rank the same number of tokens, up to one grain for each document.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from math import ceil
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from ..call import checks
from ..call.options import WindowSize
from ..masks import EMPTY, BlockMask, Chunk, Span, Visibility, Window, structure


class Piece(NamedTuple):
    """The tokens ``[start, stop)`` of a document."""

    document: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many they are."""
        return self.stop - self.start


class ShardMap(NamedTuple):
    """The pieces of every rank. A rank holds its tokens in the order of its pieces, which are
    sorted by document and position."""

    lengths: tuple[int, ...]  # tokens of every document
    pieces: tuple[tuple[Piece, ...], ...]  # of every rank

    @classmethod
    def of(cls, lengths: Sequence[int], pieces: Sequence[Sequence[Piece]]) -> ShardMap:
        """Sort the pieces of every rank, join neighbours, and drop empty ones.

        Raises:
            ValueError: the pieces do not cover every token exactly once.
        """
        shard_map = cls(tuple(lengths), tuple(tuple(_joined(owned)) for owned in pieces))
        every = _joined([piece for owned in shard_map.pieces for piece in owned])
        if every != [Piece(d, 0, n) for d, n in enumerate(lengths) if n > 0]:
            raise ValueError(
                f"pieces: they do not cover documents of {tuple(lengths)} tokens exactly once"
            )
        return shard_map

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.pieces)

    def tokens(self, rank: int) -> int:
        """How many tokens a rank holds."""
        return sum(piece.tokens for piece in self.pieces[rank])

    def documents(self, rank: int) -> list[int]:
        """The documents of which a rank holds tokens, in the order in which it holds them."""
        return list(dict.fromkeys(piece.document for piece in self.pieces[rank]))

    def spans(self, rank: int, document: int) -> tuple[Span, ...]:
        """The tokens of a document that a rank holds."""
        owned = self.pieces[rank]
        return tuple((piece.start, piece.stop) for piece in owned if piece.document == document)

    def first_tokens(self, lengths: Sequence[int]) -> ShardMap:
        """Who owns which of the first ``lengths[d]`` tokens of every document d."""
        pieces = [
            [p._replace(stop=min(p.stop, lengths[p.document])) for p in owned]
            for owned in self.pieces
        ]
        return ShardMap.of(lengths, [[p for p in owned if p.tokens > 0] for owned in pieces])

    def rows_of_first(self, lengths: Sequence[int], rank: int) -> list[int]:
        """The rows of a rank's tensor that hold these tokens."""
        rows: list[int] = []
        row = 0
        for document, start, stop in self.pieces[rank]:
            rows += range(row, row + min(stop, lengths[document]) - start)
            row += stop - start
        return rows

    def digest(self) -> str:
        """64 hexadecimal digits that differ when ownerships differ."""
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()


def first_documents(shard_map: ShardMap, count: int) -> ShardMap:
    """Who owns which tokens of the first `count` documents."""
    pieces = [[piece for piece in owned if piece.document < count] for owned in shard_map.pieces]
    return ShardMap.of(shard_map.lengths[:count], pieces)


def repeated(shard_map: ShardMap, batch: int) -> ShardMap:
    """Every sequence of a dense batch divided in the same way."""
    pieces = [
        [piece._replace(document=b) for b in range(batch) for piece in owned]
        for owned in shard_map.pieces
    ]
    return ShardMap.of(shard_map.lengths * batch, pieces)


def is_divided(queries: ShardMap, keys: ShardMap, neighbours: int) -> bool:
    """Whether a document has tokens on several groups of `neighbours`."""
    owners = {
        (piece.document, rank // neighbours)
        for shards in (queries, keys)
        for rank, owned in enumerate(shards.pieces)
        for piece in owned
    }
    return len(owners) > len({document for document, _ in owners})


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in sorted(pieces):
        last = joined[-1] if joined else None
        if last and (last.document, last.stop) == (piece.document, piece.start):
            joined[-1] = last._replace(stop=piece.stop)
        elif piece.tokens > 0:
            joined.append(piece)
    return joined


def _bytes(kinds: Tensor) -> bytes:
    """The values of a tensor on the CPU. NumPy would copy them, too, but need not be installed."""
    kinds = kinds.contiguous()
    return ctypes.string_at(kinds.data_ptr(), kinds.nbytes)


class TileMap(NamedTuple):
    """The tiles of a block mask that some head sees. Tiles count from the first query and the first
    key of a document, of which a rank may hold parts that begin at multiples of the tile."""

    BM: int
    BN: int
    # The seen tiles of keys, for every document, or one for all of them, and every tile of queries.
    columns: tuple[tuple[tuple[int, ...], ...], ...]
    digest: str  # differs when masks have different tiles

    @classmethod
    def of(cls, mask: BlockMask) -> TileMap:
        """Read a mask; the host waits for a GPU once for each mask."""
        kinds = mask.kinds
        # On the CPU the values themselves are compared, because NumPy and `.data` change them
        # without a new version. On a GPU only the version is: the rest would have to be waited for.
        state = kinds._version if kinds.is_cuda else _bytes(kinds)
        entry = _tile_maps.get(mask)
        if entry is None or entry[0] != state:
            entry = _tile_maps[mask] = state, cls._read(mask)
        return entry[1]

    @classmethod
    def _read(cls, mask: BlockMask) -> TileMap:
        kinds = mask.kinds.cpu()
        seen = (kinds != EMPTY).any(1).tolist()
        columns = tuple(
            tuple(tuple(n for n, is_seen in enumerate(row) if is_seen) for row in document)
            for document in seen
        )
        sizes = repr((mask.tile_size, tuple(kinds.shape))).encode()
        digest = hashlib.sha256(sizes + _bytes(kinds)).hexdigest()[:12]
        return cls(*mask.tile_size, columns, digest)

    def shared(self) -> TileMap:
        """The tiles that are seen in some document, as if they were in all of them."""
        rows = zip(*self.columns, strict=True)
        return self._replace(columns=(tuple(tuple(sorted({*chain(*row)})) for row in rows),))

    def seen(self, document: int, queries: Span, hull: Span) -> list[Span]:
        """Whole tiles of keys that some of the `queries` see, of those that touch `hull`."""
        rows = self._rows(document)[queries[0] // self.BM : -(-queries[1] // self.BM)]
        first, last = hull[0] // self.BN, -(-hull[1] // self.BN)
        tiles = sorted({n for row in rows for n in row if first <= n < last})
        return [(n * self.BN, (n + 1) * self.BN) for n in tiles]

    def keys_of(self, document: int, query: int, visible: Span) -> int:
        """How many of the keys `visible` lie in tiles that a query sees."""
        start, stop = visible
        return sum(
            max(0, min(stop, (n + 1) * self.BN) - max(start, n * self.BN))
            for n in self._rows(document)[query // self.BM]
        )

    def _rows(self, document: int) -> tuple[tuple[int, ...], ...]:
        return self.columns[document if len(self.columns) > 1 else 0]


_tile_maps: WeakKeyDictionary[BlockMask, tuple[int | bytes, TileMap]] = WeakKeyDictionary()


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
        key = (M, N, document if self._is_own else 0)
        if key not in self._prefixes:
            self._prefixes[key] = self._prefix(*key)
        prefix = self._prefixes[key]
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


Lengths = Sequence[int]


def largest_grain(lengths: Sequence[int], ranks: int, grain: int, unit: int) -> int:
    """The largest power of two up to `grain` of which zigzag gives every rank some tokens, made a
    multiple of `unit`."""
    most = min(grain, max(4, max(lengths, default=0) // (2 * ranks)))
    return -(-(1 << (most.bit_length() - 1)) // unit) * unit


def divided(way: str, work: Work, ranks: int) -> ShardMap:
    """The tokens of all documents, in a way that the caller names.

    Raises:
        ValueError: there is no such way.
    """
    if way == "contiguous":
        return contiguous(work.lengths, ranks, work.grain)
    if way == "zigzag":
        return zigzag(work.lengths, ranks, work.grain)
    if way == "documents":
        return refine(carve(work, ranks), work)
    raise ValueError(f"way: got {way!r}, want 'auto', 'contiguous', 'zigzag' or 'documents'")


def contiguous(lengths: Lengths, ranks: int, grain: int) -> ShardMap:
    """Each rank gets the next equal part of the tokens of all documents: best for windows."""
    return ShardMap.of(lengths, _parts(lengths, ranks, grain))


def zigzag(lengths: Lengths, ranks: int, grain: int) -> ShardMap:
    """The tokens of all documents, in 2 x ranks parts: rank r gets parts r and 2 ranks - 1 - r."""
    parts = _parts(lengths, 2 * ranks, grain)
    return ShardMap.of(lengths, [parts[r] + parts[2 * ranks - 1 - r] for r in range(ranks)])


def carve(work: Work, ranks: int) -> ShardMap:
    """Long documents go zigzag over as few ranks as can carry them, short ones stay whole.

    A document is long when its work or its tokens are more than a rank's share.
    """
    shares = _Shares(work, ranks)
    short = []
    for document in sorted(range(len(work.lengths)), key=lambda d: (-work.lengths[d], d)):
        length = work.lengths[document]
        needed = max(
            ceil(work.scores(document, 0, length) / shares.work_share - 1e-9),
            ceil(length / shares.token_share),
        )
        if needed <= 1:
            short.append(document)
            continue
        chosen = shares.with_room(length, min(max(needed, 2), ranks))
        for rank, piece in _zigzag_pieces(document, length, sorted(chosen), work.grain):
            shares.give(rank, piece)
    for document in short:
        shares.give_whole(document)
    return ShardMap.of(work.lengths, shares.pieces)


class _Shares:
    """What each rank has been given so far."""

    def __init__(self, work: Work, ranks: int) -> None:
        self.work, self.ranks = work, range(ranks)
        self.token_share = max(1, ceil(sum(work.lengths) / ranks / work.grain) * work.grain)
        self.work_share = max(work.total() / ranks, 1.0)
        self.tokens = [0] * ranks
        self.load = [0.0] * ranks
        self.pieces: list[list[Piece]] = [[] for _ in self.ranks]

    def give(self, rank: int, piece: Piece) -> None:
        self.pieces[rank].append(piece)
        self.tokens[rank] += piece.tokens
        self.load[rank] += self.work.scores(*piece)

    def with_room(self, length: int, count: int) -> list[int]:
        """The emptiest `count` ranks, or more of them, that have room for a part of `length` tokens
        each; all ranks when there are not enough."""
        emptiest = sorted(
            self.ranks,
            key=lambda r: (self.load[r] / self.work_share + self.tokens[r] / self.token_share, r),
        )
        for number in range(count, len(self.ranks) + 1):
            part = length / number
            fitting = [r for r in emptiest if self.tokens[r] + part <= self.token_share]
            if len(fitting) >= number:
                return fitting[:number]
        return emptiest

    def give_whole(self, document: int) -> None:
        """A short document to the rank with the least work that has room; cut where none has."""
        start, stop = 0, self.work.lengths[document]
        while start < stop:
            left = stop - start
            roomy = [r for r in self.ranks if self.tokens[r] + left <= self.token_share]
            if roomy:
                rank = min(roomy, key=lambda r: (self.load[r], self.tokens[r], r))
            else:
                rank = min(self.ranks, key=lambda r: (self.tokens[r], r))
                room = (self.token_share - self.tokens[rank]) // self.work.grain * self.work.grain
                left = min(left, max(room, self.work.grain))
            self.give(rank, Piece(document, start, start + left))
            start += left


MOST_WORK = 1.02  # of a rank, where the mean is 1
MOST_EXCHANGES = 2000


class _Exchange(NamedTuple):
    """Tokens at the end of a piece of one rank for as many at the start of a piece of another."""

    score: float  # how far from what is wanted, and how many more keys travel; less is better
    dear: Piece
    cheap: Piece
    tokens: int
    gain: float  # the work that moves


def refine(shard_map: ShardMap, work: Work) -> ShardMap:
    """Exchange equal numbers of tokens between the rank with the most work and one with little,
    until no rank has more than `MOST_WORK` times the mean.

    Pieces of documents whose lengths are no multiples of the grain may then begin at any token,
    but always at multiples of `work.unit`.
    """
    pieces = [list(owned) for owned in shard_map.pieces]
    load = [sum(work.scores(*piece) for piece in owned) for owned in pieces]
    mean = sum(load) / len(load)
    for _ in range(MOST_EXCHANGES):
        heavy = max(range(len(load)), key=lambda r: load[r])
        if load[heavy] <= mean * MOST_WORK:
            break
        for light in sorted(range(len(load)), key=lambda r: load[r])[:4]:
            want = min(load[heavy] - mean, mean - load[light])
            exchange = (
                _best_exchange(pieces[heavy], pieces[light], want, work) if want > 0 else None
            )
            if exchange is not None:
                _move(pieces[heavy], pieces[light], exchange)
                load[heavy] -= exchange.gain
                load[light] += exchange.gain
                break
        else:
            break
    return ShardMap.of(shard_map.lengths, pieces)


def _best_exchange(
    heavy: list[Piece], light: list[Piece], want: float, work: Work
) -> _Exchange | None:
    documents = {piece.document for piece in light}
    held = sum(piece.tokens for piece in light)
    best: _Exchange | None = None
    for dear in heavy:
        for cheap in light:
            most = min(dear.tokens, cheap.tokens)
            dearer = _gain(dear, cheap, most, work)
            if dearer <= 0:
                continue
            tokens = int(most * want / dearer) // work.grain * work.grain
            tokens = min(max(tokens, work.grain), most)
            if not _is_allowed(dear, cheap, tokens, work.unit):
                continue
            gain = _gain(dear, cheap, tokens, work)
            if not 0 < gain <= 1.6 * want:
                continue
            fetched = 0 if dear.document in documents else dear.stop
            score = abs(want - gain) / want + 0.5 * fetched / held
            if best is None or score < best.score:
                best = _Exchange(score, dear, cheap, tokens, gain)
    return best


def _is_allowed(dear: Piece, cheap: Piece, tokens: int, unit: int) -> bool:
    """Whether all pieces begin at multiples of `unit` after the exchange."""
    return (tokens == dear.tokens or (dear.stop - tokens) % unit == 0) and (
        tokens == cheap.tokens or (cheap.start + tokens) % unit == 0
    )


def _gain(dear: Piece, cheap: Piece, tokens: int, work: Work) -> float:
    """The work that the heavy rank loses when its last tokens of `dear` go for the first of
    `cheap`."""
    lost = work.scores(dear.document, dear.stop - tokens, dear.stop)
    return lost - work.scores(cheap.document, cheap.start, cheap.start + tokens)


def _move(heavy: list[Piece], light: list[Piece], exchange: _Exchange) -> None:
    _, dear, cheap, tokens, _ = exchange
    heavy.remove(dear)
    light.remove(cheap)
    kept, given = dear._replace(stop=dear.stop - tokens), dear._replace(start=dear.stop - tokens)
    taken, left = (
        cheap._replace(stop=cheap.start + tokens),
        cheap._replace(start=cheap.start + tokens),
    )
    heavy += [piece for piece in (kept, taken) if piece.tokens > 0]
    light += [piece for piece in (left, given) if piece.tokens > 0]


def _zigzag_pieces(
    document: int, length: int, ranks: Sequence[int], grain: int
) -> list[tuple[int, Piece]]:
    """Pieces of one document for `ranks`: the first rank gets the first and the last one."""
    order = [*ranks, *reversed(ranks)]
    parts = len(order)  # nearly equal ones, which begin at multiples of the grain
    starts = [min(length, round(length * i / parts / grain) * grain) for i in range(parts)]
    cuts = pairwise([*starts, length])
    return [(rank, Piece(document, *cut)) for rank, cut in zip(order, cuts, strict=True)]


def _parts(lengths: Lengths, parts: int, grain: int) -> list[list[Piece]]:
    """The tokens of all documents one after the other, in `parts` nearly equal parts."""
    goal = sum(lengths) / parts
    result: list[list[Piece]] = [[] for _ in range(parts)]
    before = 0  # tokens of earlier documents
    for document, length in enumerate(lengths):
        edges = [min(max(goal * i - before, 0), length) for i in range(1, parts)]
        cuts = [0, *(min(length, round(edge / grain) * grain) for edge in edges), length]
        for part, (start, stop) in enumerate(pairwise(cuts)):
            if start < stop:
                result[part].append(Piece(document, start, stop))
        before += length
    return result
