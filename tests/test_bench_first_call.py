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
    assert "dense-64     warm" in capsys.readouterr().out
