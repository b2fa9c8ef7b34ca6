"""A block mask as plain data: which tiles show anything, to plan exchanges and to balance by."""

from __future__ import annotations

import hashlib
from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..masks import EMPTY, BlockMask
from ..positions import Span


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
        state = kinds._version if kinds.is_cuda else kinds.numpy().tobytes()
        known = _known.get(mask)
        if known is None or known[0] != state:
            known = _known[mask] = state, cls._read(mask)
        return known[1]

    @classmethod
    def _read(cls, mask: BlockMask) -> TileMap:
        kinds = mask.kinds.cpu()
        seen = (kinds != EMPTY).any(1).tolist()
        columns = tuple(
            tuple(tuple(n for n, is_seen in enumerate(row) if is_seen) for row in document)
            for document in seen
        )
        sizes = repr((mask.tile_size, tuple(kinds.shape))).encode()
        digest = hashlib.sha256(sizes + kinds.contiguous().numpy().tobytes()).hexdigest()[:12]
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


_known: WeakKeyDictionary[BlockMask, tuple[int | bytes, TileMap]] = WeakKeyDictionary()
