"""The command: it finds its parts, imports no more than it needs, and writes what it says."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from flashtile import __version__, cli
from flashtile.call import dispatch
from flashtile.cli import bench, info


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([flag])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"flashtile {__version__}"


@pytest.mark.parametrize("argv", [["unknown"], ["info", "--unknown"]])
def test_a_wrong_command_line_stops_with_usage(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: flashtile" in capsys.readouterr().err


def test_without_a_command_it_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: flashtile")
    assert "``" not in printed  # markup of docstrings


def test_help_keeps_names_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["tune", "--help"])
    assert "the Triton backend on this GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--seq-len", "abc", "got abc, want an integer of at least 1"),
        ("--batch-size", "0", "got 0, want an integer of at least 1"),
        ("--device", "gpu", "want cpu or cuda:N"),
        ("--device", "cuda:99", "CUDA device"),
    ],
)
def test_bench_says_what_is_wrong_in_one_line(
    option: str, value: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["bench", option, value])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    printed = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert name in printed
        assert find_spec(f"flashtile.cli.{name}")


def test_only_the_command_asked_for_is_imported() -> None:
    loaded = _python(
        "import sys; from flashtile.cli import main\n"
        "try: main(['info', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = ('flashtile.cli.demo', 'transformers', 'matplotlib', 'rich', 'triton')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert loaded.endswith("[]")


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "flashtile", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"flashtile {__version__}"


# info


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering is a global act, and importing transformers takes seconds."""
    monkeypatch.setattr(info, "transformers_state", lambda: {"state": "not asked"})


@pytest.mark.usefixtures("no_transformers")
def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["flashtile"] == __version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert list(found["backends"]) == list(dispatch.ORDER)
    on_cpu = found["backends"]["cpu"]["cpu"]
    assert {"float16", "bfloat16", "float32", "float64"} <= set(on_cpu["dtypes"])
    assert on_cpu["reasons"] == []


@pytest.mark.usefixtures("no_transformers")
def test_info_for_people(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTILE_CHECK", "1")
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for word in ("flashtile", __version__, "torch", "backends", "cpu", "FLASHTILE_CHECK=1"):
        assert word in printed
    assert "are on" in printed


def test_info_says_why_a_backend_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(name: str, problem: object) -> list[str]:
        return ["tensors are on cpu (this backend: moon)"]

    monkeypatch.setattr(dispatch, "unsupported_reasons", reasons)
    answer = info.support("cpu", "cpu")
    assert answer == {"dtypes": [], "reasons": ["tensors are on cpu (this backend: moon)"]}
    monkeypatch.setattr(info, "transformers_state", dict)
    assert "- tensors are on cpu (this backend: moon)" in info.as_text(info.collect())


def test_info_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashtile.bench.machine.package_version", lambda name: None)
    assert "not installed" in info.transformers_state()["state"]


def test_info_with_transformers() -> None:
    pytest.importorskip("transformers")
    state = _python("from flashtile.cli.info import transformers_state as s; print(s()['state'])")
    assert state.startswith("register() works")


# bench

TINY = ["--seq-len", "32", "--num-heads", "2", "--head-dim", "8", "--seconds", "0"]


def test_bench_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", *TINY, "--device", "cpu", "--pass", "both", "--use-causal", "both"]
    argv += ["--dtype", "fp32", "bfloat16", "--peers", "flashtile", "standard", "fa3"]
    argv += ["--output", str(tmp_path), "--csv", str(tmp_path / "other" / "x.csv")]
    assert cli.main(argv) == 0
    captured = capsys.readouterr()
    assert "flashtile (cpu)" in captured.out
    assert "skipped fa3 (dense): runs on CUDA alone" in captured.out
    assert "[4/4," in captured.err
    with (tmp_path / "results.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * 2 * 2 * 3  # dtypes, causal or not, passes, peers
    assert {line["dtype"] for line in lines} == {"float32", "bfloat16"}
    assert {line["causal"] for line in lines} == {"True", "False"}
    assert lines[0]["command"].startswith("flashtile bench --seq-len 32")
    assert (tmp_path / "other" / "x.csv").read_text() == (tmp_path / "results.csv").read_text()
    assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == len(lines)


def test_bench_without_matplotlib_still_writes_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    argv = ["bench", *TINY, "--device", "cpu", "--peers", "standard", "--output", str(tmp_path)]
    assert cli.main(argv) == 0
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"results.csv", "results.json"}


def test_bench_fails_when_nothing_could_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *TINY, "--device", "cpu", "--peers", "fa2"]) == 1
    assert "skipped fa2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [["--seq-len", "0"], ["--dtype", "int4"], ["--peers", "nobody"], ["--functions", "none"]],
)
def test_bench_refuses_wrong_values(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", *wrong])
    assert stop.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_bench_wants_heads_that_divide(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--num-heads", "8", "9", "--num-heads-kv", "4"]) == 2
    assert "--num-heads-kv 4" in capsys.readouterr().err


def test_bench_measures_every_combination_of_its_flags() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    flags = "--functions dense window --seq-len 64 128 --num-heads 8 --num-heads-kv 2 --use-causal"
    cases = bench.cases(parser.parse_args(flags.split()), "cpu")
    assert [(case.variant, case.seqlen_k) for case in cases] == [
        ("dense", 64),
        ("dense", 128),
        ("window", 64),
        ("window", 128),
    ]
    assert all(case.causal and case.heads_kv == 2 and case.dtype == "float32" for case in cases)
    assert bench.cases(parser.parse_args([]), "cuda")[0].dtype == "bfloat16"
