"""The benchmark of derivatives, on a CPU."""

from __future__ import annotations

import csv

import pytest

from benchmarks.derivatives import main

pytestmark = pytest.mark.slow


def test_it_writes_a_line_for_each_pass(tmp_path, capsys):
    path = tmp_path / "derivatives.csv"
    sizes = ["--tokens", "40", "--heads", "2", "--head-dim", "16", "--dtype", "float32"]
    assert main([*sizes, "--device", "cpu", "--budget", "1", "--csv", str(path)]) == 0
    with path.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    passes = ("forward", "jvp", "jvp of q", "double backward")
    wanted = [(library, name) for library in ("flashtile", "math") for name in passes]
    assert [(line["library"], line["pass"]) for line in lines] == wanted
    assert all(float(line["median_ms"]) > 0 for line in lines)
    assert "math" in capsys.readouterr().out
