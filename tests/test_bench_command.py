"""The benchmark command: it rejects wrong arguments, and writes its measurements."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.command import Command
from flashtile.cli import integer

TINY = ["--seq-len", "32", "--num-heads", "2", "--head-dim", "8", "--seconds", "0"]


def test_it_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*TINY, "--device", "cpu", "--pass", "both", "--use-causal", "both"]
    argv += ["--dtype", "fp32", "bfloat16", "--peers", "flashtile", "standard", "fa3"]
    argv += ["--output", str(tmp_path), "--csv", str(tmp_path / "other" / "x.csv")]
    assert command.main(argv) == 0
    captured = capsys.readouterr()
    assert "flashtile (cpu)" in captured.out
    assert "skipped fa3 (dense): runs only on CUDA" in captured.out
    assert "[4/4," in captured.err
    with (tmp_path / "results.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * 2 * 2 * 3  # dtypes, causal or not, passes, peers
    assert {line["dtype"] for line in lines} == {"float32", "bfloat16"}
    assert {line["causal"] for line in lines} == {"True", "False"}
    assert lines[0]["command"].startswith("python -m benchmarks --seq-len 32")
    assert (tmp_path / "other" / "x.csv").read_text() == (tmp_path / "results.csv").read_text()
    assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == len(lines)


def test_it_without_matplotlib_still_writes_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    argv = [*TINY, "--device", "cpu", "--peers", "standard", "--output", str(tmp_path)]
    assert command.main(argv) == 0
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"results.csv", "results.json"}


def test_it_fails_when_nothing_could_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*TINY, "--device", "cpu", "--peers", "fa2"]) == 1
    assert "skipped fa2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [["--seq-len", "0"], ["--dtype", "int4"], ["--peers", "nobody"], ["--functions", "none"]],
)
def test_it_refuses_wrong_values(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main([*wrong])
    assert stop.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_it_wants_heads_that_divide(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--num-heads", "8", "9", "--num-heads-kv", "4"]) == 2
    assert "--num-heads-kv 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", ["--functions window", "--batch-size 2", "--num-heads 4", "--num-heads-kv 2"]
)
def test_flags_that_a_preset_does_not_take_are_refused(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--preset", "gpu-dense", *flag.split()]) == 2
    assert f"{flag.split()[0]}: the cases of --preset gpu-dense" in capsys.readouterr().err


def test_it_measures_every_combination_of_its_flags() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    flags = "--functions dense window --seq-len 64 128 --num-heads 8 --num-heads-kv 2 --use-causal"
    cases = command.cases(parser.parse_args(flags.split()), "cpu")
    assert [(case.variant, case.seqlen_k) for case in cases] == [
        ("dense", 64),
        ("dense", 128),
        ("window", 64),
        ("window", 128),
    ]
    assert all(case.causal and case.heads_kv == 2 and case.dtype == "float32" for case in cases)
    assert command.cases(parser.parse_args([]), "cuda")[0].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--seq-len", "abc", "got abc, want an integer of at least 1"),
        ("--batch-size", "0", "got 0, want an integer of at least 1"),
        ("--device", "gpu", "want cpu or cuda:N"),
        ("--device", "cuda:99", "CUDA device"),
    ],
)
def test_it_says_what_is_wrong_in_one_line(
    option: str, value: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = command.main([option, value])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_a_small_benchmark_writes_each_line_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines before a failure are in the file, behind which stands where they come from."""

    def measure(args: argparse.Namespace) -> Iterator[tuple[object, ...]]:
        for number in args.counts:
            yield number, f"{args.budget / number:.1f}"

    path = tmp_path / "new" / "x.csv"
    small = Command("small", "Quotients.\n\nMore.", device="cpu", budget_ms=6.0)
    integer(small, "--counts", (1, 2), "divisors")
    argv = ["--csv", str(path), "--counts", "3", "4", "0"]
    with pytest.raises(ZeroDivisionError):
        small.run(argv, {"count": 5, "quotient": 8}, measure)
    shown = ["count quotient", "    3      2.0", "    4      1.5"]
    assert capsys.readouterr().out.splitlines() == shown
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["count"], line["quotient"]) for line in lines] == [("3", "2.0"), ("4", "1.5")]
    assert lines[0]["command"] == "python -m benchmarks.small --csv x.csv --counts 3 4 0"
    assert "(default: 1 2)" in small.format_help()
