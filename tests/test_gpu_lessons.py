"""The kernels of the lessons on a GPU, tuned; tests/kernels interprets and compiles them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from lessons import LENGTHS, assert_both_passes

from flashtile.testing import generator

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("M", "N"), LENGTHS)
def test_attention(M: int, N: int, dtype: torch.dtype, causal: bool, seed: int):
    assert_both_passes("cuda", M, N, dtype, causal, seed)


def test_first_kernels():
    from examples.learn.first_kernels import add, matmul, softmax  # want Triton

    x = torch.randn(100, 70, generator=generator(0)).cuda()
    torch.testing.assert_close(add(x[0], x[1], block=16), x[0] + x[1])
    torch.testing.assert_close(softmax(x.T), torch.softmax(x.T, 1))
    exact = (x.double() @ x.T.double()).float()
    torch.testing.assert_close(matmul(x, x.T), exact, atol=1e-4, rtol=1e-5)


@pytest.fixture
def hopper() -> None:
    """Lesson 8's kernel runs on nothing else."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU (compute capability 9.0)")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_every_schedule_on_hopper(dtype: torch.dtype, seed: int):
    from examples.learn.hopper_ablation import check  # wants Triton

    check(dtype, seed)


@pytest.mark.usefixtures("hopper")
def test_the_ablation_writes_times_and_timelines(tmp_path: Path):
    from examples.learn.hopper_ablation import ROLE_NAMES, SCHEDULES, main
    from examples.learn.hopper_attention import CONSUMER_EVENTS

    small = ["--batch-size", "1", "--seq-len", "1024", "--budget-ms", "1"]
    main([*small, "--output", str(tmp_path)])
    with (tmp_path / "ablation.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["schedule"] for line in lines] == [*SCHEDULES, "flashtile", "cuDNN"]
    assert all(float(line["median_ms"]) > 0 for line in lines)
    found = json.loads((tmp_path / "timeline.json").read_text(encoding="utf-8"))["schedules"]
    assert list(found) == list(SCHEDULES)
    for name, schedule in SCHEDULES.items():
        for steps in found[name]["timeline"].values():
            times = [time for step in steps for time in step]
            assert times == sorted(times), name
        assert all(cycles >= 0 for cycles in found[name]["stages"].values())
        if schedule.HAS_PING_PONG:
            consumers = [found[name]["timeline"][role] for role in ROLE_NAMES[1:]]
            turn = CONSUMER_EVENTS.index("turn")
            turns = sorted((step[turn], me) for me in (0, 1) for step in consumers[me])
            assert [me for _, me in turns] == [0, 1] * len(consumers[0]), name
