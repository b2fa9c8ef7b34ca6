"""The manual: short guides, in its navigation, and current tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashtile.cli import COMMANDS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
GENERATED = re.compile(r"<!-- (?P<name>[\w ]+): begin -->.*?<!-- (?P=name): end -->", re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_guide_is_longer_than_1200_words(page):
    """As `wc -w` counts. Tables that a script writes do not count."""
    assert len(GENERATED.sub("", page.read_text()).split()) <= 1200


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^([\w/-]+)$", (DOCS / "index.md").read_text(), re.M)
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.glob("**/*.md")}
    generated = {page for page in pages if page.startswith("examples/")}
    assert pages - generated - {"index"} == set(listed)


def test_every_command_is_explained():
    page = (DOCS / "command-line.md").read_text()
    assert [name for name in COMMANDS if f"| `flashtile {name}`" not in page] == []
