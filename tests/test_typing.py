"""What type checkers see. `make lint` runs them over tests/typing/user.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "typing" / "stub.py"


def test_the_stub_is_current():
    """flashtile/__init__.pyi has the functions' own signatures."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], check=False)
    assert done.returncode == 0, "run `python tests/typing/stub.py`"
