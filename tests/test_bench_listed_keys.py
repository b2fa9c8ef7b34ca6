"""The benchmark of listed keys, on a CPU."""

from __future__ import annotations

import csv
from argparse import Namespace

import pytest

from benchmarks.listed_keys import Problem, lines, main, ours

pytestmark = pytest.mark.slow


def test_it_writes_a_line_for_each_pass(tmp_path, capsys):
    path = tmp_path / "listed_keys.csv"
    sizes = ["--tokens", "256", "--heads", "2", "--head-dim", "16", "--dtype", "float32"]
    assert main([*sizes, "--device", "cpu", "--budget", "1", "--csv", str(path)]) == 0
    with path.open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    of_blocks = [(call, 2) for call in ("shared mask", "lists made anew", "dense")]
    of_keys = [("key_index", 64), ("dense", 64)]
    of_rows = [("key_blocks", 16), ("dense", 16)]
    assert [(line["call"], int(line["heads_q"])) for line in found[::2]] == [
        *of_blocks * 6,
        *of_keys * 2,
        ("key_index", 16),
        ("dense", 16),
        *of_rows,
        *of_keys,
        *of_rows,
    ]
    assert {line["pass"] for line in found[1::2]} == {"backward"}
    assert all(float(line["median_ms"]) > 0 and not line["error"] for line in found)
    listed_twice = [line for line in found if line["call"] == "lists made anew"]
    assert all(float(line["difference"]) < 1e-6 for line in listed_twice)
    assert "key_index" in capsys.readouterr().out


def test_a_library_that_fails_has_its_error_on_its_lines():
    def fail():
        raise ImportError("no such library\nat all")

    calls = {"key_index": ours(window_size=(3, 0)), "dense": ours(), "other": fail}
    args = Namespace(head_dim=8, dtype="float32", device="cpu", budget=1)
    found = list(lines(Problem(20, 2, 1, "none", calls), args))
    assert [line[4:6] for line in found[-2:]] == [("other", "forward"), ("other", "backward")]
    assert [line[-1] for line in found] == [""] * 4 + ["no such library"] * 2
