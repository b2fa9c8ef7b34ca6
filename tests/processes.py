"""Processes that run a script: a few together, as `torchrun` does, or one with a time limit."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
# Ranks are forks of a server that has imported what takes seconds. A process that has forked cannot
# use CUDA if its parent did, and macOS does not support forks either. flashtile is not among the
# imports: the server has not the path of this process, and might find another one.
FORKS = sys.platform == "linux" and not torch.cuda.is_available()
RANKS = multiprocessing.get_context("forkserver" if FORKS else "spawn")
RANKS.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "pytest"]
)


def run(script: str, world: int, rendezvous: Path, *arguments: str) -> None:
    """Run ``tests/<script> rank world rendezvous ...`` once for each rank, and expect that all of
    them succeed."""
    errors = [rendezvous.with_name(f"errors of rank {rank}") for rank in range(world)]
    ranks = [
        RANKS.Process(
            target=_rank,
            args=(TESTS / script, [str(rank), str(world), str(rendezvous), *arguments], path),
        )
        for rank, path in enumerate(errors)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=300)
        if process.is_alive():
            process.kill()
            process.join()
    statuses = [process.exitcode for process in ranks]
    said = "\n".join(path.read_text() for path in errors if path.exists())
    assert not any(statuses), f"ranks ended with {statuses}:\n{said[-4000:]}"


def _rank(script: Path, arguments: list[str], errors: Path) -> None:
    """Run a script as one of several processes, and end without shutting the interpreter down.

    PyTorch's threads for gloo release the tensors of a collective some time after it has finished.
    A thread that needs the interpreter for it while the interpreter shuts down is ended by Python
    inside a destructor, which aborts the process: "terminate called without an active exception".
    """
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    status = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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
