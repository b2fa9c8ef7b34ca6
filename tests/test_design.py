"""DESIGN.md points at code that is there, its counts hold, and words are standard ones."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
# Private words that standard ones have replaced: TMA, KV loop, head swizzle, cache, intrinsics,
# traced, positions.
RETIRED = re.compile(
    r"copy engine|\bwalks?\b|(?:\b|_)sections?\b(?!\s+\d)|\brecall|\bverbs?\b|_watched\b"
    r"|\bplaces\b",
    re.IGNORECASE,
)
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


@pytest.mark.skipif(not shutil.which("bash"), reason="the commands are written for bash")
def test_the_counts_hold(design):
    counts = design.counts(PAGE)
    assert len(counts) == PAGE.count("` |\n", PAGE.index("| count |"), PAGE.index("## Decisions"))
    assert [(what, count) for what, most, count in counts if count > most] == []


def test_code_and_manual_use_standard_words():
    files = [*(ROOT / "flashtile").rglob("*.py"), *ROOT.glob("*.md")]
    files += [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "learn").glob("*.md")]
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in files
        for match in RETIRED.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    ("text", "is_retired"),
    [
        ("the producer walks a list", True),
        ("divide(number, by_section, section)", True),
        ("Source: Shah et al. 2024, section\n3.3", False),
        ("positions = places[b]", True),
        ("written in place; is_in_place(x)", False),
    ],
)
def test_the_check_of_words(text, is_retired):
    assert bool(RETIRED.search(text)) == is_retired
