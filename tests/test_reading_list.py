"""How many files of its backend a reader of a kernel needs: ceilings that may only fall."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = ROOT / "flashtile" / "backends"
CEILINGS = {
    "triton/forward_pass.py": 6,
    "triton/backward_pass.py": 5,
    "hopper/forward/kernel.py": 4,
    "hopper/backward/kernel.py": 7,
}


@pytest.mark.parametrize("kernel", CEILINGS)
def test_no_kernel_needs_more_files_than_its_ceiling(kernel, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    start = BACKENDS / kernel
    files = importlib.import_module("reading_list").reading_list(start, start.parents[1])
    assert len(files) <= CEILINGS[kernel], "\n".join(map(str, files))
