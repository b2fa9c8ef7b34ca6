"""Who exchanges what with whom in the calls of one kind in a layout: made once, since the layers of
a model and the steps of a layout share it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..problem import Operands, Options
from .arguments import UsedTokens
from .collectives import SubWire, Wire
from .layout import Layout
from .partition import TileMap, first_documents
from .schedule import Schedule, schedule
from .strategy import Strategy
from .ulysses import Exchange, HeadShare, Ulysses, merged, share_heads


class Call(NamedTuple):
    """A checked call of one rank."""

    operands: Operands  # packed, without padding, without lengths
    options: Options
    backend: str | None
    strategy: Strategy
    used: UsedTokens
    tiles: TileMap | None
    bias_has_rows: bool

    @property
    def heads(self) -> tuple[int, int]:
        """Those of queries and of keys."""
        return self.operands.q.shape[1], self.operands.k.shape[1]


class Paths(NamedTuple):
    """Neighbours exchange heads; those with the same index among their neighbours, keys."""

    schedule: Schedule  # of this rank and its neighbours
    first_head: int  # of this rank
    wire: Wire  # of the ranks that exchange keys
    neighbours: Ulysses | None


def paths_of(call: Call, layout: Layout, gradient_dtype: torch.dtype | None) -> Paths:
    """The paths of a call in its layout.

    Args:
        gradient_dtype: of dK and dV on the wire; None is that of their sums.
    """
    of_part = call.used.query_rows is not None or call.used.key_rows is not None
    if of_part or call.operands.bias is not None:  # they depend on more than the kind
        return _made(call, layout, gradient_dtype)
    kind = call.strategy, call.options.facts, call.tiles and call.tiles.digest, call.heads
    found: Paths | None = layout.paths.get(kind)
    if found is None:
        found = layout.paths[kind] = _made(call, layout, gradient_dtype)
    return found


def _made(call: Call, layout: Layout, gradient_dtype: torch.dtype | None) -> Paths:
    ulysses, stages, _ = call.strategy
    wire = layout.wire
    outer, inner = divmod(wire.rank, ulysses)
    shares = share_heads(*call.heads, ulysses)
    groups = [range(first, first + ulysses) for first in range(0, wire.ranks, ulysses)]
    queries, keys = (merged(x, groups) for x in (call.used.queries, call.used.keys))
    neighbours = None
    if ulysses > 1:
        neighbours = _neighbours(call, layout, groups[outer], shares, gradient_dtype)
    return Paths(
        schedule(queries, keys, call.options.facts, outer, stages, call.tiles),
        shares[inner].queries.start,
        wire if ulysses == 1 else SubWire(wire, [group[inner] for group in groups]),
        neighbours,
    )


def _neighbours(
    call: Call,
    layout: Layout,
    members: range,
    shares: list[HeadShare],
    gradient_dtype: torch.dtype | None,
) -> Ulysses:
    """How this rank and its neighbours exchange tokens for heads."""
    wire = SubWire(layout.wire, members)
    bias, rows = call.operands.bias, None
    if bias is not None and call.bias_has_rows:
        holders = call.used.queries
        if layout.sequences:  # where the bias has no batch, the rows of one stand for all
            holders = first_documents(layout.queries, bias.shape[0])
        rows = Exchange.of(wire, holders, members)
    return Ulysses(
        tuple(shares),
        Exchange.of(wire, call.used.queries, members),
        Exchange.of(wire, call.used.keys, members),
        rows,
        call.heads,
        gradient_dtype,
    )
