"""Processes that run Python: one, or a few together, as `torchrun` does.

They are forks of a server that has imported PyTorch, which takes seconds. A fork has the arguments,
the environment, the folder and the path of a new process, and an output and an exit status of its
own. What differs: PyTorch is in ``sys.modules``, variables that Python or PyTorch read when they
start have no effect, and the interpreter is not shut down. Tests of what is imported or of how a
process ends start a real one with `subprocess`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType

import pytest
import torch

TESTS = Path(__file__).parent
# A process that has forked cannot use CUDA if its parent did, and macOS does not support forks
# either. flashtile is not among the imports: the server has not the path of this process, and might
# find another one.
FORKS = sys.platform == "linux" and not torch.cuda.is_available()
SERVER = multiprocessing.get_context("forkserver" if FORKS else "spawn")
SERVER.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "pytest"]
)


class Python:
    """A process: ``python arguments``, which are a script, ``-m`` or ``-c``, and its arguments."""

    def __init__(self, *arguments: object, folder: Path | None = None) -> None:
        self.arguments = [*map(str, arguments)]
        self._written = tempfile.TemporaryDirectory()
        self._streams = [Path(self._written.name, name) for name in ("output", "errors")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = SERVER.Process(
            target=_main, args=(self.arguments, environment, folder or Path.cwd(), self._streams)
        )
        self._process.start()

    def wait(self, seconds: float) -> subprocess.CompletedProcess[str]:
        """What it said and its exit status, which is that of `kill` after so many seconds."""
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        output, errors = (path.read_text() if path.exists() else "" for path in self._streams)
        self._written.cleanup()
        status = self._process.exitcode
        assert status is not None
        return subprocess.CompletedProcess(self.arguments, status, output, errors)


def python(
    *arguments: object, folder: Path | None = None, seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run ``python arguments`` in `folder` to its end."""
    return Python(*arguments, folder=folder).wait(seconds)


def run(script: str, world: int, rendezvous: Path, *arguments: str) -> str:
    """Run ``tests/<script> rank world rendezvous ...`` once for each rank, and expect that all of
    them succeed; what rank 0 prints."""
    ranks = [Python(TESTS / script, rank, world, rendezvous, *arguments) for rank in range(world)]
    done = [rank.wait(300) for rank in ranks]
    said = "\n".join(rank.stderr for rank in done)
    statuses = [rank.returncode for rank in done]
    assert not any(statuses), f"ranks ended with {statuses}:\n{said[-4000:]}"
    return done[0].stdout


def _main(
    arguments: list[str], environment: dict[str, str], folder: Path, streams: list[Path]
) -> None:
    """Be the process, and end without shutting the interpreter down.

    PyTorch's threads for gloo release the tensors of a collective some time after it has finished.
    A thread that needs the interpreter for it while the interpreter shuts down is ended by Python
    inside a destructor, which aborts the process: "terminate called without an active exception".
    """
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    status: object = 0
    try:
        _run(arguments)
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def _run(arguments: list[str]) -> None:
    """As Python does with these arguments."""
    match arguments:
        case ["-c", code, *_]:
            sys.argv = ["-c", *arguments[2:]]
            sys.path.insert(0, "")
            sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
        case ["-m", module, *_]:
            sys.argv = arguments[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *_]:
            sys.argv = arguments
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")


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
