"""What users can import is what `public_api.txt` says."""

from __future__ import annotations

from pathlib import Path

import processes
import public_api
import pytest

pytestmark = pytest.mark.slow


def test_the_public_api_is_the_recorded_one():
    done = processes.python(Path(public_api.__file__), "--check")
    assert done.returncode == 0, (
        f"{done.stdout}{done.stderr}if this is meant, run `python tests/public_api.py`, and say so "
        "in CHANGELOG.md"
    )
