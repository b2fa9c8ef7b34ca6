"""The benchmark of `batch_invariant`, on a CPU."""

from __future__ import annotations

import csv

import pytest

from benchmarks.batch_invariance import main

pytestmark = pytest.mark.slow


def test_it_writes_a_line_for_each_call(tmp_path, capsys):
    path = tmp_path / "invariance.csv"
    sizes = ["--tokens", "64", "--heads", "2", "--kv-heads", "1", "--head-dim", "16"]
    cases = ["--dtype", "float32", "--cases", "forward 64", "backward 16", "decode 2 x 40"]
    assert main([*sizes, *cases, "--device", "cpu", "--budget", "1", "--csv", str(path)]) == 0
    with path.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    calls = ["free", "batch_invariant"]
    wanted = [(case, call) for case in cases[3:5] for call in (*calls, "sdpa")]
    wanted += [(cases[5], call) for call in calls]
    assert [(line["case"], line["call"]) for line in lines] == wanted
    assert all(float(line["ratio"]) > 0 for line in lines)
    assert "decode 2 x 40" in capsys.readouterr().out
