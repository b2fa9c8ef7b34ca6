"""The benchmark of statistics, on a CPU."""

from __future__ import annotations

import csv

import pytest

from benchmarks.statistics import STATISTICS, main

pytestmark = pytest.mark.slow


def test_it_writes_a_line_for_each_call(tmp_path, capsys):
    path = tmp_path / "statistics.csv"
    sizes = ["--shapes", "1,40,4,2,16", "--dtype", "float32", "--budget", "1"]
    assert main([*sizes, "--device", "cpu", "--csv", str(path)]) == 0
    with path.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    calls = [" + ".join(("forward", *names)) for names in STATISTICS]
    assert [line["call"] for line in lines] == 2 * calls
    assert all(float(line["median_ms"]) > 0 for line in lines)
    assert calls[-1] in capsys.readouterr().out
