"""The cost model and the ways that it chooses."""

from __future__ import annotations

import random

import pytest
import torch
from test_schedule import CAUSAL, random_facts, visible_scores

from flashtile.distributed import ContextParallel, balance
from flashtile.distributed.choice import Wanted, candidates, choose
from flashtile.distributed.cost import Pricing, Shape, Way
from flashtile.distributed.machine import MACHINES, Host, Link
from flashtile.distributed.ownership import Ownership, Piece
from flashtile.distributed.work import Facts, Work
from flashtile.masks import Chunk, Window
from flashtile.testing.wires import ThreadWire, run_ranks

ANY = Wanted("auto", "auto", None, None)
HEADS = [(1, 1), (7, 1), (8, 2), (12, 3), (32, 8)]


NO_HOST = Host(0.0, 0.0, 0.0)


def random_pricing(rng: random.Random) -> Pricing:
    ranks = rng.choice([1, 2, 3, 4, 6, 8])
    lengths = [rng.randint(0, 3000) for _ in range(rng.randint(1, 5))]
    facts = random_facts(rng)
    holders = balance.carve(Work([(facts, None, 1)], lengths, grain=16), ranks)
    shape = Shape(*rng.choice(HEADS), 64, rng.choice([64, 128]), 2)
    machine = MACHINES[rng.choice(list(MACHINES))]._replace(node=rng.choice([2, 4, 8]))
    return Pricing(machine, shape, holders, holders, facts)


def zigzag(ranks: int, tokens: int, *heads: int, machine: str = "H200") -> Pricing:
    """A causal sequence with `tokens` on each rank."""
    holders = balance.zigzag([ranks * tokens], ranks, 128)
    return Pricing(MACHINES[machine], Shape(*heads, 128, 128, 2), holders, holders, CAUSAL)


def forced(way: Way) -> Wanted:
    return Wanted(*way, None)


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_as_fast_as_any_forced_way(seed: int) -> None:
    rng = random.Random(seed)
    pricing = random_pricing(rng)
    chosen = choose(ANY, pricing)
    for way in candidates(ANY, pricing):
        assert choose(forced(way), pricing) == way
        assert pricing.slowest(chosen).seconds <= pricing.slowest(way).seconds
    ulysses = rng.choice([way.ulysses for way in candidates(ANY, pricing)])
    half_forced = choose(ANY._replace(ulysses=ulysses), pricing)
    assert half_forced.ulysses == ulysses
    assert pricing.slowest(chosen).seconds <= pricing.slowest(half_forced).seconds


@pytest.mark.parametrize("seed", range(30))
def test_no_way_receives_more_keys_than_a_ring(seed: int) -> None:
    rng = random.Random(seed)
    pricing = random_pricing(rng)
    ring = sum(pricing.keys.tokens(rank) for rank in range(pricing.ranks))
    for way in candidates(ANY, pricing):
        for rank in range(pricing.ranks):
            price = pricing.price(way, rank)
            # A key head that several ranks divide is on each of them.
            copies = max(1, way.ulysses / pricing.shape.key_heads)
            assert price.received <= copies * (ring - pricing.keys.tokens(rank)) + 1e-9
            assert price.buffered <= price.received + 1e-9


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tokens", [8, 133])
def test_scores_are_those_of_the_mask(ranks: int, tokens: int) -> None:
    window: Facts = (Window(20, 0), Chunk(48))
    for facts in ((), CAUSAL, window):
        holders = balance.zigzag([tokens, 5], ranks, 4)
        pricing = Pricing(MACHINES["CPU"], Shape(4, 4, 8, 8, 4), holders, holders, facts)
        found = sum(pricing.price(Way(1, 1, 1), rank).scores for rank in range(ranks))
        whole = len(visible_scores(facts, [tokens, 5], [tokens, 5]))
        # Between samples the keys of a query are taken to change linearly, as a causal mask's do.
        assert found == (pytest.approx(whole, rel=0.1) if facts == window else whole)


def test_all_ranks_choose_alike() -> None:
    def one_rank(wire: ThreadWire) -> Way:
        parallel = ContextParallel.over(wire)
        layout = parallel.layout(cu_seqlens=[0, 40, 41, 200])
        x = torch.zeros(layout.local_tokens, 4, 8)
        return parallel._prepared((x, x, x), layout, None, {"causal": True}).way

    assert len(set(run_ranks(6, one_rank))) == 1


def test_different_machines_are_a_disagreement() -> None:
    def one_rank(wire: ThreadWire) -> None:
        slow = Link(1e3, 1.0)
        machine = MACHINES["CPU"]._replace(inside=slow) if wire.rank else MACHINES["H200"]
        parallel = ContextParallel.over(wire, machine=machine)
        layout = parallel.layout(seq_len=4096)
        x = torch.zeros(1, layout.local_tokens, 4, 8)
        with pytest.raises(ValueError, match="the ranks disagree on ulysses, stages, head groups"):
            parallel.attention(x, x, x, layout, causal=True)

    run_ranks(4, one_rank)


def test_stage_tokens_limits_what_is_fetched_at_once() -> None:
    pricing = zigzag(16, 1024, 8, 2)
    for limit in (512, 2000, 8000):
        way = choose(ANY._replace(stage_tokens=limit), pricing)
        assert pricing.slowest(way).buffered <= limit
    with pytest.raises(ValueError, match=r"stage_tokens: got 1, want at least \d+ in this layout"):
        choose(Wanted(1, "auto", None, 1), pricing)


def test_expected_ways() -> None:
    """Those that the papers of ring attention and Ulysses recommend."""
    for tokens in (8192, 65536):
        pricing = zigzag(2, tokens, 32, 8)
        assert choose(ANY, pricing) == Way(1, 1, 1)
    pricing.machine = pricing.machine._replace(contention=0.0)
    assert choose(ANY, pricing) == Way(1, 1, 2)  # hides half of the fetch
    assert choose(ANY, zigzag(64, 8192, 64, 8)).ulysses == 8  # inside a node
    assert choose(ANY, zigzag(64, 8192, 16, 1)).stages > 1  # one key head
    holders = balance.contiguous([65536], 4, 128)
    shape = Shape(32, 8, 128, 128, 2)
    window = Pricing(MACHINES["H200"], shape, holders, holders, (Window(1023, 0),))
    assert choose(ANY, window).stages == 1  # only the keys before its own travel


def test_an_exchange_in_a_node_delays_the_kernels_beside_it() -> None:
    way, base = Way(1, 1, 2), zigzag(2, 65536, 32, 8)
    base.machine = base.machine._replace(contention=0.0, host=NO_HOST)
    alone = base.slowest(way)
    base.machine = base.machine._replace(contention=2.0)
    delayed = base.slowest(way)
    fetch = base.machine.inside.seconds(alone.received / 2 * 8 * 256 * 2)
    back = base.machine.inside.seconds(alone.received / 2 * 8 * 256 * 4)
    assert delayed.forward - alone.forward == pytest.approx(2 * fetch)
    assert delayed.backward - alone.backward == pytest.approx(2 * (fetch + back))
    across = [zigzag(2, 65536, 32, 8) for _ in range(2)]
    for pricing, contention in zip(across, (0.0, 2.0), strict=True):
        pricing.machine = base.machine._replace(node=1, contention=contention)
    assert across[0].slowest(way) == across[1].slowest(way)  # between nodes


def test_more_work_takes_longer() -> None:
    way = Way(1, 2, 1)
    base = zigzag(4, 4096, 8, 2).slowest(way)
    assert zigzag(4, 8192, 8, 2).slowest(way).seconds > base.seconds
    assert zigzag(4, 4096, 16, 2).slowest(way).seconds > base.seconds
    assert zigzag(4, 4096, 8, 2, machine="A100").slowest(way).seconds > base.seconds
    slow = zigzag(4, 4096, 8, 2)
    slow.machine = slow.machine._replace(inside=Link(1e9, 1e-3))
    assert slow.slowest(way).forward > base.forward
    assert slow.slowest(way).backward - slow.slowest(way).forward > base.backward - base.forward


@pytest.mark.parametrize(
    ("host", "seconds"),
    [
        (Host(1.0, 0.0, 0.0), [(1.0, 1.0), (1.0, 1.0)]),
        (Host(0.0, 1.0, 0.0), [(1.0, 2.0), (2.0, 3.0)]),  # on an idle GPU, two are waited for
        (Host(0.0, 0.0, 1.0), [(1.0, 1.0), (1.5, 1.5)]),
    ],
)
def test_the_host_starts_exchanges_and_calls(
    host: Host, seconds: list[tuple[float, float]]
) -> None:
    pricing = zigzag(2, 1024, 8, 2)
    pricing.machine = pricing.machine._replace(host=host)
    for groups, (forward, backward) in enumerate(seconds, start=1):
        price = pricing.slowest(Way(1, 1, groups))
        assert price.forward == pytest.approx(forward, abs=2e-3)
        assert price.backward == pytest.approx(backward, abs=2e-3)


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
        run_ranks(4, lambda wire: ContextParallel.over(wire, **arguments))  # type: ignore[arg-type]  # wrong on purpose


def test_empty_ranks_have_a_price() -> None:
    holders = Ownership.of([3], [[Piece(0, 0, 3)], []])
    pricing = Pricing(MACHINES["CPU"], Shape(2, 1, 8, 8, 4), holders, holders, CAUSAL)
    assert pricing.slowest(choose(ANY, pricing)).seconds > 0


def test_the_longer_of_computing_and_exchanging_counts() -> None:
    """With one of both free, the other one adds up."""
    way, base = Way(1, 4, 1), zigzag(4, 4096, 8, 2)
    machine = base.machine._replace(contention=0.0)
    free = machine._replace(forward=1e30, backward=1e30, memory=1e30, launch=0.0, host=NO_HOST)
    wire = machine._replace(inside=Link(1e30, 0.0), across=Link(1e30, 0.0))
    size = 2 * 128 * 2  # numbers of a key and its value, with two heads
    keys = base.slowest(way).received
    base.machine = free._replace(inside=Link(1e9, 0.0))
    price = base.slowest(way)
    assert price.forward == pytest.approx(keys * size * 2 / 1e9)
    assert price.backward == pytest.approx(keys * size * (2 + 4) / 1e9)
    base.machine = wire
    alone = base.slowest(way)
    for machine in (wire._replace(inside=Link(1e15, 0.0)), wire):
        base.machine = machine  # exchanges that hide behind the computing cost next to nothing
        assert base.slowest(way).seconds == pytest.approx(alone.seconds, rel=1e-3)
