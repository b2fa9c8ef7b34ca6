"""The order of the programs of the Hopper backward, each with a tile of keys or a part of one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends.hopper.backward import launch, plan
from flashtile.backends.hopper.backward.launch import backward_launches
from flashtile.backends.hopper.backward.plan import Order
from flashtile.call.layouts import Dense, Packed
from flashtile.call.prepare import describe
from flashtile.problem import AttentionProblem
from flashtile.testing import cu_seqlens, generator, packed_qkv, qkv

from . import emulator

BLOCK_N = 128
GROUP, HEADS, ROWS = 4, 2, 300


class Program(NamedTuple):
    b: int
    n: int
    head: int  # of keys
    part: int
    steps: tuple[tuple[int, int, int], ...]  # of each query head of the group: (head, first, stop)


def programs(
    lengths: Sequence[int] | None, parts: int, swizzle: int, deterministic: bool, rows: int = ROWS,
    keys: int = ROWS,
) -> list[Program]:  # fmt: skip
    """The programs with a tile, in the order of their numbers: of 3 dense sequences of `rows`
    queries and `keys` keys, or of a packed batch of `lengths`.
    """
    sizes = {"Hq": GROUP * HEADS, "Hk": HEADS, "D": 128, "dtype": torch.bfloat16}
    layout: Any = Dense()
    if lengths is None:
        q, k, v = qkv(generator(0), B=3, M=rows, N=keys, **sizes)
    else:
        q, k, v = packed_qkv(generator(0), list(lengths), list(lengths), **sizes)
        layout = Packed(cu_seqlens(lengths), cu_seqlens(lengths), max(lengths), max(lengths))
    operands, options = describe(
        (q, k, v), layout, {"causal": True, "deterministic": deterministic}
    )
    problem = AttentionProblem.of(operands, options)
    lse = torch.zeros(q.shape[:-1]).transpose(-2, -1).contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "order_of_call", lambda *_: Order(parts, swizzle))
        made = launch.allocation(problem, operands).buffers()
        launches = backward_launches(problem, operands, q, lse, q, None, made, None)
    if lengths is not None:
        emulator.run(launches[0], seed=0)  # lists the tiles
    return listed(launches[1])


def listed(of_keys: Any) -> list[Program]:
    given = {name: emulator.argument(x) for name, x in of_keys.arguments.items()}
    sizes = SimpleNamespace(**given)
    mask = SimpleNamespace(left=None, right=given["right"], q_runs=None, k_runs=None)
    found = []
    with emulator.emulated() as load_file:
        schedule = load_file("flashtile.backends.hopper.backward.schedule")
        cfg = given["cfg"]
        for number in map(emulator.tile, range(of_keys.grid[0])):
            tile = schedule.listed_tile(number, given["order"], sizes, cfg)
            work = schedule.key_work(tile, sizes, given["at"], mask, cfg)
            first, stop = schedule.own_heads(work, sizes, cfg)
            count = work.end - work.begin
            steps = tuple(
                (g, *map(int, schedule.own_steps(emulator.tile(g), count, work, cfg)))
                for g in range(int(first), int(stop))
            )
            if work.n0 < work.N:
                of_tile = int(work.b), int(work.n), int(work.kv_head), int(work.part)
                found.append(Program(*of_tile, steps))
    return found


CASES: dict[str, Any] = {"dense": None, "packed": [300, 130, 0, 1, 299]}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("swizzle", [1, 3, 16])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_every_part_comes_once(case: str, parts: int, swizzle: int, deterministic: bool):
    found = programs(CASES[case], parts, swizzle, deterministic)
    lengths = CASES[case] or [ROWS] * 3
    wanted = [
        (b, n, head, part)
        for b, N in enumerate(lengths)
        for n in range(-(-N // BLOCK_N))
        for head in range(HEADS)
        for part in range(parts)
    ]
    assert sorted(program[:4] for program in found) == wanted

    for b, n, head, _ in wanted[::parts]:
        of_tile = sorted(p for p in found if (p.b, p.n, p.head) == (b, n, head))
        blocks = -(-lengths[b] // 64) - 2 * n  # from the diagonal
        steps = [(g, j) for p in of_tile for g, *ends in p.steps for j in range(*ends)]
        assert steps == [(g, j) for g in range(GROUP) for j in range(blocks)]
        if GROUP % parts == 0 or deterministic:  # whole heads
            assert all(ends == [0, blocks] for p in of_tile for _, *ends in p.steps)

    # The tiles of a sequence and a part follow each other, which ordered additions rely on, and
    # those of at most `swizzle` parts alternate.
    heads: dict[tuple[int, ...], list[int]] = {}
    positions: dict[tuple[int, ...], list[int]] = {}
    for position, (b, n, head, part, _) in enumerate(found):
        heads.setdefault((b, head, part), []).append(n)
        positions.setdefault((b, head, part), []).append(position)
    assert all(tiles == sorted(tiles) for tiles in heads.values())
    if case == "dense":
        for of_head in positions.values():
            assert of_head[-1] - of_head[0] < len(of_head) * swizzle


@pytest.mark.parametrize("swizzle", [1, 2, 5, 6, 7, 64])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (300, 130), (300, 600), (700, 641)])
def test_phases(monkeypatch: pytest.MonkeyPatch, rows: int, keys: int, parts: int, swizzle: int):
    """1, 2, 5 or 6 tiles of 6 or 12 heads, in groups that divide these numbers or not. Every tile
    comes once, and after the previous tile of its head, for which it may wait.
    """
    monkeypatch.setattr(plan, "FEWEST_IN_PHASES", 1)
    found = [program[:4] for program in programs(None, parts, swizzle, True, rows, keys)]
    heads = list(product(range(3), range(HEADS), range(parts)))
    tiles = -(-keys // BLOCK_N)
    for b, *head in heads:
        of_head = [n for sequence, n, *other in found if (sequence, other) == (b, head)]
        assert of_head == list(range(tiles))

    phases, width = plan.phases_of(tiles, len(heads), swizzle)
    groups = [heads[i : i + width] for i in range(0, len(heads), width)]
    length = -(-tiles // phases)
    wanted = [
        (b, phase * length + step, *head)
        for section in range(len(groups) + phases - 1)
        for step in range(length)
        for phase in range(phases)
        if section - phase in range(len(groups)) and phase * length + step < tiles
        for b, *head in groups[section - phase]
    ]
    assert found == wanted
