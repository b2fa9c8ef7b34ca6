"""The cost model of the benchmarks, and what it says about the strategies of the package."""

from __future__ import annotations

from math import prod

import pytest
from test_strategy import ANY, drawn, one_sequence

from benchmarks.context.comm_volume import CommVolume
from benchmarks.context.cost_model import CostModel, Shape, fastest, strategies
from flashtile.distributed.schedule import keys_received
from flashtile.distributed.strategy import Host, Link, Strategy, Workload, select_strategy

pytestmark = pytest.mark.slow


def model_of(workload: Workload) -> CostModel:
    shape = Shape(*workload.heads, 128, 128, *workload.sizes)
    return CostModel(workload.machine, shape, *workload[4:7])


@pytest.mark.parametrize("seed", range(20))
def test_every_strategy_is_compared(seed: int) -> None:
    model = model_of(drawn(seed))
    prices = {way: model.slowest(way).seconds for way in strategies(model)}
    assert fastest(model) == min(prices, key=lambda way: (prices[way], way))
    assert all(model.at_least(way) <= seconds for way, seconds in prices.items())


@pytest.mark.parametrize("seed", range(20))
def test_keys_are_counted_as_in_the_schedules(seed: int) -> None:
    workload = drawn(seed)
    volume = CommVolume(workload.queries, workload.keys, workload.facts)
    received = keys_received(workload.queries, workload.keys, (workload.facts, None))
    for rank, row in enumerate(received):
        for transfer in volume.transfers(rank):
            assert transfer.received == row[transfer.source]
            assert transfer.sent == (
                received[transfer.target][rank] if transfer.target != rank else 0
            )


def test_the_longer_of_computing_and_exchanging_counts() -> None:
    """With one of both free, the other one adds up."""
    strategy, base = Strategy(1, 4, 1), model_of(one_sequence(4, 4096, 8, 2))
    machine = base.machine._replace(contention=0.0)
    free = machine._replace(
        forward=1e30, backward=1e30, memory=1e30, launch=0.0, host=Host(0.0, 0.0, 0.0)
    )
    size = 2 * 256  # numbers of a key and its value, with two heads
    keys = base.slowest(strategy).received
    base.machine = free._replace(inside=Link(1e9, 0.0))
    price = base.slowest(strategy)
    assert price.forward == pytest.approx(keys * size * 2 / 1e9)
    assert price.backward == pytest.approx(keys * size * (2 + 4) / 1e9)
    base.machine = machine._replace(inside=Link(1e30, 0.0), across=Link(1e30, 0.0))
    alone = base.slowest(strategy).seconds
    base.machine = base.machine._replace(inside=Link(1e15, 0.0))
    assert base.slowest(strategy).seconds == pytest.approx(alone, rel=1e-3)


def test_the_selected_strategy_is_nearly_the_fastest_of_all() -> None:
    """On the ranks of a node, by this model: why the package has a simple price."""
    losses = []
    for ranks in (2, 3, 4, 6, 8):
        for tokens in (1024, 4096, 16384):
            for heads in ((32, 8), (32, 32), (16, 2), (24, 8)):
                for way in ("zigzag", "contiguous"):
                    workload = one_sequence(ranks, tokens, *heads, way=way)
                    model, selected = model_of(workload), select_strategy(ANY, workload)
                    best = model.slowest(fastest(model)).seconds
                    losses.append(model.slowest(selected).seconds / best)
    assert prod(losses) ** (1 / len(losses)) < 1.005
    assert max(losses) < 1.1
