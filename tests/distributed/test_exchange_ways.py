"""Exchanges of ranks that use different methods, in terms of what NCCL is told: each send has a
receive on the other side, because NCCL waits for ever for one that is missing."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from flashtile.distributed.collectives import ProcessCommunicator, can_be_one_operation
from flashtile.distributed.strategy import MACHINES, measured


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("density", [0.1, 0.5, 0.9, 1.0])
def test_every_send_has_a_receive(ranks: int, density: float) -> None:
    chance = random.Random(f"{ranks} {density}")
    for _ in range(100):
        pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        rows = {pair: chance.choice((0, 1, 1, 1)) for pair in pairs if chance.random() < density}
        sent, received = set(), set()
        for rank in range(ranks):
            sends = {b: torch.empty(n) for (a, b), n in rows.items() if a == rank}
            receives = {a: torch.empty(n) for (a, b), n in rows.items() if b == rank}
            to, source = posted(rank, ranks, sends, receives)
            sent |= {(rank, peer) for peer in to}
            received |= {(peer, rank) for peer in source}
        assert sent == received
        assert {pair for pair, n in rows.items() if n} <= sent


def posted(rank, ranks, sends, receives):
    """The ranks to which PyTorch sends and those from which it receives: without a message it calls
    nothing, and `all_to_all` posts a send and a receive for every rank."""
    given = [*sends.values(), *receives.values()]
    if not any(x.numel() for x in given):
        return set(), set()
    if can_be_one_operation(rank, ranks, sends, receives):
        others = set(range(ranks)) - {rank}
        return others, others
    return tuple({peer for peer, x in side.items() if x.numel()} for side in (sends, receives))


def test_ranks_that_all_exchange_make_one_operation() -> None:
    """Which takes the host less time than a batch of messages."""
    x = torch.empty(3)
    assert can_be_one_operation(1, 4, dict.fromkeys((0, 2, 3), x), dict.fromkeys((0, 2, 3), x))
    assert can_be_one_operation(0, 2, {1: x}, {})
    assert not can_be_one_operation(1, 4, dict.fromkeys((0, 2, 3), x), dict.fromkeys((0, 2), x))


class NcclCommunicator(ProcessCommunicator):
    """Rank 0 of a group that NCCL connects, in a process of its own."""

    def __init__(self, ranks: int) -> None:
        self.rank, self.ranks, self.global_ranks = 0, ranks, list(range(ranks))
        self._group: Any = object
        self._has_all_to_all = True

    def _all_to_all(self, sends: Any, receives: Any, what: str) -> Any:
        return "all_to_all"


@pytest.mark.parametrize(
    ("ranks", "sends", "receives", "method"),
    [
        (4, (1, 2, 3), (1, 2, 3), "all_to_all"),
        (4, (1, 2, 3), (1, 2), "batch"),
        (4, (1,), (), "batch"),
        (2, (1,), (), "all_to_all"),
    ],
)
def test_the_group_makes_one_operation_only_where_it_can(
    ranks, sends, receives, method, monkeypatch
) -> None:
    monkeypatch.setattr(dist, "P2POp", lambda function, x, *_: SimpleNamespace(tensor=x))
    started: list[list[Any]] = []
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda batch: started.append(batch) or [])
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, device="cuda")
        pending = NcclCommunicator(ranks).exchange(
            dict.fromkeys(sends, x), dict.fromkeys(receives, x), "x"
        )
    if method == "batch":
        assert [len(batch) for batch in started] == [len(sends) + len(receives)]
    else:
        assert (pending, started) == ("all_to_all", [])


@pytest.mark.parametrize("rank", range(2))
def test_all_ranks_meet_before_links_are_measured(rank: int) -> None:
    """NCCL connects the ranks in its first operation. Rank 2 is alone in its node and exchanges
    nothing there, so that the others would wait for it."""
    calls: list[str] = []

    def all_gather(x: torch.Tensor) -> list[torch.Tensor]:
        calls.append("all_gather")
        return [torch.ones(x.shape)] * 3

    def exchange(*_: Any) -> Any:
        calls.append("exchange")
        return SimpleNamespace(wait=lambda: None)

    comm: Any = SimpleNamespace(rank=rank, ranks=3, all_gather=all_gather, exchange=exchange)
    measured(comm, MACHINES["H200"]._replace(node=2), torch.device("meta"))
    assert calls[0] == "all_gather"
