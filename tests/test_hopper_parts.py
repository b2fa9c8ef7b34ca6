"""The number of programs that share a tile of keys in the Hopper backward."""

from __future__ import annotations

import heapq
from typing import Any

import pytest
import torch

from flashtile.backends.hopper.backward.parts import (
    makespan,
    missed_share,
    parts_of,
    sequences_of,
    tile_lengths,
)
from flashtile.backends.hopper.backward.plan import backward_swizzle
from flashtile.masks import Visibility
from flashtile.problem import AttentionProblem, Operands, Options

MULTIPROCESSORS = 132


def problem_of(
    heads: tuple[int, int], M: int, N: int | None = None, D: int = 128, B: int = 1, **options: Any
) -> AttentionProblem:
    N = M if N is None else N
    q, k = (
        torch.empty(B, rows, count, D, dtype=torch.bfloat16, device="meta")
        for rows, count in zip((M, N), heads, strict=True)
    )
    return AttentionProblem.of(Operands(q, k, k), Options(M, N, 1.0, **options))


def parts(heads: tuple[int, int], M: int, **given: Any) -> int:
    problem = problem_of(heads, M, **given)
    return parts_of(problem, problem.N, MULTIPROCESSORS).number


MASKS: list[dict[str, Any]] = [
    {},
    {"window_right": 0},
    {"window_left": 70, "window_right": 0},
    {"window_left": 40, "window_right": 300},
    {"attention_chunk": 100},
    {"attention_chunk": 300, "window_right": 0},
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("M", "N", "D"), [(500, 500, 128), (300, 700, 64), (700, 300, 256)])
def test_lengths_of_tiles(M: int, N: int, D: int, mask: dict[str, Any]):
    problem = problem_of((1, 1), M, N, D, **mask)
    BLOCK_M, BLOCK_N = {64: (128, 128), 128: (64, 128), 256: (64, 64)}[D]
    rows = [Visibility(problem.facts, M, N).key_range(i) for i in range(M)]
    seen = [
        {i // BLOCK_M for i, (start, stop) in enumerate(rows) if start < n + BLOCK_N and stop > n}
        for n in range(0, N, BLOCK_N)
    ]
    assert tile_lengths(problem, M, N) == sorted(map(len, seen), reverse=True)


@pytest.mark.parametrize("copies", [1, 3, 7, 40, 300])
@pytest.mark.parametrize("kind", ["equal", "triangle"])
@pytest.mark.parametrize("tiles", [1, 20, 40, 200])
def test_makespan_is_that_of_programs_in_order(tiles: int, kind: str, copies: int):
    times = [float(100 if kind == "equal" else 10 + tiles - n) for n in range(tiles)]
    ends = [0.0] * MULTIPROCESSORS
    for time in times:
        for _ in range(copies):
            heapq.heappush(ends, heapq.heappop(ends) + time)
    found = makespan([(time, copies) for time in times], MULTIPROCESSORS)
    assert 0.85 * max(ends) <= found <= max(ends) + 1e-6


def test_few_long_tiles_are_split():
    assert parts((24, 4), 5000) > 1
    assert parts((24, 4), 5000, window_right=0) > 1
    assert parts((32, 1), 4096) >= 4
    assert parts((2, 2), 4096) > 1  # one head for each key head, too


@pytest.mark.parametrize("window_right", [None, 0])
@pytest.mark.parametrize(("heads", "M"), [((16, 16), 16384), ((32, 8), 8192), ((16, 16), 1024)])
def test_enough_tiles_stay_whole(heads: tuple[int, int], M: int, window_right: int | None):
    assert parts(heads, M, window_right=window_right) == 1


def test_long_tiles_of_unlike_lengths_are_split_earlier():
    assert parts((4, 2), 16384) == 1  # two waves of equal tiles
    assert parts((4, 2), 16384, window_right=0) > 1  # the longest takes half of the time


def test_rows_of_a_part_fit_the_cache():
    """Even if there are so many tiles that the last ones hardly matter."""
    of_a_head = {"M": 13938, "D": 112, "B": 2, "window_right": 0}  # 13 MB in 128 columns
    assert parts((128, 32), **of_a_head) == 1
    assert 2 <= parts((32, 4), **of_a_head) <= 4
    assert 4 <= parts((512, 32), **of_a_head) <= 8
    assert parts((512, 32), **of_a_head | {"window_left": 1000}) == 1
    assert parts((512, 32), **of_a_head, deterministic=True) == 1


def test_so_many_parts_run_at_the_same_time_as_fit_the_cache():
    problem = problem_of((32, 4), 13938, D=112, B=2, window_right=0)
    counts = (1, 2, 4, 8)
    assert [backward_swizzle(problem, count, are_apart=True) for count in counts] == [1, 1, 2, 5]
    assert [backward_swizzle(problem, count) for count in counts] == [1, 2, 4, 8]


def test_sums_of_parts_for_the_cache_are_no_larger_than_the_workspace_of_dq():
    for heads, M, B in (((64, 8), 131072, 1), ((32, 8), 131072, 1), ((32, 8), 32768, 8)):
        assert parts(heads, M, B=B, window_right=0) <= heads[0] // heads[1] // 2


def test_parts_are_apart_where_the_cache_asks_for_them():
    def are_apart(heads: tuple[int, int], M: int, **given: Any) -> bool:
        problem = problem_of(heads, M, **given)
        return parts_of(problem, problem.N, MULTIPROCESSORS).are_apart

    assert are_apart((32, 4), 13938, D=112, B=2, window_right=0)
    assert are_apart((8, 1), 29481, D=176)  # all tiles are as long
    assert not are_apart((8, 1), 32768, window_right=0)  # the longest must start first
    assert not are_apart((8, 1), 8192, window_right=0)
    assert not are_apart((8, 1), 2048)
    assert not are_apart((32, 8), 8192, window_right=0)
    assert are_apart((8, 1), 29331, D=176, window_right=0)  # the memory limits neighbours
    assert not are_apart((15, 1), 1943, D=224, window_right=0)  # whose rows fit the cache
    assert not are_apart((8, 1), 29331, D=176, window_right=0, deterministic=True)


def test_balance_may_need_more_parts_than_the_cache_is_worth():
    """With one key head, a part for each query head."""
    mask = {"D": 176, "window_right": 0}
    assert parts((8, 1), 29331, **mask) == 8
    assert 8 <= parts((21, 1), 25299, **mask | {"D": 144}) <= 12


def test_parts_that_share_heads_miss_more():
    problem = problem_of((6, 1), 30000, window_right=0)
    shares = [missed_share(problem, 30000 // 64, parts) for parts in (1, 2, 3, 4, 5, 6)]
    assert shares[0] > shares[1] > shares[2] and shares[5] == 0
    assert shares[3] > shares[2]


def test_short_problems_stay_whole():
    assert parts((8, 8), 256) == 1


def test_parts_have_whole_heads_with_ordered_additions():
    assert 1 < parts((8, 2), 4096, deterministic=True) <= 4
    assert parts((2, 2), 4096, deterministic=True) == 1


def test_packed_sequences_count_their_rows():
    problem = problem_of((8, 2), 4096)._replace(layout="packed", B=4)
    assert parts_of(problem, 4096, MULTIPROCESSORS).number > 1
    assert parts_of(problem, 100 * 4096, MULTIPROCESSORS).number == 1


def test_sequences_of_a_packed_batch():
    problem = problem_of((8, 2), 1000)._replace(layout="packed")
    for B, keys in ((1, 1000), (3, 3000), (12, 4000), (100, 9000), (20, 1019)):
        found = sequences_of(problem._replace(B=B), keys)
        lengths = [N for N, _ in found]
        assert lengths[0] == 1000 and lengths == sorted(lengths, reverse=True)
        assert sum(count for _, count in found) == B
        assert sum(N * count for N, count in found) == pytest.approx(keys, rel=0.02)
    assert sequences_of(problem._replace(B=1), 700) == [(1000, 1)]  # the longest is a bound


def test_the_longest_of_unlike_sequences_are_split():
    problem = problem_of((18, 3), 1678, D=144, window_right=0)._replace(layout="packed")
    assert parts_of(problem._replace(B=12), 6712, MULTIPROCESSORS).number > 1
    assert parts_of(problem._replace(B=4), 6712, MULTIPROCESSORS).number == 1  # all as long
