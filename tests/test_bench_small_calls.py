"""Small calls on a CPU: what is compared, and what the limit is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import small_calls
from benchmarks.rows import Row, read_folder
from benchmarks.shapes import Case
from benchmarks.targets import Outcome


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(small_calls.SETTINGS, seconds=0, min_rounds=1)
    monkeypatch.setattr(small_calls, "SETTINGS", settings)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("native_ms", "limit"), [(0.012, 5.0), (0.05, 1.2), (1.0, 1.1)])
def test_short_calls_have_a_limit_in_microseconds(
    native_ms: float, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_calls, "cpu_timer", lambda call: (call(), native_ms)[1])
    for case in small_calls.cases():
        (outcome,) = small_calls.measure(case)
        assert outcome.limit == pytest.approx(limit)
        assert outcome.ratio == pytest.approx(1.0)
        assert (outcome.row.provider, outcome.row.backend) == ("flashtile", "cpu")
        assert outcome.native.provider == "sdpa"


def test_the_summary_says_what_was_missed() -> None:
    row = Row.of(Case(seqlen_q=1, seqlen_k=9, heads_kv=2, causal=True), "flashtile", "forward")
    outcomes = [
        Outcome("step", replace(row, median_ms=ms), row, native_ms=0.02, limit=3.0)
        for ms in (0.0599, 0.0601)
    ]
    headings, lines = small_calls.summary(outcomes)
    assert all(len(line) == len(headings) for line in lines)
    assert lines[0][2:6] == ["(1, 1, 8, 64) over 9 keys of 2 heads", "causal", "59.9", "20.0"]
    assert [line[-1] for line in lines] == ["met", "missed"]


@pytest.mark.usefixtures("quick")
def test_the_preset_writes_a_line_for_each_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--preset", "cpu-small", "--output", str(tmp_path)]) == 0
    rows, _ = read_folder(tmp_path)
    assert len(rows) == 2 * len(small_calls.cases())
    assert "times within their limit" in capsys.readouterr().out
    assert "SDPA" in (tmp_path / "cpu-small.txt").read_text()
