"""The tables of masks and score functions on the performance pages."""

from __future__ import annotations

import csv
import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import block_masks, first_call, presets
from benchmarks.rows import Row, write_csv

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[1] / "docs"
ORIGIN = {"device": "NVIDIA GPU", "date": "2026-01-01", "commit": "0123456789"}
MEASURED = "Measured on an NVIDIA GPU on 2026-01-01 at commit 0123456."
H200, H100 = "h200/masks", "h100/masks"  # where the results are


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    module = importlib.import_module("mask_results")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    for folder in (H200, H100):
        (tmp_path / folder).mkdir(parents=True)
    return module


def write_preset(path: Path, name: str, times: dict[str, float], skipped: str = "") -> None:
    """All cases of a preset with these milliseconds; the peer `skipped` has none."""
    rows = []
    for case in presets.preset_cases(name):
        for direction in ("decode",) if case.cached else ("forward", "backward"):
            for peer, ms in times.items():
                row = Row.of(case, peer, direction).timed(case, [ms])
                none = {"median_ms": None, "tflops": None, "skipped": "cannot"}
                rows.append(replace(row, **none) if peer == skipped else row)
    write_csv(path, rows, ORIGIN)


def write_lines(path: Path, lines: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*lines[0], *ORIGIN])
        writer.writeheader()
        writer.writerows(line | ORIGIN for line in lines)


def lines_of(text: str) -> list[str]:
    """Of a table: its head and its lines, without the rule and without the origin below."""
    table, origin = text.split("\n\n")
    assert origin == MEASURED
    head, _, *lines = table.splitlines()
    return [head, *lines]


def test_what_was_not_measured_says_how(results: ModuleType) -> None:
    for text in (*results.blocks().values(), results.cascade()):
        assert text.startswith("Not measured yet: `python -m benchmarks")


def test_times_and_how_many_times_as_fast(results: ModuleType, tmp_path: Path) -> None:
    times = {"flashtile": 1.0, "flashtile-function": 4.0, "flashtile-spans": 9.0, "flex": 3.0}
    write_preset(tmp_path / H200 / "masks-64.csv", "gpu-masks", times, skipped="flashtile-spans")
    for direction in ("forward", "backward"):
        header, *lines = lines_of(results.speeds(direction))
        assert len(lines) == len(presets.preset_cases("gpu-masks"))
        assert header.count("|") == lines[0].count("|")
        assert lines[0] == "| 64, causal | 1.00 (3.00×) | 4.00 (0.75×) | – | 3.00 |"
    write_preset(tmp_path / H200 / "masks-64.csv", "gpu-masks", times, skipped="flex")
    assert lines_of(results.speeds("forward"))[1] == "| 64, causal | 1.00 | 4.00 | 9.00 | – |"


def test_first_calls(results: ModuleType, tmp_path: Path) -> None:
    lines = [
        {
            "case": name,
            "cache": cache,
            "first_call": n + (0.5 if cache == "warm" else 1),
            "peer_import": 6.25 if name.startswith("flex-") else 0,
            "failed": "",
        }
        for n, name in enumerate([*first_call.MASK_CASES, "dense-64"])
        for cache in ("cold", "warm")
    ]
    failed = {"case": "flex-relative-bias-128", "cache": "cold", "failed": "out of shared memory"}
    lines[6:8] = [dict.fromkeys(lines[0], "") | failed]
    write_lines(tmp_path / H200 / "first-call.csv", lines)
    header, *found = lines_of(results.first_calls())
    assert header.count("|") == 6
    assert found == [
        "| score function | 1.00 | 2.00 + 6.25 | 0.50 | 1.50 + 6.25 |",
        "| relative bias | 3.00 | fails | 2.50 | – |",
        "| spans | 5.00 | 6.00 + 6.25 | 4.50 | 5.50 + 6.25 |",
    ]


def test_block_masks(results: ModuleType, tmp_path: Path) -> None:
    makers = block_masks.makers(lambda b, h, i, j: i >= j, 64, "cpu")
    lines = [
        {"mask": mask, "maker": maker, "median_ms": 10.0 * n}
        for mask in block_masks.functions(64, "cpu")
        for n, maker in enumerate(makers, 1)
    ]
    write_lines(tmp_path / H100 / "block-masks.csv", lines[:-1])
    header, *found = lines_of(results.block_masks())
    assert header.count("|") == 5
    assert found[0] == "| causal | 10 | 20 | 30 |"
    assert found[-1] == "| window | 10 | 20 | – |"


def test_the_cascade(results: ModuleType, tmp_path: Path) -> None:
    write_preset(
        tmp_path / H200 / "cascade.csv",
        "gpu-cascade",
        {"flashtile": 0.2, "flashtile-unshared": 0.5},
    )
    header, *found = lines_of(results.cascade())
    assert header.count("|") == 6
    assert found[0] == "| plain cache, heads 32:8 | 200 | 500 | – | 2.50× |"
    assert len(found) == len(presets.preset_cases("gpu-cascade"))
