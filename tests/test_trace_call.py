"""A call reaches its kernel through at most eight files, each entered once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[1]


def path_of(backend: str) -> list[str]:
    """The files that `docs/trace_call.py` prints, each with what it says about it."""
    found_first = os.pathsep.join((str(REPOSITORY), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "docs" / "trace_call.py"), backend],
        env=os.environ | {"PYTHONPATH": found_first},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"^\d+\. (.*)$", done.stdout, flags=re.MULTILINE)


def test_on_the_cpu():
    assert path_of("cpu") == [
        "flash_attn_interface/dense.py",
        "api.py",
        "call/prepare.py",
        "autograd.py",
        "backends/cpu/launch.py",
        "backends/cpu/native.py",
    ]


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton and TRITON_INTERPRET=1"
)
def test_on_triton():
    pytest.importorskip("triton", reason="the package triton is not installed")
    assert path_of("triton") == [
        "flash_attn_interface/dense.py",
        "api.py",
        "call/prepare.py",
        "autograd.py",
        "backends/triton/__init__.py",
        "backends/triton/launch.py",
        "gpu/relaunch.py",
        "gpu/launch.py",
    ]
