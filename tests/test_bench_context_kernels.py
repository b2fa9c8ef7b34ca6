"""The benchmark of the calls that ranks make of a backend."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.context import kernels

pytestmark = pytest.mark.slow

FAST = ["--device", "cpu", "--dtype", "float32", "--budget-ms", "0"]
SMALL = ["--seq-len", "256", "--heads", "4", "2", "--head-dim", "8", "--ranks", "3"]


@pytest.mark.parametrize("variant", ["dense", "window", "packed"])
def test_it_times_what_the_executor_calls(variant: str, tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    assert kernels.main([*FAST, *SMALL, "--variants", variant, "--csv", str(path)]) == 0
    with path.open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 4  # one group of heads and two, two passes
    for line in lines:
        assert line["backend"] == "cpu"
        difference = float(line["out: largest difference, equal"].split(",")[0])
        assert difference < 1e-6
