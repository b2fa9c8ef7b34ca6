"""The benchmark of clock and power; its clocks are those of a GPU, so they are replaced here."""

from __future__ import annotations

import csv

from benchmarks import clocks


def test_a_line_for_each_peer_and_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(
        clocks, "measured", lambda call, seconds: (bool(len(call())), seconds, 3, 4)
    )
    path = tmp_path / "clocks.csv"
    case = tmp_path / "one.json"
    case.write_text('[{"variant": "small", "seqlen_q": 8, "seqlen_k": 8}]', encoding="utf-8")
    which = ["--set", str(case), "--numbers", "1", "--peers", "flashtile", "fa3"]
    assert clocks.main([*which, "--device", "cpu", "--turns", "2", "--csv", str(path)]) == 0
    with path.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["peer"] for line in lines] == ["flashtile", "fa3"] * 2
    assert lines[0]["row_ms"] == "True"
    assert lines[1]["clock"] == "", "FlashAttention-3 does not run on a CPU"
