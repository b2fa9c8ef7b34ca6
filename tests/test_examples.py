"""The numbered examples run. Each checks its claims against plain PyTorch."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("[0-9][0-9]_*.py"))


def test_there_are_thirteen():
    assert [path.name[:2] for path in EXAMPLES] == [f"{i:02}" for i in range(1, 14)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path, capsys):
    needs = {"transformers": "from transformers", "accelerate": "Trainer(", "trl": "from trl"}
    for package, words in needs.items():
        if words in path.read_text() and not importlib.util.find_spec(package):
            pytest.skip(f"the package {package} is not installed")
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.count("\n") >= 3, "an example prints what it shows"


@pytest.mark.gpu
def test_the_engine_captures_its_step(capsys):
    (path,) = (path for path in EXAMPLES if path.stem == "10_engine")
    runpy.run_path(str(path), run_name="__main__")
    assert "the captured step, replayed, gives the same bits" in capsys.readouterr().out
