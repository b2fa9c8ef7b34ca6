"""DESIGN.md points at code and commands that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
REFERENCES = re.findall(r"`([\w/.]+\.py)` \(`(\w+)`\)", PAGE)
PATHS = re.findall(r"(?:flashtile|tests|docs)/[\w/]+\.(?:py|patch)", PAGE)


@pytest.mark.parametrize(("path", "symbol"), REFERENCES)
def test_a_file_defines_the_symbol_beside_it(path, symbol):
    text = (ROOT / path).read_text(encoding="utf-8")
    definition = rf"^\s*(def|class) {symbol}\b|^{symbol}( =|:)"
    assert len(re.findall(definition, text, re.M)) == 1


def test_every_path_exists():
    assert len(REFERENCES) >= 10
    assert [path for path in PATHS if not (ROOT / path).is_file()] == []
