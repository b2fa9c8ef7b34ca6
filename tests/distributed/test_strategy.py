"""The strategies, and which of them is selected."""

from __future__ import annotations

import random

import pytest
import torch
from test_schedule import CAUSAL, random_facts, visible_scores

from flashtile.distributed import MACHINES, ContextParallel, partition
from flashtile.distributed.arguments import Arguments
from flashtile.distributed.partition import Piece, ShardMap, TileMap, Work
from flashtile.distributed.schedule import keys_received, schedule
from flashtile.distributed.strategy import (
    Link,
    Requested,
    Strategy,
    Workload,
    candidates,
    keys_at_once,
    seconds,
    select_strategy,
)
from flashtile.masks import BlockMask, Chunk, Window
from flashtile.testing.wires import ThreadCommunicator, run_ranks

ANY = Requested("auto", "auto", None, None)
HEADS = [(1, 1), (7, 1), (8, 2), (12, 3), (32, 8), (64, 8)]
NOTHING_ELSE = (128, 128, 128), (2, 4)  # head dims and sizes


def drawn(seed: int) -> Workload:
    """Documents on up to 24 ranks."""
    rng = random.Random(seed)
    ranks = rng.choice([1, 2, 3, 4, 6, 8, 24])
    most = rng.choice([100, 3000])
    lengths = [rng.randint(0, most) for _ in range(rng.choice([1, 3, 30]))]
    keys = lengths if rng.random() < 0.7 else [rng.randint(0, most) for _ in lengths]
    facts = rng.choice([CAUSAL, (Window(700, 0),), random_facts(rng)])
    grain = rng.choice([4, 128])
    work = Work([(facts, None, 1)], lengths, keys, grain)
    queries = partition.divided(rng.choice(["contiguous", "zigzag", "documents"]), work, ranks)
    holders = queries if keys == lengths else partition.contiguous(keys, ranks, grain)
    machine = MACHINES[rng.choice(list(MACHINES))]._replace(node=rng.choice([2, 4, 8]))
    return Workload(machine, rng.choice(HEADS), *NOTHING_ELSE, queries, holders, facts)


def one_sequence(ranks: int, tokens: int, *heads: int, way: str = "zigzag") -> Workload:
    """A causal sequence with `tokens` on each rank of H200s."""
    holders = partition.divided(way, Work([(CAUSAL, None, 1)], [ranks * tokens]), ranks)
    return Workload(MACHINES["H200"], heads, *NOTHING_ELSE, holders, holders, CAUSAL)  # type: ignore[arg-type]  # two heads


@pytest.mark.parametrize("seed", range(30))
def test_the_cheapest_candidate_is_selected_and_a_request_is_honoured(seed: int) -> None:
    workload = drawn(seed)
    found = candidates(ANY, workload)
    prices = {strategy: seconds(strategy, workload) for strategy in found}
    assert prices[select_strategy(ANY, workload)] == min(prices.values())
    for strategy in found:
        assert select_strategy(Requested(*strategy, None), workload) == strategy
        assert select_strategy(ANY._replace(ulysses=strategy.ulysses), workload) == strategy


@pytest.mark.parametrize("seed", range(30))
def test_keys_are_counted_as_in_the_schedules(seed: int) -> None:
    workload = drawn(seed)
    queries, keys, ranks = workload.queries, workload.keys, workload.queries.ranks
    received = keys_received(queries, keys, (workload.facts, None))
    for rank in {0, ranks // 2, ranks - 1}:
        for stage in schedule(queries, keys, workload.facts, rank, ranks).stages:
            for message in stage.receives:
                assert received[rank][message.peer] == message.rows
                received[rank][message.peer] = 0
        assert not any(received[rank])


@pytest.mark.parametrize("seed", range(10))
def test_tiles_of_a_block_mask_count(seed: int) -> None:
    """Keys as in the schedules, and the scores of all seen tiles."""
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    ranks, lengths = rng.choice([2, 3, 4]), [8 * rng.randint(0, 8), 64]
    kinds = torch.rand(rng.choice([1, 2]), 1, 8, 8, generator=g) < 0.5
    tiles = TileMap.of(BlockMask.from_tiles(kinds, (8, 8)))
    work = Work([((), tiles, 1)], lengths, grain=8, unit=8)
    holders = partition.divided(rng.choice(["zigzag", "documents"]), work, ranks)
    workload = Workload(MACHINES["CPU"], (1, 1), *NOTHING_ELSE, holders, holders, (), tiles)
    received = keys_received(holders, holders, ((), tiles))
    for rank in range(ranks):
        (stage,) = schedule(holders, holders, (), rank, 1, tiles).stages
        assert sum(received[rank]) == sum(message.rows for message in stage.receives)
    seen = sum(
        int(x[0, : n // 8, : n // 8].sum()) * 64
        for n, x in zip(lengths, kinds.expand(2, 1, 8, 8), strict=True)
    )
    assert sum(workload.scores(holders, rank) for rank in range(ranks)) == seen


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tokens", [8, 133])
def test_scores_are_those_of_the_mask(ranks: int, tokens: int) -> None:
    window = (Window(20, 0), Chunk(48))
    for facts in ((), CAUSAL, window):
        holders = partition.zigzag([tokens, 5], ranks, 4)
        workload = Workload(MACHINES["CPU"], (4, 4), *NOTHING_ELSE, holders, holders, facts)
        found = sum(workload.scores(holders, rank) for rank in range(ranks))
        whole = len(visible_scores(facts, [tokens, 5], [tokens, 5]))
        # Between samples the keys of a query are taken to change linearly, as a causal mask's do.
        assert found == (pytest.approx(whole, rel=0.1) if facts == window else whole)


def test_all_ranks_select_alike() -> None:
    def one_rank(comm: ThreadCommunicator) -> Strategy:
        parallel = ContextParallel.over(comm)
        layout = parallel.layout(cu_seqlens=[0, 40, 41, 200])
        x = torch.zeros(layout.local_tokens, 4, 8)
        arguments = Arguments((x, x, x), layout, {"causal": True})
        return parallel._planned(arguments, "kind")[1].strategy

    assert len(set(run_ranks(6, one_rank))) == 1


def test_different_machines_are_a_disagreement() -> None:
    def one_rank(comm: ThreadCommunicator) -> None:
        slow = MACHINES["CPU"]._replace(inside=Link(1e3, 1.0))
        parallel = ContextParallel.over(comm, machine=slow if comm.rank else MACHINES["H200"])
        layout = parallel.layout(seq_len=4096)
        x = torch.zeros(1, layout.local_tokens, 4, 8)
        with pytest.raises(ValueError, match="the ranks disagree on ulysses, stages, head groups"):
            parallel.attention(x, x, x, layout, causal=True)

    run_ranks(4, one_rank)


def test_stage_tokens_limits_what_is_fetched_at_once() -> None:
    workload = one_sequence(16, 1024, 8, 2)
    for limit in (512, 2000, 8000):
        strategy = select_strategy(ANY._replace(stage_tokens=limit), workload)
        assert keys_at_once(strategy, workload) <= limit
    alone = ANY._replace(ulysses=1)
    assert select_strategy(alone._replace(stage_tokens=2000), workload).stages > 1
    with pytest.raises(ValueError, match=r"stage_tokens: got 1, want at least \d+ in this layout"):
        select_strategy(alone._replace(stage_tokens=1), workload)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_keys_at_once_are_those_of_the_largest_exchange(stages: int) -> None:
    workload = one_sequence(4, 300, 8, 2)
    every = [
        sum(message.rows for message in stage.receives)
        for rank in range(4)
        for stage in schedule(workload.queries, workload.keys, CAUSAL, rank, stages).stages
    ]
    assert keys_at_once(Strategy(1, stages, 1), workload) == max(every)
    assert keys_at_once(Strategy(1, stages, 2), workload) == max(every) / 2


def test_expected_strategies() -> None:
    """Those that the papers of Ulysses and of context parallelism in Llama 3 recommend."""
    for tokens in (8192, 65536):
        assert select_strategy(ANY, one_sequence(2, tokens, 32, 8)) == Strategy(1, 1, 1)
    assert select_strategy(ANY, one_sequence(64, 8192, 64, 8)).ulysses == 8  # inside a node
    # The last rank of a contiguous layout sees most: all ranks share the work if they divide heads.
    contiguous = one_sequence(4, 16384, 16, 2, way="contiguous")
    assert select_strategy(ANY, contiguous).ulysses == 4
    # Of a window, only the keys before its own travel.
    assert select_strategy(ANY, contiguous._replace(facts=(Window(1023, 0),))).ulysses == 1


def test_prices_of_gathering_and_of_ulysses() -> None:
    """Without computing, from the bytes of each exchange and the bandwidth of its link."""
    machine = MACHINES["H200"]._replace(forward=1e30, backward=1e30, memory=1e30, node=2)
    machine = machine._replace(inside=Link(4e9, 0.0), across=Link(1e9, 0.0))
    machine = machine._replace(host=machine.host._replace(exchange=0.0))
    holders = partition.contiguous([400], 4, 100)
    workload = Workload(machine, (8, 4), (6, 6, 10), (2, 4), holders, holders, ())
    keys = 2 * 4 * (6 + 10) * 2 + 4 * (6 + 10) * 4  # bytes of a key in both passes
    assert seconds(Strategy(1, 1, 1), workload) == pytest.approx(200 * keys / 1e9)
    heads = 25 * (8 * (6 * 2 + 6 * 4 + 2 * 10 * 2) + 4 * (6 + 10) * (2 + 4))  # of 100 rows
    assert seconds(Strategy(4, 1, 1), workload) == pytest.approx(2 * heads / 1e9)
    # Neighbours exchange heads in a node, and half of the keys of another node come across.
    both = 200 * keys / 2 / 1e9 + 2 * heads / 4e9
    assert seconds(Strategy(2, 1, 1), workload) == pytest.approx(both)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ulysses": "most"}, "ulysses: got 'most', want a divisor of 4 ranks or 'auto'"),
        ({"ulysses": True}, "ulysses: got True, want a divisor of 4 ranks or 'auto'"),
        ({"stages": "many"}, "stages: got 'many', want 1 to 4 or 'auto'"),
        ({"stage_tokens": 0}, "stage_tokens: got 0, want at least 1"),
    ],
)
def test_numbers_are_checked(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(4, lambda comm: ContextParallel.over(comm, **arguments))  # type: ignore[arg-type]  # wrong on purpose


def test_head_groups_divide_the_key_heads_of_a_rank() -> None:
    message = r"head_groups: got 3, want a divisor of the key heads of every rank, \[2\]"
    with pytest.raises(ValueError, match=message):
        select_strategy(ANY._replace(ulysses=2, head_groups=3), one_sequence(4, 128, 8, 4))


def test_empty_ranks_have_a_price() -> None:
    holders = ShardMap.of([3], [[Piece(0, 0, 3)], []])
    workload = Workload(MACHINES["CPU"], (2, 1), *NOTHING_ELSE, holders, holders, CAUSAL)
    assert seconds(select_strategy(ANY, workload), workload) > 0
