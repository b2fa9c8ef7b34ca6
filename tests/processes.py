"""Processes that run a script: a few together, as `torchrun` does, or one with a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def run(script: str, world: int, rendezvous: Path, *arguments: str) -> None:
    """Run ``tests/<script> rank world rendezvous ...`` once for each rank, and expect that all of
    them succeed."""
    paths = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "one_rank.py"), str(TESTS / script), *given],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for given in ([str(rank), str(world), str(rendezvous), *arguments] for rank in range(world))
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


def output_of(script: Path, *arguments: object, seconds: float) -> str:
    """What one run of a script prints; it can be killed when a GPU kernel never ends.

    A run that fails or takes longer than `seconds` fails the test with the end of its output, so
    scripts print what they are about to do.
    """
    command = [sys.executable, str(script), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired as stuck:
        said = (stuck.stdout or b"").decode()
        pytest.fail(f"not done after {seconds:.0f} s; it was at: {said.strip()[-300:]}")
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    return done.stdout
