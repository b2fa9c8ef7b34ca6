"""Start a few processes that run one script together, as `torchrun` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run(script: str, world: int, rendezvous: Path) -> None:
    """Run ``tests/<script> rank world rendezvous`` once for each rank, and expect that all of them
    succeed."""
    paths = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, str(TESTS / script), str(rank), str(world), str(rendezvous)],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    errors = []
    for process in processes:
        try:
            _, error = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            _, error = process.communicate()
        errors.append(error)
    assert not any(process.returncode for process in processes), "\n".join(errors)[-4000:]
