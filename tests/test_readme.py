"""The README's tables, pictures and examples agree with the package."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import matplotlib
import processes
import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("script", ["support_table.py", "performance.py"])
def test_the_generated_tables_are_current(script):
    """They agree with the backends and the measurements."""
    done = processes.python(REPOSITORY / "docs" / script, "--check")
    assert done.returncode == 0, f"run `python docs/{script}`"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pictures_are_current(theme, monkeypatch):
    """They agree with the measurements."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    plots = importlib.import_module("plots")
    for name in plots.measured():
        committed = (REPOSITORY / "docs" / "_static" / f"{name}-{theme}.svg").read_text()
        if f"Matplotlib v{matplotlib.__version__}," not in committed:
            pytest.skip(f"drawn by another Matplotlib than {matplotlib.__version__}")
        assert plots.drawn(name, theme) == committed, "run `python docs/plots.py`"


def test_links_lead_to_files():
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (REPOSITORY / page).read_text()
        for target in re.findall(r"\]\(([^)#:]+)[)#]|(?:src|srcset)=\"([^\"]+)\"", text):
            path = "".join(target)
            assert (REPOSITORY / path).exists(), f"{page} links to {path}"


def test_the_python_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
