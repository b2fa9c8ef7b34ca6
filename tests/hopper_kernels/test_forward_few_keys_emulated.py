"""The Hopper forward's source run in PyTorch, as in `test_forward_emulated.py`, with the tiles of
problems in which tiles of queries see few keys."""

from __future__ import annotations

from typing import Any

import pytest
from configurations import one_kind_each, pairwise, sample

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends.hopper.forward.plan import NARROW_TILES, plan
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.problem import AttentionProblem
from flashtile.testing import alibi_slopes, generator, normal

from .inputs import dense_inputs
from .test_forward_emulated import (  # noqa: F401 -- `intrinsics` is a fixture of every test
    dense,
    intrinsics,
    packed,
)

SINK = normal(generator(0), 2)
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (50, 20)},
    "causal window": {"window_size": (90, 0), "sink": SINK},
    "causal chunk": {"attention_chunk": 100, "causal": True},
    "softcap": {"softcap": 3.0, "causal": True},
    "alibi": {"alibi_slopes": alibi_slopes(generator(0), 2), "causal": True},
}
HEAD_DIMS = [64, 80, 96, 128]


@pytest.mark.parametrize(("option", "head_dim"), one_kind_each(OPTIONS, HEAD_DIMS))
def test_options(option: str, head_dim: int):
    sizes = {"D": head_dim, "M": 290, "N": 330}
    call = describe(dense_inputs(0, "contiguous", sizes), Dense(), OPTIONS[option])
    keys = NARROW_TILES[head_dim, head_dim].BLOCK_N
    assert keys == plan(AttentionProblem.of(*call)).BLOCK_N
    dense(1, sizes=sizes, **OPTIONS[option])


@pytest.mark.parametrize(
    "lengths", sample([(65, 1), (128, 128), (300, 77), (77, 300), (65, 512)], 2)
)
def test_lengths(lengths: tuple[int, int]):
    dense(sizes={"M": lengths[0], "N": lengths[1], "D": 96}, causal=True)


@pytest.mark.parametrize(
    ("head_dim", "used", "option"), pairwise(HEAD_DIMS, [False, True], ["causal", "window"])
)
def test_packed(head_dim: int, used: bool, option: str):
    packed(4, used, head_dim, **OPTIONS[option])
