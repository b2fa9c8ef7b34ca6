"""`flashtile check`: correct results pass; wrong ones are found, named and reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtile import api
from flashtile.cli import check
from flashtile.cli.check import calls, judge
from flashtile.cli.check.calls import Case
from flashtile_command import main

pytestmark = pytest.mark.slow

SEED = "5"
ALL = calls.cases("cpu", quick=False)


def named(*names: str, dtype: str = "float32") -> list[Case]:
    """Some of the cases of the CPU."""
    return [case for case in ALL if case.name in names and case.dtype == dtype]


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[Case]], None]:
    """Reduces the checks to some cases and one short measurement."""

    def leave(cases: Iterable[Case]) -> None:
        monkeypatch.setattr(check, "cases", lambda device, quick: list(cases))

    monkeypatch.setattr(check, "SHAPES", (check.speed.Shape(32, 16),))
    monkeypatch.setattr(check.speed, "BUDGET_MS", 0.0)
    return leave


def checked(path: Path) -> int:
    return main(["check", "--device", "cpu", "--seed", SEED, "--output", str(path)])


def test_what_is_right_passes(only: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    only([*named("causal", "cache, append"), *named("full", dtype="float8_e4m3fn")])
    path = tmp_path / "report.md"
    assert checked(path) == 0
    printed = capsys.readouterr().out
    assert "[3/3, " in printed
    assert "3 calls are right, 0 FAILED" in printed
    text = path.read_text()
    assert torch.__version__ in text
    assert f"| seed | {SEED} |" in text
    assert "| cpu | float32 | 2 | 0 | 0 |" in text
    assert "## Failures" not in text
    assert "forward and backward" in text  # of the speed table


def test_a_planted_error_is_found_and_the_others_are_judged(
    only: Any, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = api.attention

    def one_key_too_few(*args: Any, **given: Any) -> Any:
        if given.get("window_size") == (37, 0):
            given["window_size"] = (36, 0)
        return right(*args, **given)

    monkeypatch.setattr(api, "attention", one_key_too_few)
    only(named("causal", "sliding window", "softcap"))
    path = tmp_path / "report.md"
    assert checked(path) == 1
    printed = capsys.readouterr().out
    assert "FAILED cpu float32: sliding window" in printed
    assert "2 calls are right, 1 FAILED" in printed
    failures = path.read_text().split("## Failures")[1].split("## Results")[0]
    assert failures.count("###") == 1
    assert "flashtile.attention(q=float32[2, 150, 4, 64]" in failures
    assert "window_size=(37, 0)" in failures
    for name in ("out", "lse", *(f"{x} through out" for x in ("dq", "dk", "dv"))):
        assert f"\n{name}: " in failures


def test_an_error_in_what_a_cache_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = api.attention_with_kvcache

    def also_writes_elsewhere(**given: Any) -> Any:
        result = right(**given)
        given["v_cache"][1, -1, 0, 0] += 1
        return result

    monkeypatch.setattr(api, "attention_with_kvcache", also_writes_elsewhere)
    (case,) = named("cache, append")
    outcome = judge.outcome_of(case, "cpu", 5)
    assert [failure.split(":")[0] for failure in outcome.failures] == ["v_cache"]


def test_a_crash_is_reported_with_its_location(
    only: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashtile.backends.cpu import launch

    def breaks(*args: Any, **given: Any) -> None:
        raise RuntimeError("the card fell out")

    monkeypatch.setattr(launch, "forward", breaks)
    monkeypatch.setattr(api, "attention_varlen", breaks)
    only(named("causal", "packed, causal", "cache, append"))
    path = tmp_path / "report.json"
    assert checked(path) == 1
    found = json.loads(path.read_text())
    failed = [x["failures"] for x in found["outcomes"] if x["failures"]]
    assert ["RuntimeError: the card fell out"] * len(failed) == [x[0] for x in failed]
    assert all(x[1].startswith("at flashtile/") for x in failed)


def test_what_no_backend_supports_is_no_failure(only: Any, tmp_path: Path) -> None:
    here = named("causal")
    elsewhere = [Case(x.name, x.dtype, "triton", x.make) for x in here]
    only(here + elsewhere)
    path = tmp_path / "report.md"
    assert checked(path) == 0
    assert "- triton: tensors are on cpu" in path.read_text()
    only(elsewhere)
    assert checked(path) == 1  # nothing was right


def test_another_missing_feature_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(**given: Any) -> None:
        raise NotImplementedError("no such instruction")

    monkeypatch.setattr(api, "attention", breaks)
    outcome = judge.outcome_of(named("causal")[0], "cpu", 5)
    assert outcome.failures[0] == "NotImplementedError: no such instruction"


def test_json_has_no_folder_of_the_user(only: Any, tmp_path: Path) -> None:
    only(named("causal"))
    path = tmp_path / "report.json"
    assert checked(path) == 0
    text = path.read_text()
    found = json.loads(text)
    assert found["passed"] is True
    assert found["outcomes"][0]["call"].startswith("flashtile.attention(q=float32[")
    assert {"versions", "cpu", "gpus", "backends"} == set(found["machine"])
    assert str(Path.home()) not in text


def test_what_was_done_before_an_interrupt_is_written(
    only: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(case: Case, device: str, seed: int) -> judge.Outcome:
        if case.name == "causal":
            raise KeyboardInterrupt
        return judge.Outcome(case, "call")

    monkeypatch.setattr(check, "outcome_of", stops)
    only(named("full", "causal"))
    path = tmp_path / "report.md"
    assert checked(path) == 1
    assert "stopped early: 1 calls are right" in path.read_text()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--device", "gpu"], "want cpu or cuda:N"),
        (["--device", "cuda:99"], "CUDA device"),
        (["--device", "cpu", "--output", "no/such/report.md"], "does not exist"),
    ],
)
def test_it_says_what_is_wrong_in_one_line(
    flags: list[str], why: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["check", *flags]) == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_the_cases_reach_every_function_and_dtype() -> None:
    assert len({str(case) for case in ALL}) == len(ALL)
    assert {case.dtype for case in ALL} == {
        "float8_e4m3fn",
        *["float16", "bfloat16", "float32", "float64"],
    }
    g = torch.Generator()
    functions = {case.make(g, torch.float32).function for case in ALL}
    assert functions == set(judge.REFERENCES)
    assert set(map(str, calls.cases("cpu", quick=True))) < {str(case) for case in ALL}


EVERY = [
    *named(*calls.PLAIN, *calls.CORE, *calls.ADDITIONAL),
    *named(*calls.BFLOAT16, dtype="bfloat16"),
    *named(*calls.FLOAT8, dtype="float8_e4m3fn"),
]


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_case_is_right_on_the_cpu(case: Case, seed: int) -> None:
    outcome = judge.outcome_of(case, "cpu", seed)
    assert not outcome.failures
    assert not outcome.unsupported
