"""The CPU targets: the compared calls, and when a target is missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import targets
from benchmarks.rows import Row
from benchmarks.shapes import Case

MIB = 2**20


def test_targets_are_judged_at_equal_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "SETTINGS", replace(targets.SETTINGS, seconds=0, min_rounds=1))
    monkeypatch.setattr(targets, "cpu_timer", lambda call: (call(), 10.0)[1])
    base = Case(variant="targets", heads_q=2, heads_kv=2, seqlen_q=128, seqlen_k=128)
    outcomes = targets.measure(base)
    found = {(o.name, o.row.direction): o for o in outcomes}
    names = set(targets.jobs(base))
    assert set(found) == {(name, "forward") for name in names} | {
        (name, "backward") for name in names - {"paged decode"}
    }
    assert found["full", "forward"].limit == found["causal", "backward"].limit == 1.05
    assert (found["sink", "forward"].limit, found["sink", "backward"].limit) == (1.4, 1.5)
    assert found["sink", "forward"].ratio == 1.0  # as many scores as the causal baseline
    half = found["causal, M = N/2", "forward"]
    share = (64 * 64 + 64 * 65 / 2) / (128 * 129 / 2)
    assert half.native_ms == pytest.approx(10.0 * share)
    assert half.ratio == pytest.approx(1 / share)
    assert len(targets.native_rows(outcomes)) == 3 + 2


def _outcome(name: str, length: int, ms: float, peak: float) -> targets.Outcome:
    row = Row.of(Case(seqlen_q=length, seqlen_k=length, causal=True), "flashtile", "backward")
    row = replace(row, median_ms=ms, peak_mib=peak)
    return targets.Outcome(name, row, row, native_ms=10.0, limit=1.5)


def test_growth_is_the_power_of_the_length() -> None:
    assert targets.growth([_outcome("sink", 1024, 1, 3), _outcome("sink", 4096, 1, 12)]) == 1
    assert targets.growth([_outcome("sink", 1024, 1, 3), _outcome("sink", 2048, 1, 12)]) == 2
    scores = 8 * 1024 * 1024 * 4 / MIB
    ends = [_outcome("bias", 1024, 1, 3 + scores), _outcome("bias", 2048, 1, 6 + 4 * scores)]
    assert targets.growth(ends) == pytest.approx(1)


def test_the_summary_says_what_was_missed() -> None:
    outcomes = [
        *(_outcome("sink", n, 15.0, n) for n in targets.LENGTHS),
        *(_outcome("softcap", n, 14.0 + n / 1024, n * n) for n in targets.LENGTHS),
    ]
    headings, lines = targets.summary(outcomes)
    assert len(headings) == len(lines[0])
    assert [line[2] for line in lines] == ["sink", "softcap"]
    assert lines[0][3] == "15 / 10 = 1.50"
    assert [line[-1] for line in lines] == ["met", "missed: 2048, 4096, memory"]
