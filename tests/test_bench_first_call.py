"""The benchmark of first calls, without a GPU: which processes it starts and what it reports."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import first_call

pytestmark = pytest.mark.slow


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The name of the case of each process, and whether its cache of kernels was empty."""
    started = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        folder = Path(env["TRITON_CACHE_DIR"])
        started.append((command[-1], not os.listdir(folder)))
        (folder / "kernel").touch()
        seconds = dict.fromkeys(first_call.STAGES, float(len(started)))
        return SimpleNamespace(returncode=0, stdout=f"a warning\n{json.dumps(seconds)}\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("flashtile.cli.machine.provenance", lambda *_: {"device": "a GPU"})
    return started


def test_every_case_starts_with_an_empty_cache_once(
    processes: list[tuple[str, bool]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "first.csv"
    first_call.measure(["dense-64", "decode-128"], 3, path)
    cold_first = [True, False, False, False]
    names = ["dense-64"] * 4 + ["decode-128"] * 4
    assert processes == list(zip(names, cold_first * 2, strict=True))
    with path.open() as file:
        rows = list(csv.DictReader(file))
    found = [(row["case"], row["cache"], row["runs"], float(row["first_call"])) for row in rows]
    assert found == [
        ("dense-64", "cold", "1", 1.0),
        ("dense-64", "warm", "3", 3.0),  # the median of 2, 3 and 4
        ("decode-128", "cold", "1", 5.0),
        ("decode-128", "warm", "3", 7.0),
    ]
    assert {row["device"] for row in rows} == {"a GPU"}
    assert ["dense-64", "warm"] in [
        line.split()[:2] for line in capsys.readouterr().out.splitlines()
    ]


def test_a_case_that_fails_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its line says why; one that fails with a full cache has a line for the empty one."""
    warm_only = []
    out_of_memory = "torch._inductor.exc.InductorError: OutOfResources: shared memory"

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        if command[-1] == "flex-relative-bias-128":
            error = (
                "Traceback:\n  File\ntriton.runtime.errors.OutOfResources: shared memory\n\n"
                "The above exception was the direct cause of the following exception:\n\n"
                "torch._inductor.exc.InductorError: OutOfResources: shared memory\n\n"
                "Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace\n"
            )
            return SimpleNamespace(returncode=1, stdout="", stderr=error)
        if command[-1] == "spans-128" and warm_only:
            return SimpleNamespace(returncode=-11, stdout="", stderr="")
        warm_only.append(command[-1])
        return SimpleNamespace(returncode=0, stdout=json.dumps(dict.fromkeys(first_call.STAGES, 1)))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("flashtile.cli.machine.provenance", lambda *_: {"device": "a GPU"})
    path = tmp_path / "first.csv"
    first_call.measure(["flex-relative-bias-128", "spans-128", "dense-64"], 2, path)
    with path.open() as file:
        found = [
            (x["case"], x["cache"], x["first_call"], x["failed"]) for x in csv.DictReader(file)
        ]
    assert found == [
        ("flex-relative-bias-128", "cold", "", out_of_memory),
        ("spans-128", "cold", "1.0000", ""),
        ("spans-128", "warm", "", "exit status -11"),
        ("dense-64", "cold", "1.0000", ""),
        ("dense-64", "warm", "1.0000", ""),
    ]
    assert f"cold  failed: {out_of_memory}" in capsys.readouterr().out


def test_an_interrupted_run_keeps_what_it_has(
    processes: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, lines = tmp_path / "first.csv", []
    started = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        lines.append(len(path.read_text().splitlines()))
        if len(lines) == 4:
            raise KeyboardInterrupt
        return started(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        first_call.measure(["dense-64", "decode-128"], 1, path)
    assert lines == [1, 2, 3, 4]  # the header, and a line for each process before
    assert len(path.read_text().splitlines()) == 4


def test_the_import_of_a_peer_is_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_call, "import_flex", lambda: time.sleep(0.05))
    monkeypatch.setattr(first_call, "CASES", dict.fromkeys(("dense-64", "flex-spans-128"), small))
    ours, theirs = map(first_call.stages, ("dense-64", "flex-spans-128"))
    assert ours["peer_import"] == 0 and theirs["peer_import"] >= 0.05
    for seconds in (ours, theirs):
        assert seconds["with_import"] == seconds["peer_import"] + seconds["first_call"]
    assert theirs["device_start"] < 0.05


def small() -> Callable[[], Tensor]:
    return lambda: torch.zeros(2, 3)


def test_a_loss_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient as an argument of `backward` makes PyTorch import sympy, which takes seconds."""
    x = torch.ones(2, 3, requires_grad=True)
    seen: list[tuple[Tensor, Any]] = []
    backward = Tensor.backward
    monkeypatch.setattr(
        Tensor,
        "backward",
        lambda loss, *given: seen.append((loss, given)) or backward(loss, *given),
    )
    monkeypatch.setitem(first_call.CASES, "dense-64", lambda: lambda: x * 2)
    first_call.stages("dense-64")
    assert [(loss.dim(), given) for loss, given in seen] == [(0, ()), (0, ())]
    assert x.grad is not None and x.grad.is_contiguous()


def test_the_name_of_the_device_hides_no_stage(
    processes: list[tuple[str, bool]], tmp_path: Path
) -> None:
    path = tmp_path / "first.csv"
    first_call.measure(["spans-128"], 1, path)
    with path.open() as file:
        cold, _ = csv.DictReader(file)
    assert {float(cold[stage]) for stage in first_call.STAGES} == {1.0}
    assert cold["failed"] == ""
    assert cold["device"] == "a GPU"


def test_a_group_is_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[list[str]] = []
    monkeypatch.setattr(first_call, "measure", lambda names, *_: measured.append(names))
    monkeypatch.setattr("sys.argv", ["first_call", "--cases", "masks", "dense-64"])
    assert first_call.main() == 0
    assert measured == [[*first_call.MASK_CASES, "dense-64"]]


def test_a_first_call_is_a_forward_and_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_call, "TOKENS", 64)
    monkeypatch.setattr(first_call, "EDGES", (0, 10, 11, 40, 64))
    inputs = [x.detach().requires_grad_() for x in first_call.qkv()]
    monkeypatch.setattr(first_call, "qkv", lambda: inputs)
    seconds = first_call.stages("spans-128")
    assert list(seconds) == list(first_call.STAGES) and seconds.pop("peer_import") == 0
    assert min(seconds.values()) > 0
    assert seconds["first_call"] == seconds["forward"] + seconds["backward"]
    assert all(x.grad is not None for x in inputs)


@pytest.mark.parametrize("name", ["score-function-128", "relative-bias-128", "spans-128"])
def test_flex_makes_the_same_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_call, "TOKENS", 64)
    monkeypatch.setattr(first_call, "EDGES", (0, 10, 11, 40, 64))
    inductor = torch.compile  # which FlexAttention also calls where it is not compiled
    monkeypatch.setattr(torch, "compile", lambda f, **how: inductor(f, **how) if how else f)

    def call(name: str) -> Tensor:
        torch.manual_seed(0)
        return first_call.MASK_CASES[name]()()

    ours, theirs = call(name), call(f"flex-{name}")
    assert ours.requires_grad
    torch.testing.assert_close(ours, theirs.transpose(1, 2), atol=0.02, rtol=0.02)
