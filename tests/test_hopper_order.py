"""The order of the programs of the Hopper backward, and how many share a tile of keys."""

from __future__ import annotations

import heapq
from typing import Any

import pytest
import torch

from flashtile.backends.hopper.backward import plan as order_module
from flashtile.backends.hopper.backward.plan import (
    MOST_PROGRAMS,
    Model,
    Order,
    order_of,
    sequences_of,
    tile_lengths,
)
from flashtile.gpu.hardware import H100, gpu_of
from flashtile.masks import Visibility
from flashtile.problem import AttentionProblem, Operands, Options

CAUSAL = {"window_right": 0}


def problem_of(
    heads: tuple[int, int],
    M: int,
    N: int | None = None,
    D: int = 128,
    Dv: int | None = None,
    B: int = 1,
    **options: Any,
) -> AttentionProblem:
    N = M if N is None else N
    q, k, v = (
        torch.empty(B, rows, count, size, dtype=torch.bfloat16, device="meta")
        for rows, count, size in ((M, heads[0], D), (N, heads[1], D), (N, heads[1], Dv or D))
    )
    return AttentionProblem.of(Operands(q, k, v), Options(M, N, 1.0, **options))


def chosen(heads: tuple[int, int], M: int, **given: Any) -> Order:
    problem = problem_of(heads, M, **given)
    return order_of(problem, problem.N, H100)


def parts(heads: tuple[int, int], M: int, **given: Any) -> int:
    return chosen(heads, M, **given).parts


def played(problem: AttentionProblem, order: Order, tiles: int) -> float:
    """The makespan of all programs: the n-th one is a tile and a head by the swizzle."""
    model = Model(problem, problem.N, H100)
    lengths = tile_lengths(problem, problem.M, problem.N)
    heads = problem.B * problem.Hk * order.parts
    first = heads % order.swizzle  # the smaller group of heads comes first
    widths = [first] * (first > 0) + [order.swizzle] * (heads // order.swizzle)
    free = [(0.0, i) for i in range(132)]
    for width in widths:
        for length in lengths:
            for _ in range(width):
                end, i = free[0]
                pace = 0.95 + 0.1 * (i * 37 % 132) / 132  # in no order
                heapq.heapreplace(free, (end + pace * model.time(length, order.parts), i))
    assert len(lengths) == tiles
    return max(free)[0]


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


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("swizzle", [1, 4, 16])
@pytest.mark.parametrize(("M", "N", "B", "tiles"), [
    (2048, 2048, 8, 16), (8192, 8192, 2, 64), (4096, 4096, 32, 32), (1024, 16384, 4, 128),
])  # fmt: skip
def test_makespan_is_that_of_all_programs_in_their_order(
    M: int, N: int, B: int, tiles: int, swizzle: int, parts: int
):
    problem = problem_of((12, 2), M, N, B=B, **CAUSAL)
    order = Order(parts, swizzle)
    found = Model(problem, N, H100).makespan(order)
    assert found == pytest.approx(played(problem, order, tiles), rel=0.03)


def test_heads_divide_evenly_among_groups_that_run_together():
    """Sections of 5 of 16 heads left a third of the multiprocessors idle."""
    model = Model(problem_of((12, 2), 2048, B=8, **CAUSAL), 2048, H100)
    assert chosen((12, 2), 2048, B=8, **CAUSAL) == (1, 8)
    assert model.makespan(Order(1, 8)) < 0.75 * model.makespan(Order(1, 5))


def test_the_sum_for_dq_counts_in_the_cache():
    """Where many programs follow each other, few heads together cost no balance."""
    chunk = {"M": 1024, "N": 16384, "B": 4}
    assert chosen((32, 8), **chunk, **CAUSAL).swizzle <= 4
    assert chosen((128, 128), 4096, D=192, **CAUSAL).swizzle <= 4
    assert chosen((128, 128), 4096, D=192, Dv=128, **CAUSAL).swizzle <= 8  # a tile has more keys
    assert chosen((32, 32), 4096, D=96, B=4, **CAUSAL) == (1, 8)


def test_load_balance_outweighs_the_cache():
    """One head together would leave half of the multiprocessors idle at the end."""
    assert chosen((32, 8), 8192, B=2, **CAUSAL).swizzle >= 2
    assert chosen((32, 32), 1024, D=64, B=16, **CAUSAL).swizzle >= 16


def test_full_masks_have_one_head_after_the_other():
    for heads, M, D, B in (((24, 24), 4608, 128, 4), ((8, 1), 29481, 176, 1)):
        assert chosen(heads, M, D=D, B=B).swizzle == 1


def test_windows_have_as_few_heads_as_fill_the_multiprocessors():
    assert chosen((32, 8), 16384, window_left=4095, **CAUSAL) == (1, 1)
    assert chosen((8, 4), 8192, D=256, B=2, window_left=1023, **CAUSAL) == (1, 1)


def test_the_cache_and_the_memory_are_those_of_the_gpu():
    problem = problem_of((32, 8), 8192, B=2, **CAUSAL)
    sizes = [H100._replace(cache_bytes=times * H100.cache_bytes) for times in (1, 2, 4)]
    assert [order_of(problem, 8192, gpu).swizzle for gpu in sizes] == [2, 4, 8]
    fast = H100._replace(bytes_per_us=8e6)
    problem = problem_of((64, 8), 8192, **CAUSAL)
    assert order_of(problem, 8192, fast).parts < order_of(problem, 8192, H100).parts


def test_a_gpu_without_its_facts_is_like_an_h100(monkeypatch: pytest.MonkeyPatch):
    class Plain:
        multi_processor_count = 78

    class Known(Plain):
        L2_cache_size, memory_clock_rate, memory_bus_width = 60 << 20, 3_201_000, 6144

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found: list[Any] = [Plain(), Known()]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found[index - 40])
    assert gpu_of(torch.device("cuda", 40)) == H100._replace(multiprocessors=78)
    known = gpu_of(torch.device("cuda", 41))
    assert known.cache_bytes == 60 << 20 and known.bytes_per_us == pytest.approx(4.9e6, rel=0.01)


@pytest.mark.parametrize(("heads", "M", "B"), [((32, 8), 16384, 1), ((64, 8), 8192, 1),
    ((71, 1), 2048, 4), ((12, 12), 1024, 64), ((8, 8), 262144, 1)])  # fmt: skip
def test_a_search_plays_few_programs(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], M: int, B: int
):
    played = []
    replace = heapq.heapreplace

    def counted(*given: Any) -> Any:
        played.append(given)
        return replace(*given)

    monkeypatch.setattr(order_module, "heapreplace", counted)
    order_of.cache_clear()
    chosen(heads, M, B=B, **CAUSAL)
    assert 0 < len(played) <= 2 * MOST_PROGRAMS + 2 * 8 * 132


def test_few_long_tiles_are_split():
    assert parts((24, 4), 5000) > 1
    assert parts((24, 4), 5000, window_right=0) > 1
    assert parts((32, 1), 4096) >= 4
    assert parts((2, 2), 4096) > 1  # one head for each key head, too


@pytest.mark.parametrize("window_right", [None, 0])
@pytest.mark.parametrize(("heads", "M"), [((16, 16), 16384), ((32, 8), 8192), ((16, 16), 1024)])
def test_enough_tiles_stay_whole(heads: tuple[int, int], M: int, window_right: int | None):
    assert parts(heads, M, window_right=window_right) == 1


def test_rows_of_a_part_fit_the_cache():
    """Even if there are so many tiles that the last ones hardly matter."""
    of_a_head = {"M": 13938, "D": 112, "B": 2, "window_right": 0}  # 13 MB in 128 columns
    assert parts((128, 32), **of_a_head) == 1
    assert 2 <= parts((32, 4), **of_a_head) <= 4
    assert 4 <= parts((512, 32), **of_a_head) <= 8
    assert parts((512, 32), **of_a_head | {"window_left": 1000}) == 1
    assert parts((512, 32), **of_a_head, deterministic=True) == 1


def test_sums_of_parts_for_the_cache_are_no_larger_than_the_workspace_of_dq():
    for heads, M, B in (((64, 8), 131072, 1), ((32, 8), 131072, 1), ((32, 8), 32768, 8)):
        assert parts(heads, M, B=B, window_right=0) <= heads[0] // heads[1] // 2


def test_parts_are_interleaved_when_they_exceed_the_cache():
    """Fewer run together than share a tile."""

    def are_interleaved(heads: tuple[int, int], M: int, **given: Any) -> bool:
        found = chosen(heads, M, **given)
        return found.swizzle < found.parts

    assert are_interleaved((32, 4), 13938, D=112, B=2, **CAUSAL)
    assert are_interleaved((8, 1), 29481, D=176)  # all tiles are as long
    assert are_interleaved((8, 1), 29331, D=176, **CAUSAL)  # the memory limits neighbours
    assert not are_interleaved((15, 1), 1943, D=224, deterministic=True, **CAUSAL)
    assert not are_interleaved((8, 1), 29331, D=176, deterministic=True, **CAUSAL)


def test_balance_may_need_more_parts_than_the_cache_is_worth():
    assert parts((8, 1), 29331, D=176, **CAUSAL) >= 4
    assert 8 <= parts((21, 1), 25299, D=144, **CAUSAL) <= 12


def test_parts_that_share_heads_miss_more():
    model = Model(problem_of((6, 1), 30000, **CAUSAL), 30000, H100)
    lost = [model.lost_steps(Order(parts, 1), 65536) for parts in (1, 2, 3, 4)]
    assert lost[0] > lost[1] > lost[2] and lost[3] > lost[2]


def test_short_problems_stay_whole():
    assert parts((8, 8), 256) == 1


def test_parts_have_whole_heads_with_ordered_additions():
    assert 1 < parts((8, 2), 4096, deterministic=True) <= 4
    assert parts((2, 2), 4096, deterministic=True) == 1


def test_packed_sequences_count_their_rows():
    problem = problem_of((8, 2), 4096)._replace(layout="packed", B=4)
    assert order_of(problem, 4096, H100).parts > 1
    assert order_of(problem, 100 * 4096, H100).parts == 1


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
    assert order_of(problem._replace(B=12), 6712, H100).parts > 1
    assert order_of(problem._replace(B=12), 12 * 1678, H100).parts == 1  # all as long
