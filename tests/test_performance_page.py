"""The presets of the performance page: how to measure them, then their tables and pictures."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import presets
from benchmarks.rows import Row, append_csv, start_csv

DOCS = Path(__file__).resolve().parents[1] / "docs"
ORIGIN = {"device": "NVIDIA GPU", "date": "2026-01-01", "commit": "0123456789"}
MEASURED = "Measured on an NVIDIA GPU on 2026-01-01 at commit 0123456."
GENERATED = re.compile(r"<!-- [\w -]+: begin -->(.*?)<!-- [\w -]+: end -->", re.S)
DATED = re.compile(r"^Measured on an .+ on \d{4}-\d\d-\d\d at commit [0-9a-f]{7}.*\.$", re.M)
LENGTHS = {"fa-readme": (512, 2048, 16384), "lecture": (512, 2048, 8192)}
COLUMN = {"fa-readme": "head_dim", "lecture": "dtype"}


def test_the_first_page_is_short_and_says_when() -> None:
    """As `wc -w` counts. A table without a date could be of any version."""
    assert len((DOCS / "performance.md").read_text().split()) <= 2000
    pages = [DOCS.parent / "README.md", DOCS / "which-attention.md", *DOCS.glob("performance*.md")]
    blocks = [block for page in pages for block in GENERATED.findall(page.read_text())]
    assert len(blocks) > 15
    for block in blocks:
        assert block.count("| --- |") == len(DATED.findall(block)) > 0, block


NUMBER = re.compile(
    r"\b\d[\d.]* to \d+\.\d|\b0\.\d"
    r"|\b\d[\d.,]* (?:times|×|%|ns|µs|ms|s\b|TFLOP/s|MiB|GiB|tokens/s|tokens a second)"
)


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_no_number_stands_without_a_date(page: str) -> None:
    """In a paragraph of words, or an entry of a list. The test above looks at the tables."""
    text = GENERATED.sub("", (DOCS.parent / page).read_text())
    paragraphs = re.split(r"\n\n|\n(?=- )", re.sub(r"```.*?```", "", text, flags=re.S))
    measured = [paragraph for paragraph in paragraphs if NUMBER.search(paragraph)]
    assert len(measured) >= 4
    for paragraph in measured:
        assert re.search(r"\b\d{4}-\d\d-\d\d\b", paragraph), paragraph


@pytest.fixture
def performance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    module = importlib.import_module("performance")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def measure(name: str, results: Path) -> None:
    """Two files of rows: a peer takes 1 ms more than the one before, the last has no float32."""
    settings, cases = presets.PRESETS[name].settings, presets.preset_cases(name)
    folder = results / "h200" / name
    folder.mkdir(parents=True)
    for part in (0, 1):
        start_csv(folder / f"part-{part}.csv", ORIGIN)
        for case in cases[part::2]:
            rows = [
                Row.of(case, peer, direction).timed(case, [1.0 + n])
                for direction in settings.directions
                for n, peer in enumerate(settings.peers)
            ]
            if case.dtype == "float32":
                rows[-1] = replace(rows[-1], median_ms=None, tflops=None, skipped="has none")
            append_csv(folder / f"part-{part}.csv", rows, ORIGIN)


def block(performance: ModuleType, name: str) -> str:
    return performance.preset_block(name, COLUMN[name], LENGTHS[name], "a picture")


@pytest.mark.parametrize("name", COLUMN)
def test_a_preset_that_was_not_measured_says_how(performance: ModuleType, name: str) -> None:
    assert block(performance, name) == (
        f"Not measured yet: `python -m benchmarks --preset {name}`."
    )
    assert name not in importlib.import_module("plots").measured()


@pytest.mark.parametrize("name", COLUMN)
def test_a_measured_preset_has_a_table_for_each_pass(
    performance: ModuleType, name: str, tmp_path: Path
) -> None:
    measure(name, tmp_path)
    text, settings = block(performance, name), presets.PRESETS[name].settings
    assert re.findall(r"_static/(\S+)", text) == [f"{name}-light.svg", f"{name}-dark.svg"]
    tables = re.findall(r"^(.*), TFLOP/s:\n\n\| .*?, mask, length \| (.*) \|$", text, re.M)
    assert len(tables) == text.count(MEASURED) == len(settings.directions)
    for _, peers in tables:
        names = [performance.HEADS[peer] for peer in settings.peers]
        assert set(peers.split(" | ")) == set(names)
    kinds = {getattr(case, COLUMN[name]) for case in presets.preset_cases(name)}
    assert text.count("**") == 2 * len(settings.directions) * len(kinds) * 2 * 3  # the best, bold
    assert ("–" in text) == (name == "lecture")


@pytest.mark.parametrize("name", COLUMN)
def test_a_measured_preset_is_drawn(performance: ModuleType, name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measure(name, tmp_path)
    plots = importlib.import_module("plots")
    assert name in plots.measured()
    figure = plots.against_length(name)
    kinds = {getattr(case, COLUMN[name]) for case in presets.preset_cases(name)}
    assert len(figure.axes) == len(plots.PRESETS[name][1]) * len(kinds) * 2
    (legend,) = figure.legends
    peers = presets.PRESETS[name].settings.peers
    assert {text.get_text() for text in legend.get_texts()} == {
        performance.NAMES[peer] for peer in peers
    }
    for axes in figure.axes:
        assert axes.get_ylim()[0] == 0 and len(axes.lines) >= len(peers) - 1


def test_a_run_that_was_cut_off_is_drawn(performance: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    start_csv(tmp_path / "h200" / "fa-readme" / "all.csv", ORIGIN)
    case = presets.preset_cases("fa-readme")[0]
    row = Row.of(case, "flashtile", "both").timed(case, [1.0])
    append_csv(tmp_path / "h200" / "fa-readme" / "all.csv", [row], ORIGIN)
    full, causal = importlib.import_module("plots").against_length("fa-readme").axes
    assert len(full.lines) == 1 and not causal.lines
    assert block(performance, "fa-readme").count("**") == 2
