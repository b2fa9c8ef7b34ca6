"""The rows of no sequence, filled by the emulated kernel."""

from __future__ import annotations

from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends.hopper.shared.schedule import Side, fill_spare_rows

from . import emulator

TOTAL, RUNS, WIDTH = 3000, 2, 5


def fill(b: int, count: int, part: int, x: Any, **more: Any) -> None:
    arguments = {
        "ptr": x, "value": 7.0, "runs": RUNS, "step": x.shape[-2] * WIDTH, "width": WIDTH, "b": b,
        "count": count, "part": part, "parts": 2, **more,
    }  # fmt: skip
    one = SimpleNamespace(kernel=fill_spare_rows, grid=(1,), arguments=arguments, is_early=False)
    emulator.run(one, seed=0)


@pytest.mark.parametrize(
    ("starts", "used"),
    [
        ([0, 10, 10, 40, TOTAL], None),
        ([0, 10, 10, 40, 90], None),  # more than a chunk is spare
        ([4, 10, 1990, 2000, TOTAL - 1], None),
        ([0, 10, 10, 1500, TOTAL], [10, 0, 1, 1400]),
        ([0, 10, 10, 1500, TOTAL], [0, 5, 3000, 1500]),  # two of more rows than there are
    ],
)
def test_packed(starts: list[int], used: list[int] | None):
    x = torch.zeros(RUNS, TOTAL, WIDTH)
    wanted = torch.full_like(x, 7)
    B, counts = len(starts) - 1, []
    for b, (start, stop) in enumerate(pairwise(starts)):
        counts.append(min(stop - start, used[b]) if used else stop - start)
        wanted[:, start : start + counts[b]] = 0
    side = Side(torch.tensor(starts), None, TOTAL, TOTAL)
    for b, part in product(range(B), range(2)):
        fill(b, counts[b], part, x, B=B, side=side)
    assert torch.equal(x, wanted)


def test_dense():
    used = [1, 0, 1500, 1000]
    for b, count in enumerate(used):
        x = torch.zeros(RUNS, 1500, WIDTH)
        for part in range(2):
            fill(b, count, part, x, B=4, side=Side(None, torch.tensor(used), 4, 1500))
        assert not x[:, :count].any() and (x[:, count:] == 7).all()
