"""The benchmark of the calls that ranks make of a backend."""

from __future__ import annotations

import sys

import pytest

from benchmarks.context import kernels

pytestmark = pytest.mark.slow

FAST = ["--device", "cpu", "--dtype", "float32", "--budget-ms", "0"]
SMALL = ["--seq-len", "256", "--heads", "4", "2", "--head-dim", "8", "--ranks", "3"]


@pytest.mark.parametrize("variant", ["dense", "window", "packed"])
def test_it_times_what_the_executor_calls(
    variant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels", *FAST, *SMALL, "--variants", variant])
    kernels.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if " | " in line]
    assert len(lines) == 4  # one group of heads and two, two passes
    for line in lines:
        assert " | cpu | " in line
        difference = float(line.split(" | ")[-1].split(",")[0])
        assert difference < 1e-6
