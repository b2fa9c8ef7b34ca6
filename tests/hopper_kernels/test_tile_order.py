"""The order of the Hopper kernels' tiles, and the blocks that they visit, run in PyTorch
(`emulator.py`)."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends.hopper.forward.plan import swizzle_of
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.problem import AttentionProblem

from . import emulator
from .inputs import dense_inputs


def test_head_swizzle():
    """Every tile comes once, and the last swizzle, whose end nothing follows, is a whole one. The
    backward, which multiplies by reciprocals, has the same order."""
    with emulator.emulated() as load_file:
        forward = load_file("flashtile.backends.hopper.shared.schedule")
        backward = load_file("flashtile.backends.hopper.backward.schedule")
    m_tiles = 7
    for heads, swizzle in product([1, 5, 9, 16, 21], [1, 2, 5, 8, 16]):
        numbers = list(map(emulator.tile, range(m_tiles * heads)))
        found = [
            tuple(map(int, forward.swizzled_order(n, m_tiles, heads, swizzle))) for n in numbers
        ]
        for batch in (size for size in (1, 3, 7) if heads % size == 0):
            divisors = backward.order_reciprocals(m_tiles, batch, heads // batch, swizzle)
            sizes = SimpleNamespace(N=64 * m_tiles, swizzle=swizzle, reciprocals=divisors)
            for n, (m, bh) in zip(numbers, found, strict=True):
                coordinates = tuple(map(int, backward.dense_order(n, heads // batch, sizes, 64)))
                assert coordinates == (m, *divmod(bh, heads // batch))
        assert sorted(found) == list(product(range(m_tiles), range(heads)))
        last = list(product(range(m_tiles), range(heads - min(swizzle, heads), heads)))
        assert found[-len(last) :] == last
        for head in range(heads):  # the dQ semaphores of the backward are released in this order
            assert [m for m, h in found if h == head] == list(range(m_tiles))


@pytest.mark.parametrize(
    ("heads", "keys", "swizzle"),
    [((16, 16), 16384, 4), ((32, 8), 16384, 4), ((28, 4), 16384, 7), ((8, 1), 65536, 8)],
)
def test_head_swizzle_of_whole_groups(heads: tuple[int, int], keys: int, swizzle: int):
    """As many heads as fit the cache, but heads with the same keys run together."""
    tensors = dense_inputs(0, "contiguous", {"M": 1, "N": 1})
    problem = AttentionProblem.of(*describe(tensors, Dense(), {"causal": True}))
    problem = problem._replace(Hq=heads[0], Hk=heads[1], M=keys, N=keys)
    assert swizzle_of(problem) == swizzle


def test_division_by_a_reciprocal():
    with emulator.emulated() as load_file:
        schedule = load_file("flashtile.backends.hopper.shared.schedule")
    for divisor in (1, 2, 3, 7, 16, 641, 65537, 2**30 + 1, 2**31 - 1):
        by = schedule.reciprocal(divisor)
        last = (2**31 - 1) // divisor * divisor
        multiples = (0, divisor, last // 2 // divisor * divisor, last)
        near = (x + offset for x in multiples for offset in (-1, 0, 1))
        for x in (x for x in near if 0 <= x < 2**31):
            found = schedule.divide(emulator.tile(x), divisor, by)
            assert tuple(map(int, found)) == divmod(x, divisor)


def test_blocks_of_a_window():
    """Of every pair of sides: also where the only visible key of a block is its first or last."""
    with emulator.emulated() as load_file:
        schedule = load_file("flashtile.backends.hopper.shared.schedule")
    M, N, block = 24, 32, 8
    cfg = SimpleNamespace(BLOCK_N=block, RUNS=0, HAS_LEFT=True, HAS_RIGHT=True, HAS_CHUNK=False)
    for left, right, first in product(range(block + 2), range(block + 2), range(0, M, block)):
        mask = SimpleNamespace(left=left, right=right)
        bounds = map(emulator.tile, (first, first + block - 1))
        begin, end = schedule.blocks_of(*bounds, 0, M, N, mask, cfg)
        position = first + N - M
        keys = range(max(position - left, 0), min(position + block + right, N))
        assert (int(begin), int(end)) == (keys[0] // block, keys[-1] // block + 1)
