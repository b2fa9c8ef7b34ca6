"""The cost model plans faster than it did, and chooses as it did."""

from __future__ import annotations

import random

import pytest
import torch
from test_schedule import CAUSAL, random_facts

from flashtile.distributed import balance, cost
from flashtile.distributed.choice import Wanted, candidates, choose
from flashtile.distributed.cost import Pricing, Shape, Way
from flashtile.distributed.machine import MACHINES, Host
from flashtile.distributed.schedule import schedule
from flashtile.distributed.tile_map import TileMap
from flashtile.distributed.traffic import Traffic
from flashtile.distributed.work import Work
from flashtile.masks import BlockMask, Visibility, Window

pytestmark = pytest.mark.slow

HEADS = [(1, 1), (7, 1), (8, 2), (12, 3), (32, 8), (64, 8)]


def drawn(seed: int) -> tuple[Pricing, Wanted]:
    """Documents on up to 64 ranks, and what the caller wants."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4, 6, 8, 8, 16, 24, 64])
    most = rng.choice([100, 3000, 20000])
    lengths = [rng.randint(0, most) for _ in range(rng.choice([1, 3, 30]))]
    keys = lengths if rng.random() < 0.7 else [rng.randint(0, most) for _ in lengths]
    facts = rng.choice([CAUSAL, CAUSAL, (Window(700, 0),), random_facts(rng)])
    grain = rng.choice([4, 128])
    work = Work([(facts, None, 1)], lengths, keys, grain)
    queries = balance.divided(rng.choice(["contiguous", "zigzag", "documents"]), work, ranks)
    holders = queries if keys == lengths else balance.contiguous(keys, ranks, grain)
    shape = Shape(*rng.choice(HEADS), 64, rng.choice([64, 128]), 2)
    machine = MACHINES[rng.choice(list(MACHINES))]._replace(node=rng.choice([2, 4, 8]))
    wanted = Wanted("auto", rng.choice(["auto", "auto", 1, 2]), None, None)
    return Pricing(machine, shape, queries, holders, facts), wanted


# The way of every seed, and the microseconds of the slowest rank, when a schedule was made to price
# each way on each rank.
CHOSEN = (
    (1, 2, 1, 323.194), (1, 3, 1, 356660.232), (1, 2, 1, 95.388), (1, 1, 8, 86999.841),
    (1, 2, 1, 633.076), (8, 1, 1, 10926156.067), (1, 1, 1, 310.880), (1, 2, 1, 91.307),
    (1, 1, 1, 24.049), (24, 1, 1, 14571252.729), (1, 2, 1, 210.387), (2, 3, 1, 953.279),
    (4, 2, 1, 2829.391), (1, 2, 1, 88.455), (1, 1, 1, 350.013), (1, 2, 1, 2471.866),
    (1, 2, 1, 463.258), (1, 1, 1, 429.834), (1, 1, 3, 5924.106), (1, 1, 1, 1495.921),
    (1, 1, 1, 160.633), (1, 1, 1, 3062920.957), (1, 1, 1, 84.988), (1, 1, 1, 25.758),
    (1, 3, 1, 67380.173), (1, 1, 1, 146.055), (6, 1, 1, 4845.002), (1, 1, 1, 144.287),
    (1, 1, 1, 24.000), (1, 2, 1, 161.578), (1, 1, 1, 24.000), (1, 2, 1, 103.097),
    (1, 2, 1, 88.357), (1, 1, 1, 181.649), (4, 1, 1, 1061.295), (1, 2, 1, 166.670),
    (1, 1, 1, 100.000), (1, 1, 2, 12303.684), (1, 2, 1, 183.653), (1, 1, 1, 432.728),
    (1, 2, 1, 3080.487), (1, 1, 1, 322.220), (1, 2, 1, 87.006), (1, 1, 2, 335.142),
    (1, 2, 1, 2327.829), (1, 2, 1, 144.912), (1, 1, 1, 285.537), (1, 2, 1, 148.816),
    (1, 2, 1, 193.456), (1, 1, 2, 386265.690), (4, 2, 1, 735.886), (2, 2, 2, 33808.095),
    (1, 1, 1, 201.636), (1, 1, 2, 2198.018), (1, 1, 2, 13805.477), (1, 1, 1, 145.781),
    (1, 2, 1, 146.224), (1, 2, 2, 2139.853), (1, 2, 1, 153.972), (1, 1, 1, 147.867),
)  # fmt: skip


@pytest.mark.parametrize("seed", range(len(CHOSEN)))
def test_the_ways_are_those_of_a_slower_planner(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That planner knew no host, fewer bytes of a merge, and no delay by exchanges."""
    monkeypatch.setattr(cost, "MERGE_BYTES", 12)
    pricing, wanted = drawn(seed)
    pricing.machine = pricing.machine._replace(host=Host(0.0, 0.0, 0.0), contention=0.0)
    way = choose(wanted, pricing)
    *numbers, microseconds = CHOSEN[seed]
    assert way == Way(*map(int, numbers))
    assert pricing.slowest(way).seconds * 1e6 == pytest.approx(microseconds, abs=1e-3)


@pytest.mark.parametrize("seed", range(60, 90))
def test_every_way_is_compared(seed: int) -> None:
    pricing, wanted = drawn(seed)
    prices = {way: pricing.slowest(way).seconds for way in candidates(wanted, pricing)}
    assert choose(wanted, pricing) == min(prices, key=lambda way: (prices[way], way))
    assert all(pricing.at_least(way) <= seconds for way, seconds in prices.items())


@pytest.mark.parametrize("seed", range(100, 130))
def test_counted_keys_are_those_of_the_schedules(seed: int) -> None:
    pricing, _ = drawn(seed)
    queries, keys, ranks = pricing.queries, pricing.keys, pricing.ranks
    traffic = Traffic(queries, keys, pricing.facts)
    for rank in {0, 1, ranks - 1}:
        made = schedule(queries, keys, pricing.facts, rank, ranks)
        for hop, stage in zip(traffic.hops(rank), made.stages, strict=True):
            assert hop.received == sum(message.rows for message in stage.receives)
            assert hop.sent == sum(message.rows for message in stage.sends)


@pytest.mark.parametrize("seed", range(20))
def test_block_masks_count(seed: int) -> None:
    """Keys as in the schedules, and the scores of all seen tiles."""
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    ranks, facts = rng.choice([2, 3, 4]), rng.choice([(), CAUSAL])
    lengths = [rng.randint(0, 64) for _ in range(rng.choice([1, 3]))]
    kinds = torch.rand(rng.choice([1, len(lengths)]), 1, 8, 8, generator=g) < 0.5
    tiles = TileMap.of(BlockMask.from_tiles(kinds, (8, 8)))
    work = Work([(facts, tiles, 1)], lengths, grain=8, unit=8)
    holders = balance.divided(rng.choice(["zigzag", "documents"]), work, ranks)
    traffic, scores = Traffic(holders, holders, facts, tiles), 0.0
    for rank in range(ranks):
        made = schedule(holders, holders, facts, rank, ranks, tiles)
        for hop, stage in zip(traffic.hops(rank), made.stages, strict=True):
            assert hop.received == sum(message.rows for message in stage.receives)
            assert hop.sent == sum(message.rows for message in stage.sends)
            scores += hop.scores
    visible = kinds.repeat_interleave(8, 2).repeat_interleave(8, 3).expand(len(lengths), 1, 64, 64)
    seen = 0
    for n, x in zip(lengths, visible, strict=True):
        seen += int((Visibility(facts, n, n).dense() & x[0, :n, :n]).sum())
    assert scores == seen


def test_a_sparse_block_mask_is_cheaper() -> None:
    holders = balance.zigzag([8192], 4, 128)
    tiles = TileMap.of(BlockMask.from_tiles(torch.eye(64, dtype=torch.bool), (128, 128)))
    given = MACHINES["H200"], Shape(8, 2, 128, 128, 2), holders, holders, CAUSAL
    way = Way(1, 1, 1)
    dense, sparse = Pricing(*given).slowest(way), Pricing(*given, tiles).slowest(way)
    assert sparse.received == 0 < dense.received
    assert sparse.scores * 20 < dense.scores
