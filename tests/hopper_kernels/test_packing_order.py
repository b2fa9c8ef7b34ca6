"""The list of the tiles of a packed batch, made by the emulated kernel."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends.hopper.backward import launch
from flashtile.backends.hopper.backward.launch import backward_launches
from flashtile.backends.hopper.backward.plan import Order
from flashtile.backends.hopper.shared.schedule import Side, list_tiles, most_tiles
from flashtile.call.layouts import Packed
from flashtile.call.prepare import describe
from flashtile.problem import AttentionProblem
from flashtile.testing import cu_seqlens, generator, packed_qkv

from . import emulator

BLOCK = 16
LENGTHS = {
    "skewed": [3, 0, 100, 16, 17, 1, 60, 0, 15],
    "equal": [40, 40, 40],
    "one": [33],
    "empty": [0, 0],
    "many": [(7 * i) % 50 for i in range(270)],  # more than a chunk
}


def listed(keys: list[int], queries: list[int], together: int, used: Any = (None, None)) -> Any:
    """The list, by one program for each sequence."""
    found = torch.full((most_tiles(sum(keys), len(keys), max(keys), BLOCK), 2), -7)
    sides = [
        Side(cu_seqlens(x), counts, sum(x), max(x))
        for x, counts in zip((keys, queries), used, strict=True)
    ]
    arguments = {
        "list_ptr": found, "length": len(found), "together": together, "B": len(keys),
        "tiled": sides[0], "other": sides[1], "BLOCK": BLOCK,
    }  # fmt: skip
    for b in range(len(keys)):
        arguments["b"] = b
        one = SimpleNamespace(kernel=list_tiles, grid=(1,), arguments=arguments, is_early=False)
        emulator.run(one, seed=0)
    return found.tolist()


def wanted(keys: list[int], queries: list[int], together: int) -> list[list[int]]:
    """The same by sorting."""

    def sort_key(entry: list[int]) -> tuple[int, ...]:
        b, n = entry
        group = b // together
        longest = max(queries[group * together : (group + 1) * together])
        return -longest, group, n * BLOCK - keys[b], b

    return sorted(([b, n] for b, N in enumerate(keys) for n in range(-(-N // BLOCK))), key=sort_key)


def check(found: list[list[int]], expected: list[list[int]]) -> None:
    assert found[: len(expected)] == expected
    assert all(entry == [0, -1] for entry in found[len(expected) :])


FEW = [name for name in LENGTHS if name != "many"]  # whose emulation takes seconds


@pytest.mark.parametrize(
    ("lengths", "together"), [*itertools.product(FEW, (1, 2, 16)), ("many", 2)]
)
def test_order(lengths: str, together: int):
    keys = LENGTHS[lengths]
    check(listed(keys, keys, together), wanted(keys, keys, together))


def test_longest_loops_come_first():
    keys, queries = [200, 20, 90], [30, 400, 90]
    found = listed(keys, queries, 1)
    assert [b for b, n in found if n == 0] == [1, 2, 0]
    check(found, wanted(keys, queries, 1))


def test_used_lengths():
    used = torch.tensor([20, 0, 70]), torch.tensor([5, 9, 2])
    found = listed([30, 50, 80], [10, 10, 10], 2, used)
    check(found, wanted([20, 0, 70], [5, 9, 2], 2))


def test_few_programs_have_no_tile():
    lengths = [2000, *[1] * 31]
    q, k, v = packed_qkv(generator(0), lengths, lengths, D=64, dtype=torch.bfloat16)
    layout = Packed(cu_seqlens(lengths), cu_seqlens(lengths), 2000, 2000)
    operands, options = describe((q, k, v), layout, {"causal": True})
    problem = AttentionProblem.of(operands, options)
    lse = torch.zeros(q.shape[1], q.shape[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "order_of_call", lambda *_: Order(1, 1))
        made = launch.allocation(problem, operands).buffers()
        launches = backward_launches(problem, operands, v, lse, v, None, made, None)
    blocks = sum(-(-n // 128) for n in lengths)
    heads = (q.shape[1], k.shape[1], q.shape[1])
    for one, count in zip(launches, heads, strict=True):
        assert torch.Size(one.grid).numel() <= (blocks + 1) * count
