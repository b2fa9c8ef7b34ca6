"""The benchmark of first calls, without a GPU: which processes it starts and what it reports."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import first_call


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The name of the case of each process, and whether its cache of kernels was empty."""
    started = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        folder = Path(env["TRITON_CACHE_DIR"])
        started.append((command[-1], not os.listdir(folder)))
        (folder / "kernel").touch()
        seconds = dict.fromkeys(first_call.STAGES, float(len(started)))
        return SimpleNamespace(stdout=f"a warning\n{json.dumps(seconds)}\n")

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


def test_the_name_of_the_device_hides_no_stage(
    processes: list[tuple[str, bool]], tmp_path: Path
) -> None:
    path = tmp_path / "first.csv"
    first_call.measure(["spans-128"], 1, path)
    with path.open() as file:
        cold, _ = csv.DictReader(file)
    assert {float(cold[stage]) for stage in first_call.STAGES} == {1.0}
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
    assert list(seconds) == list(first_call.STAGES) and min(seconds.values()) > 0
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
