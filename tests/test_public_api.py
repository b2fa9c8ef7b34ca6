"""What users can import is what `public_api.txt` says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import public_api
import pytest

pytestmark = pytest.mark.slow


def test_the_public_api_is_the_recorded_one():
    script = Path(public_api.__file__)
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, (
        f"{done.stdout}{done.stderr}if this is meant, run `python tests/public_api.py`, and say so "
        "in CHANGELOG.md"
    )
