"""The tool that compares versions of flashtile: its sets of jobs, its processes, its results."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from argparse import Namespace
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashtile
from benchmarks.compare_trees import __main__ as command
from benchmarks.compare_trees import jobs
from benchmarks.compare_trees.jobs import Job, jobs_of
from benchmarks.compare_trees.outcomes import Comparison, Outcome, difference, ratios, summary
from benchmarks.compare_trees.processes import Pool, Tree
from benchmarks.compare_trees.worker import Answer, Request, trace
from benchmarks.shapes import Case

pytestmark = pytest.mark.slow

PACKAGE = Path(flashtile.__file__).parent
SMALL = {"heads_q": 4, "heads_kv": 2, "seqlen_q": 70, "seqlen_k": 70, "causal": True}


def plant(folder: Path, change: str) -> Path:
    """A tree that is this flashtile until `change`, Python code, alters it."""
    package = folder / "flashtile"
    package.mkdir(parents=True)
    initial = f"__path__ = [{str(PACKAGE)!r}]\n{(PACKAGE / '__init__.py').read_text()}\n"
    (package / "__init__.py").write_text(initial + change)
    return folder


ODD = """
import os, time
from . import api
plain = api.attention

def attention(q, *args, **options):
    if q.shape[-1] == 8:
        raise RuntimeError("no head dim of 8")
    if q.shape[-1] == 24:
        os._exit(7)
    if q.shape[-1] == 40:
        time.sleep(100)
    return plain(q, *args, **options) * float(os.environ["FACTOR"])

api.attention = attention
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], str, int]:
    """Rows, printed text and status of one run; `odd` fails, dies and hangs in some cases."""
    folder = tmp_path_factory.mktemp("trees")
    same = plant(folder / "same", "")
    odd = plant(folder / "odd", ODD)
    broken = plant(folder / "broken", "raise ValueError('broken')")
    cases = [
        {**SMALL, "head_dim": D, "head_dim_v": D, "passes": ["forward", "both"]} for D in (16, 8)
    ]
    cases += [{**SMALL, "head_dim": D, "head_dim_v": D} for D in (24, 40)]
    cases += [{**SMALL, "seqlen_q": 1, "cached": True, "clock": "host"}]
    (folder / "tiny.json").write_text(json.dumps(cases))
    argv = [f"base={PACKAGE.parent}", f"same={same}", f"odd={odd}?FACTOR=1.01&FLASHTILE_COMMIT=abc"]
    argv += [f"broken={broken}", "--cases", str(folder / "tiny.json"), "--rounds", "2"]
    # A busy machine has taken more than 8 seconds for a job.
    argv += ["--csv", str(folder / "out.csv"), "--device", "cpu", "--patience", "20"]
    with redirect_stdout(io.StringIO()) as printed:
        status = command.main(argv)
    with (folder / "out.csv").open(newline="") as file:
        return list(csv.DictReader(file)), printed.getvalue(), status


def rows_of(rows: list[dict[str, str]], tree: str, **wanted: str) -> list[dict[str, str]]:
    return [row for row in rows if {"tree": tree, **wanted}.items() <= row.items()]


def test_every_tree_has_a_row_for_every_job(
    compared: tuple[list[dict[str, str]], str, int],
) -> None:
    rows, _, status = compared
    assert status == 1
    assert len(rows) == 4 * 7
    for tree in ("base", "same"):
        for row in rows_of(rows, tree):
            assert row["skipped"] == ""
            assert row["rounds"] == "2"
            assert float(row["host_us"] if row["clock"] == "host" else row["median_ms"]) > 0
            assert (row["bit_equal"], row["difference"]) == ("True", "0")
    assert {row["preset"] for row in rows} == {"tiny"}


def test_a_tree_has_its_own_code_and_environment(
    compared: tuple[list[dict[str, str]], str, int],
) -> None:
    rows, text, _ = compared
    (forward,) = rows_of(rows, "odd", **{"pass": "forward", "head_dim": "16"})
    (both,) = rows_of(rows, "odd", **{"pass": "both", "head_dim": "16"})
    for row in (forward, both):
        assert row["bit_equal"] == "False"
        assert float(row["difference"]) == pytest.approx(0.01, rel=1e-3)
        assert (row["commit"], row["variables"]) == ("abc", "FACTOR=1.01&FLASHTILE_COMMIT=abc")
    assert "1e-02" in text


def test_failures_cost_only_their_rows(compared: tuple[list[dict[str, str]], str, int]) -> None:
    rows, text, _ = compared
    reasons = {row["head_dim"]: row["skipped"] for row in rows_of(rows, "odd")}
    assert reasons["8"] == "failed: no head dim of 8"
    assert reasons["24"] == "failed: the process ended with status 7"
    assert reasons["40"] == "failed: no answer in 20 s"
    assert reasons["16"] == reasons["64"] == ""
    started = {row["skipped"] for row in rows_of(rows, "broken")}
    assert started == {"failed to start: the process ended with status 1"}
    assert "odd: failed: no head dim of 8 (2: tiny 2 forward, tiny 2 both)" in text


def test_a_time_limit_still_prints_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.json").write_text(json.dumps([SMALL]))
    argv = ["base=.", "--cases", str(tmp_path / "one.json"), "--device", "cpu", "--ahead", "1"]
    assert command.main([*argv, "--limit", "0.01", "--csv", str(tmp_path / "x.csv")]) == 1
    printed = capsys.readouterr().out
    assert "compiled ahead: 0 of 1 runs" in printed
    assert "B1 H4:2 D64 N70 causal" in printed


def test_the_limit_ends_a_round_in_its_middle() -> None:
    class Slow(Pool):
        def __init__(self) -> None:
            pass

        def ask(self, name: str, request: Request, seconds: float) -> Answer:
            time.sleep(0.05)
            return Answer([1.0])

    comparisons = [Comparison(Job(Case(seed=seed)), {"base": Outcome()}) for seed in range(20)]
    how = Namespace(seed=0, calls=1)
    command._measure_round(comparisons, Slow(), 0, how, time.monotonic() + 0.2)
    assert 1 <= sum(bool(comparison.base.samples) for comparison in comparisons) < 20


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["base"], "want NAME=DIR"),
        (["base=."], "--cases"),
        (["base=/nowhere"], "has no folder flashtile"),
        (["base=.?DELAY"], "want NAME=DIR"),
        (["base=.", "base=.", "--cases", "papers"], "a name of its own"),
        (["base=.", "--cases", "nothing"], "no set of cases and no file 'nothing'"),
        (["base=.", "--cases", "field:x"], "want field, field:SEED"),
        (["base=.", "--cases", "papers", "--calls", "0"], "--calls 0, want at least 1"),
        (["base=.", "--cases", "deterministic", "--pass", "both"], "leave no case"),
    ],
)
def test_it_refuses_wrong_arguments(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = command.main([*wrong, "--device", "cpu"])
    except SystemExit as stop:
        status = stop.code  # type: ignore[assignment]
    assert status == 2
    assert said in capsys.readouterr().err


# Jobs


@pytest.mark.parametrize("name", [*jobs.SETS, "field", "field:3", "gpu-decode", "gpu-options"])
def test_every_set_has_numbered_cases(name: str) -> None:
    found = jobs_of(name)
    numbers = list(dict.fromkeys(job.case.index for job in found))
    assert numbers == list(range(1, len(numbers) + 1))
    assert {job.case.preset for job in found} <= {name, "gpu-field"}
    assert len(set(found)) == len(found)


def test_a_field_keeps_the_numbers_of_its_draw() -> None:
    chosen = jobs_of("field:2:17,3")
    assert [(job.case.index, job.direction) for job in chosen] == [
        (number, direction) for number in (3, 17) for direction in ("forward", "backward")
    ]
    assert {job.case for job in chosen} <= {job.case for job in jobs_of("field:2")}


def test_presets_bring_their_clock_and_their_peers() -> None:
    assert {job.clock for job in jobs_of("gpu-decode")} == {jobs.GRAPH}
    assert {job.clock for job in jobs_of("gpu-host")} == {jobs.HOST}
    peers = {job.peer for job in jobs_of("gpu-deterministic")}
    assert peers == {"flashtile", "flashtile-deterministic"}


@pytest.mark.parametrize(
    "wrong", [{"direction": "up"}, {"clock": "sun"}, {"peer": "fa9"}, {"peer": "standard"}]
)
def test_a_job_names_what_it_does_not_know(wrong: dict[str, str]) -> None:
    (value,) = wrong.values()
    with pytest.raises(ValueError, match=value):
        Job(Case(), **wrong)


def test_a_file_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"heads": 4}]')
    with pytest.raises(ValueError, match=r"x\.json: .*heads"):
        jobs_of(str(tmp_path / "x.json"))


# Results


def outcome(x: torch.Tensor, times: dict[int, list[float]]) -> Outcome:
    made = Outcome()
    for number, measured in times.items():
        made.take(number, Answer(measured, [trace(x)]))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traces_tell_how_far_results_are_apart(dtype: torch.dtype) -> None:
    x = torch.randn(3, 50, 4, 64).to(dtype)
    same, noise = outcome(x.clone(), {0: [1.0]}), 0.01 * torch.randn(x.shape)
    base = outcome(x, {0: [1.0]})
    assert difference(base, same) == (True, 0, 0)
    noisy = x.float() + noise
    found = difference(base, outcome(noisy.to(dtype), {0: [1.0]}))
    assert found is not None
    truth = (noisy.to(dtype).float() - x.float()).norm() / x.float().norm()
    assert not found.bit_equal
    assert found.norm == pytest.approx(truth.item(), rel=0.2)


def test_one_wrong_row_and_one_wrong_bit_show() -> None:
    x = torch.randn(2, 500, 4, 64)
    row, bit = x.clone(), x.clone()
    row[1, 17, 2] = torch.randn(64)
    bit.view(torch.int32)[0, 3, 1, 5] ^= 1
    base = outcome(x, {0: [1.0]})
    found = difference(base, outcome(row, {0: [1.0]}))
    assert found is not None
    assert found.norm < 0.1 < found.worst_row
    assert difference(base, outcome(bit, {0: [1.0]}))[0] is False  # type: ignore[index]
    swapped = difference(base, outcome(x.flip(1), {0: [1.0]}))
    assert swapped is not None
    assert swapped.norm > 1 and not swapped.bit_equal


def test_long_rows_may_differ_by_more() -> None:
    x = torch.randn(200, 64)
    x[0] *= 1000
    found = difference(outcome(x, {0: [1.0]}), outcome(x * 1.001, {0: [1.0]}))
    assert found is not None
    assert found.worst_row == pytest.approx(0.001, rel=0.1)
    zeros = outcome(torch.zeros(3, 4), {0: [1.0]})
    assert difference(zeros, outcome(torch.ones(3, 4), {0: [1.0]})) == (False, math.inf, math.inf)
    assert difference(zeros, outcome(torch.zeros(3, 4), {0: [1.0]})) == (True, 0, 0)


def test_nan_and_other_shapes_are_differences() -> None:
    x = torch.randn(5, 8)
    base = outcome(x, {0: [1.0]})
    broken = difference(base, outcome(x / 0 * 0, {0: [1.0]}))
    assert broken is not None
    assert math.isnan(broken.norm) and math.isnan(broken.worst_row)
    assert difference(base, outcome(x[:3], {0: [1.0]})) == (False, math.inf, math.inf)
    assert difference(base, Outcome()) is None


def test_a_ratio_compares_times_of_one_round() -> None:
    x = torch.zeros(1, 1)
    slow = outcome(x, {0: [2.0, 2.0, 9.0], 1: [20.0], 2: [1.0]})
    fast = outcome(x, {0: [1.0], 1: [10.0], 3: [5.0]})
    assert ratios(slow, fast) == (2.0, 2.0, 2.0)
    assert ratios(slow, Outcome()) is None


def test_the_summary_has_the_mean_of_each_set_and_pass() -> None:
    x = torch.ones(1, 4)
    cases = [replace(Case(), preset="papers", index=number) for number in (1, 2)]
    made = [
        Comparison(Job(case), {"base": outcome(x, {0: [4.0]}), "new": outcome(x, {0: [time]})})
        for case, time in zip(cases, (1.0, 4.0), strict=True)
    ]
    (line,) = summary(made)
    assert line == [
        *("papers", "forward", "new", "2/2", "2.000", "1.000", "4.000", "2/2", "0.0e+00", "0.0e+00")
    ]


def test_a_tree_is_parsed() -> None:
    tree = Tree.parse("late=.?DELAY=400&PATH_LIKE=a=b")
    assert (tree.name, tree.folder) == ("late", Path.cwd())
    assert tree.environment == {"DELAY": "400", "PATH_LIKE": "a=b"}
    assert Tree.parse(f"x=.?{tree.variables}").environment == tree.environment
