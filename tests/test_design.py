"""DESIGN.md points at code that is there, and its counts hold."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
SCREEN = 25  # lines by which a line number may be off until `make format` corrects it


@pytest.fixture
def design(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("design")


def test_every_reference_is_current(design):
    references = design.REFERENCE.findall(PAGE)
    assert len(references) >= 10
    for path, line, text in references:
        assert abs(design.line_of(path, text) - int(line)) <= SCREEN, f"{path}: {text}"


def test_a_reference_is_a_definition_or_the_only_line_with_a_text(design):
    here = "tests/test_design.py"
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert lines[design.line_of(here, "SCREEN") - 1].startswith("SCREEN = ")
    assert "def design" in lines[design.line_of(here, "design") - 1]
    for text in ("import ", "no such" + " text"):
        with pytest.raises(ValueError, match="want one"):
            design.line_of(here, text)


def test_a_check_writes_nothing(design, tmp_path, monkeypatch):
    page = tmp_path / "DESIGN.md"
    page.write_text("`tests/test_design.py:1` (`SCREEN`)", encoding="utf-8")
    before = page.read_bytes()
    monkeypatch.setattr(design, "PAGE", page)
    assert design.main(["--check"]) == "DESIGN.md: run `python docs/design.py`"
    assert page.read_bytes() == before
    design.main([])
    assert page.read_bytes() != before
    assert design.main(["--check"]) is None


@pytest.mark.skipif(not shutil.which("bash"), reason="the commands are written for bash")
def test_the_counts_hold(design):
    counts = design.counts(PAGE)
    assert len(counts) == PAGE.count("` |\n", PAGE.index("| count |"), PAGE.index("## Decisions"))
    assert [(what, count) for what, most, count in counts if count > most] == []
