"""Which rank holds which tokens: plain data, equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from ..positions import Positions, Span


class Piece(NamedTuple):
    """The tokens ``[start, stop)`` of a document."""

    document: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many they are."""
        return self.stop - self.start


class Ownership(NamedTuple):
    """The pieces of every rank. A rank holds its tokens in the order of its pieces, which are
    sorted by document and position."""

    lengths: tuple[int, ...]  # tokens of every document
    pieces: tuple[tuple[Piece, ...], ...]  # of every rank

    @classmethod
    def of(cls, lengths: Sequence[int], pieces: Sequence[Sequence[Piece]]) -> Ownership:
        """Sort the pieces of every rank, join neighbours, and drop empty ones.

        Raises:
            ValueError: the pieces do not cover every token exactly once.
        """
        ownership = cls(tuple(lengths), tuple(tuple(_joined(mine)) for mine in pieces))
        every = _joined([piece for mine in ownership.pieces for piece in mine])
        if every != [Piece(d, 0, n) for d, n in enumerate(lengths) if n > 0]:
            raise ValueError(
                f"pieces: they do not cover documents of {tuple(lengths)} tokens exactly once"
            )
        return ownership

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
        mine = self.pieces[rank]
        return tuple((piece.start, piece.stop) for piece in mine if piece.document == document)

    def positions(self, rank: int, document: int) -> Positions:
        """The positions of a rank's rows of a document."""
        return Positions.of(self.spans(rank, document))

    def first_tokens(self, lengths: Sequence[int]) -> Ownership:
        """Who owns which of the first ``lengths[d]`` tokens of every document d."""
        pieces = [
            [p._replace(stop=min(p.stop, lengths[p.document])) for p in mine]
            for mine in self.pieces
        ]
        return Ownership.of(lengths, [[p for p in mine if p.tokens > 0] for mine in pieces])

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


def first_documents(ownership: Ownership, count: int) -> Ownership:
    """Who owns which tokens of the first `count` documents."""
    pieces = [[piece for piece in mine if piece.document < count] for mine in ownership.pieces]
    return Ownership.of(ownership.lengths[:count], pieces)


def repeated(ownership: Ownership, batch: int) -> Ownership:
    """Every sequence of a dense batch divided in the same way."""
    pieces = [
        [piece._replace(document=b) for b in range(batch) for piece in mine]
        for mine in ownership.pieces
    ]
    return Ownership.of(ownership.lengths * batch, pieces)


def is_divided(queries: Ownership, keys: Ownership, neighbours: int) -> bool:
    """Whether a document has tokens on several groups of `neighbours`."""
    owners = {
        (piece.document, rank // neighbours)
        for holders in (queries, keys)
        for rank, mine in enumerate(holders.pieces)
        for piece in mine
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
