"""Ways to divide documents among ranks.

A causal mask shows few keys to the first tokens of a document and many to its last ones. Zigzag
gives each rank one piece from the front and one from the back of a sequence, so that the ranks have
equal work (ring-flash-attention; Striped Attention, Brandon et al. 2023, has the problem). Zigzag
over every document cuts short documents into crumbs, and most keys have to travel. `carve`
therefore divides long documents among as few ranks as they need and leaves short ones whole;
`refine` then exchanges tokens until no rank has much more work than the mean.

Every way gives each rank the same number of tokens, up to one grain for each document.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from .ownership import Ownership, Piece
from .work import Work

Lengths = Sequence[int]


def largest_grain(lengths: Sequence[int], ranks: int, grain: int, unit: int) -> int:
    """The largest power of two up to `grain` of which zigzag gives every rank some tokens, made a
    multiple of `unit`."""
    most = min(grain, max(4, max(lengths, default=0) // (2 * ranks)))
    return -(-(1 << (most.bit_length() - 1)) // unit) * unit


def divided(way: str, work: Work, ranks: int) -> Ownership:
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


def contiguous(lengths: Lengths, ranks: int, grain: int) -> Ownership:
    """Each rank gets the next equal part of the tokens of all documents: best for windows."""
    return Ownership.of(lengths, _parts(lengths, ranks, grain))


def zigzag(lengths: Lengths, ranks: int, grain: int) -> Ownership:
    """The tokens of all documents, in 2 x ranks parts: rank r gets parts r and 2 ranks - 1 - r."""
    parts = _parts(lengths, 2 * ranks, grain)
    return Ownership.of(lengths, [parts[r] + parts[2 * ranks - 1 - r] for r in range(ranks)])


def carve(work: Work, ranks: int) -> Ownership:
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
    return Ownership.of(work.lengths, shares.pieces)


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


class _Exchange(NamedTuple):
    """Tokens at the end of a piece of one rank for as many at the start of a piece of another."""

    score: float  # how far from what is wanted, and how many more keys travel; less is better
    dear: Piece
    cheap: Piece
    tokens: int
    gain: float  # the work that moves


def refine(ownership: Ownership, work: Work, slack: float = 0.02, limit: int = 2000) -> Ownership:
    """Exchange equal numbers of tokens between the rank with the most work and one with little,
    until no rank has more than ``1 + slack`` times the mean.

    Pieces of documents whose lengths are no multiples of the grain may then begin at any token,
    but always at multiples of `work.unit`.
    """
    pieces = [list(mine) for mine in ownership.pieces]
    load = [sum(work.scores(*piece) for piece in mine) for mine in pieces]
    mean = sum(load) / len(load)
    for _ in range(limit):
        heavy = max(range(len(load)), key=lambda r: load[r])
        if load[heavy] <= mean * (1 + slack):
            break
        for light in sorted(range(len(load)), key=lambda r: load[r])[:4]:
            want = min(load[heavy] - mean, mean - load[light])
            found = _best_exchange(pieces[heavy], pieces[light], want, work) if want > 0 else None
            if found is not None:
                _move(pieces[heavy], pieces[light], found)
                load[heavy] -= found.gain
                load[light] += found.gain
                break
        else:
            break
    return Ownership.of(ownership.lengths, pieces)


def _best_exchange(
    heavy: list[Piece], light: list[Piece], want: float, work: Work
) -> _Exchange | None:
    known = {piece.document for piece in light}
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
            fetched = 0 if dear.document in known else dear.stop
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
    cuts = _cuts(length, len(order), grain)
    return [(rank, Piece(document, *cut)) for rank, cut in zip(order, pairwise(cuts), strict=True)]


def _cuts(length: int, parts: int, grain: int) -> list[int]:
    """Where `parts` nearly equal parts begin, at multiples of the grain, and the end."""
    inner = [min(length, round(length * i / parts / grain) * grain) for i in range(parts)]
    return [*inner, length]


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
