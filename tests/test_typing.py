"""What type checkers see. `make lint` runs them over tests/typing/user.py."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "typing" / "stub.py"


def test_the_stub_is_current():
    """flashtile/__init__.pyi has the functions' own signatures."""
    assert not processes.python(SCRIPT, "--check").returncode, "run `python tests/typing/stub.py`"
