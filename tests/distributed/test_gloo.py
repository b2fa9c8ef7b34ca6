"""Context parallelism over processes that gloo connects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import processes
import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes(world: int, tmp_path: Path) -> None:
    processes.run("distributed/context_worker.py", world, tmp_path / "rendezvous")


def test_a_few_random_draws() -> None:
    """The first one is of decoding, too."""
    script = Path(__file__).parent / "random_draws.py"
    command = [sys.executable, str(script), "--ranks", "2", "--draws", "4", "--first", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "4 draws on 2 ranks, 0 failed" in done.stdout
