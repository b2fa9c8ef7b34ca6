"""Every visible score is computed in one stage of one rank, for random documents and masks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from flashtile.distributed import partition
from flashtile.distributed.partition import Facts, Piece, ShardMap, TileMap, Work
from flashtile.distributed.schedule import Schedule, schedule
from flashtile.masks import BlockMask, Chunk, Positions, Visibility, Window

Score = tuple[int, int, int]  # document, query, key

CAUSAL: Facts = (Window(None, 0),)
WAYS: dict[str, Callable[[Work, int], ShardMap]] = {
    "contiguous": lambda work, ranks: partition.contiguous(work.lengths, ranks, work.grain),
    "zigzag": lambda work, ranks: partition.zigzag(work.lengths, ranks, work.grain),
    "carve": partition.carve,
    "refine": lambda work, ranks: partition.refine(partition.carve(work, ranks), work),
}


def random_facts(rng: random.Random) -> Facts:
    facts: list[Window | Chunk] = []
    if rng.random() < 0.9:
        facts.append(Window(rng.choice([None, 0, 2, 6]), rng.choice([None, 0, 0, 0, 3, -2])))
    if rng.random() < 0.3:
        facts.append(Chunk(rng.choice([2, 5])))
    return tuple(facts)


def visible_scores(facts: Facts, queries: list[int], keys: list[int]) -> set[Score]:
    """The definition: element by element."""
    found = set()
    for document, (M, N) in enumerate(zip(queries, keys, strict=True)):
        dense = Visibility(facts, M, N).dense()
        found |= {(document, int(i), int(j)) for i, j in dense.nonzero().tolist()}
    return found


def scores_of(made: Schedule, facts: Facts, shifts: list[int]) -> Counter[Score]:
    """The scores that the calls of one rank compute, read off their positions alone."""
    found: Counter[Score] = Counter()
    for stage in made.stages:
        for document, rows, keys in zip(made.documents, made.queries, stage.keys, strict=True):
            for row in range(rows.length):
                p = rows.at(row)
                start, stop = 0, keys.length
                for fact in facts:
                    first, last = fact.key_range(p, 10**6)
                    unbounded = isinstance(fact, Window) and fact.left is None
                    start = max(start, 0 if unbounded else keys.below(first))
                    stop = min(stop, keys.below(last))
                for n in range(start, stop):
                    found[document, p - shifts[document], keys.at(n)] += 1
    return found


@pytest.mark.parametrize("way", WAYS)
def test_every_visible_score_is_computed_once(way: str) -> None:
    rng = random.Random(way)
    for _ in range(60):
        ranks = rng.randint(1, 5)
        queries = [rng.randint(0, 23) for _ in range(rng.randint(1, 5))]
        keys = [rng.randint(0, 23) for _ in queries] if rng.random() < 0.4 else queries
        facts = random_facts(rng)
        grain = rng.choice([1, 2, 4])
        holders = WAYS[way](Work([(facts, None, 1)], queries, keys, grain), ranks)
        key_holders = holders if keys is queries else partition.contiguous(keys, ranks, grain)
        shifts = [n - m for m, n in zip(queries, keys, strict=True)]
        stages = rng.randint(1, ranks)
        found: Counter[Score] = Counter()
        for rank in range(ranks):
            made = schedule(holders, key_holders, facts, rank, stages)
            found += scores_of(made, facts, shifts)
        assert found == Counter(visible_scores(facts, queries, keys))


def test_what_one_rank_sends_the_other_receives() -> None:
    rng = random.Random(3)
    for _ in range(60):
        ranks = rng.randint(1, 6)
        lengths = [rng.randint(0, 40) for _ in range(rng.randint(1, 6))]
        facts = random_facts(rng)
        holders = partition.carve(Work([(facts, None, 1)], lengths, grain=4), ranks)
        stages = rng.randint(1, ranks)
        made = [schedule(holders, holders, facts, rank, stages) for rank in range(ranks)]
        for number in range(len(made[0].stages)):
            sent = Counter(
                (rank, message.peer, message.spans)
                for rank in range(ranks)
                for message in made[rank].stages[number].sends
            )
            received = Counter(
                (message.peer, rank, message.spans)
                for rank in range(ranks)
                for message in made[rank].stages[number].receives
            )
            assert sent == received


def test_buffers_hold_the_keys_in_the_order_of_their_positions() -> None:
    rng = random.Random(4)
    for _ in range(60):
        ranks = rng.randint(1, 5)
        lengths = [rng.randint(0, 40) for _ in range(rng.randint(1, 6))]
        facts = random_facts(rng)
        holders = partition.zigzag(lengths, ranks, rng.choice([1, 4]))
        tokens = [  # every rank's rows, as (document, position)
            [(p.document, i) for p in mine for i in range(p.start, p.stop)]
            for mine in holders.pieces
        ]
        for rank in range(ranks):
            made = schedule(holders, holders, facts, rank, rng.randint(1, ranks))
            for stage in made.stages:
                sources = [tokens[rank]]
                for peer, spans in stage.receives:
                    sources.append([token for a, b in spans for token in tokens[peer][a:b]])
                buffer = [token for x, a, b in stage.order for token in sources[x][a:b]]
                for one, other in pairwise(stage.order):  # no two of them are one
                    assert one[::2] != (other.source, other.start)
                assert buffer == [
                    (document, positions.at(row))
                    for document, positions in zip(made.documents, stage.keys, strict=True)
                    for row in range(positions.length)
                ]


def test_a_window_fetches_its_halo_only() -> None:
    holders = partition.contiguous([1024], 4, 128)
    made = schedule(holders, holders, (Window(99, 0),), rank=2)
    assert [(message.peer, message.rows) for message in made.stages[0].receives] == [(1, 99)]


@pytest.mark.parametrize(
    ("spans", "whole"),
    [
        ([], True),
        ([(0, 8), (12, 21)], True),
        ([(0, 6), (8, 12)], False),  # the second run begins at row 6
        ([(2, 6)], False),
    ],
)
def test_runs_that_begin_at_multiples(spans: list[tuple[int, int]], whole: bool) -> None:
    assert Positions.of(spans).begin_at_multiples(4) == whole


def test_whole_documents_do_not_travel() -> None:
    lengths = [256] * 8
    holders = partition.carve(Work([(CAUSAL, None, 1)], lengths), 4)
    for rank in range(4):
        made = schedule(holders, holders, CAUSAL, rank)
        assert made.stages[0].sends == made.stages[0].receives == ()


@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
def test_refined_ranks_have_equal_work_and_receive_less(ranks: int) -> None:
    rng = random.Random(ranks)
    lengths = [max(1, int(rng.lognormvariate(6.4, 1.2))) for _ in range(ranks * 8)]
    work = Work([(CAUSAL, None, 1)], lengths)
    refined = partition.refine(partition.carve(work, ranks), work)
    load = [sum(work.scores(*piece) for piece in mine) for mine in refined.pieces]
    assert max(load) <= 1.05 * sum(load) / ranks
    tokens = [refined.tokens(rank) for rank in range(ranks)]
    assert max(tokens) - min(tokens) <= 2 * 128 + 128 * len(lengths) / ranks

    received = sum(
        message.rows
        for rank in range(ranks)
        for stage in schedule(refined, refined, CAUSAL, rank).stages
        for message in stage.receives
    )
    around_a_ring = (ranks - 1) * sum(lengths)
    assert received < 0.5 * around_a_ring


def test_pieces_have_to_cover_every_token_once() -> None:
    with pytest.raises(ValueError, match="exactly once"):
        ShardMap.of([8], [[Piece(0, 0, 5)], [Piece(0, 4, 8)]])
    with pytest.raises(ValueError, match="exactly once"):
        ShardMap.of([8], [[Piece(0, 0, 3)], [Piece(0, 4, 8)]])


@pytest.mark.parametrize("stages", [0, 4])
def test_the_number_of_stages_is_checked(stages: int) -> None:
    holders = partition.contiguous([9], 3, 1)
    with pytest.raises(ValueError, match=r"stages: got \d, want 1 to 3"):
        schedule(holders, holders, CAUSAL, 0, stages)


def test_positions_map_rows_to_positions_and_back() -> None:
    positions = Positions.of([(10, 12), (3, 5), (12, 13)])
    assert [positions.at(row) for row in range(positions.length)] == [3, 4, 10, 11, 12]
    assert [positions.below(p) for p in (0, 4, 5, 10, 12, 99)] == [0, 1, 2, 2, 4, 5]
    assert positions.shifted(-4).spans == ((-1, 1), (6, 9))


def test_work_counts_visible_scores() -> None:
    for facts in ((), CAUSAL, (Window(30, 0),), (Window(None, 0), Chunk(16))):
        work = Work([(facts, None, 2)], [100], [130], grain=4)
        whole = int(Visibility(facts, 100, 130).dense().sum())
        assert work.total() == pytest.approx(2 * whole, rel=0.02)
        assert work.scores(0, 0, 37) + work.scores(0, 37, 100) == pytest.approx(work.total())


def test_work_counts_the_tiles_of_block_masks() -> None:
    kinds = torch.tensor([[1, 0, 2, 0], [0, 1, 1, 1]])
    mask = BlockMask.from_tiles(kinds[None, None], (16, 8))
    tiles = TileMap.of(mask)
    work = Work([((), tiles, 3)], [30], [29], grain=16, unit=16)
    assert work.scores(0, 0, 16) == 3 * 16 * 16
    assert work.scores(0, 16, 30) == 3 * 14 * (8 + 8 + 5)
    causal = Work([(CAUSAL, tiles, 1)], [32], [32], grain=16, unit=16)
    assert causal.scores(0, 0, 16) < 16 * 16


@pytest.mark.parametrize("way", WAYS)
def test_pieces_begin_at_multiples_of_the_unit(way: str) -> None:
    rng = random.Random(2)
    for _ in range(30):
        lengths = [rng.randint(0, 300) for _ in range(rng.randint(1, 9))]
        work = Work([(CAUSAL, None, 1)], lengths, grain=48, unit=24)
        holders = WAYS[way](work, rng.randint(1, 5))
        assert all(piece.start % 24 == 0 for mine in holders.pieces for piece in mine)


def test_tiles_that_nobody_sees_do_not_travel() -> None:
    """A rank sees its own diagonal of tiles, and the first tile of all."""
    kinds = torch.eye(8, dtype=torch.bool)
    kinds[:, 0] = True
    tiles = TileMap.of(BlockMask.from_tiles(kinds, (16, 16)))
    holders = partition.contiguous([128], 4, 16)
    for rank in range(1, 4):
        received = schedule(holders, holders, (), rank, tiles=tiles).stages[0].receives
        assert [(message.peer, message.rows) for message in received] == [(0, 16)]
