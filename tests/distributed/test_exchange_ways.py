"""Exchanges of ranks that take different ways, in terms of what NCCL is told: each send has a
receive on the other side, because NCCL waits for ever for one that is missing."""

from __future__ import annotations

import random

import pytest
import torch

from flashtile.distributed.wire import can_be_one_operation


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
