"""A wire on which numbers travel in fewer bytes than they are added up in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .wire import Pending, Wire


class RoundedWire:
    """`wire`, on which all tensors travel in `dtype` and arrive in their own."""

    def __init__(self, wire: Wire, dtype: torch.dtype) -> None:
        self.wire, self.dtype = wire, dtype
        self.rank, self.ranks, self.global_ranks = wire.rank, wire.ranks, wire.global_ranks

    def exchange(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], what: str
    ) -> Pending:
        """See `Wire`."""
        arriving = {peer: torch.empty_like(x, dtype=self.dtype) for peer, x in receives.items()}
        rounded = {peer: x.to(self.dtype) for peer, x in sends.items()}
        return _Arrival(self.wire.exchange(rounded, arriving, what), arriving, receives)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See `Wire`; these bytes stay as they are."""
        return self.wire.all_gather(x)


class _Arrival:
    def __init__(
        self, pending: Pending, arriving: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> None:
        self.pending, self.arriving, self.receives = pending, arriving, receives

    def wait(self) -> None:
        self.pending.wait()
        for peer, x in self.receives.items():
            x.copy_(self.arriving[peer])


def rounded(wire: Wire, dtype: torch.dtype | None) -> Wire:
    """The wire itself where `dtype` is None."""
    return wire if dtype is None else RoundedWire(wire, dtype)
