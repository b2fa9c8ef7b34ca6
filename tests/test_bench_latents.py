"""The benchmark of decoding over latents, on a CPU."""

from __future__ import annotations

import csv

from benchmarks.latents import main


def test_rows_and_pages_agree_with_float32(tmp_path):
    path = tmp_path / "latents.csv"
    shapes = ["--shapes", "2,64,3,2,0", "2,64,3,1,16", "--backends", "cpu"]
    assert main([*shapes, "--device", "cpu", "--budget", "1", "--csv", str(path)]) == 0
    with path.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["backend"] for line in lines] == ["cpu", "cpu"]
    assert all(0 < float(line["error"]) < 4e-3 for line in lines)
    assert all(float(line["median_us"]) > 0 for line in lines)
