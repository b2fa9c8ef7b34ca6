"""The list of planted errors fits the package."""

from __future__ import annotations

import pytest
from planted_errors import PLANTED
from planting import ROOT, Planted, planted_source


@pytest.mark.parametrize("error", PLANTED, ids=lambda error: error.name)
def test_every_error_has_one_place_and_existing_tests(error: Planted):
    path, text = planted_source(error)
    compile(text, str(path), "exec")
    assert text != path.read_text(encoding="utf-8")
    files = [word.split("::")[0] for word in error.tests.split() if word.startswith("tests/")]
    assert files
    assert all((ROOT / name).exists() for name in files)


def test_names_are_unique():
    names = [error.name for error in PLANTED]
    assert len(names) == len(set(names))
