"""The trees and their processes: start, ask, replace one that hangs or dies, compile ahead."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe, wait
from pathlib import Path

from ..peers import FAILED
from .jobs import Job
from .worker import START, Answer, Request, receive, send

ROOT = Path(__file__).parents[2]  # of this checkout, whose `benchmarks` every process runs
START_SECONDS = 180  # PyTorch is imported by many processes at once


@dataclass(frozen=True)
class Tree:
    """A version of flashtile: a folder that contains the package, and its environment variables."""

    name: str
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Tree:
        """``NAME=DIR`` or ``NAME=DIR?VARIABLE=VALUE&VARIABLE=VALUE``.

        Raises:
            ValueError: `text` is something else, or the folder has no flashtile.

        >>> Tree.parse("late=.?DELAY=400&V_LAST=1").environment
        {'DELAY': '400', 'V_LAST': '1'}
        """
        name, equals, rest = text.partition("=")
        folder, question, variables = rest.partition("?")
        pairs = [pair.partition("=") for pair in variables.split("&")] if question else []
        if not (name and equals and folder) or any(not key or not eq for key, eq, _ in pairs):
            raise ValueError(f"got {text!r}, want NAME=DIR or NAME=DIR?VARIABLE=VALUE&...")
        if not (Path(folder) / "flashtile").is_dir():
            raise ValueError(f"tree {name}: {folder} has no folder flashtile")
        return cls(name, Path(folder).resolve(), {key: value for key, _, value in pairs})

    @property
    def variables(self) -> str:
        """The environment variables as in the command.

        >>> Tree("late", Path(), {"DELAY": "400", "V_LAST": "1"}).variables
        'DELAY=400&V_LAST=1'
        """
        return "&".join(f"{key}={value}" for key, value in self.environment.items())


class Gone(Exception):
    """The process of a tree died or does not answer; the message says which."""


class Worker:
    """A process that measures with the flashtile of one tree."""

    def __init__(self, tree: Tree, device: str) -> None:
        self.tree = tree
        self.origin: dict[str, str | None] = {}
        self.connection, theirs = Pipe()
        descriptor = theirs.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, str(ROOT), str(descriptor), device],
            cwd=tree.folder,
            env={**os.environ, **tree.environment},
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
        )
        theirs.close()

    def greet(self, seconds: float) -> None:
        """Wait until the process has started, and keep where its code comes from.

        Raises:
            Gone: it does not start.
        """
        if not self.origin:
            origin = self._receive(seconds)
            assert isinstance(origin, dict)
            self.origin = origin

    def ask(self, request: Request, seconds: float) -> Answer:
        """The answer to `request`, for which the process has `seconds`.

        Raises:
            Gone: it died, or took longer. Then it is stopped.
        """
        self.post(request)
        return self.collect(seconds)

    def post(self, request: Request) -> None:
        """Send the request without waiting for the answer.

        Raises:
            Gone: the process died.
        """
        try:
            send(self.connection, request)
        except OSError:
            raise self._gone() from None

    def collect(self, seconds: float) -> Answer:
        """Wait for the answer to the request that was posted.

        Raises:
            Gone: as for `ask`.
        """
        found = self._receive(seconds)
        assert isinstance(found, Answer)
        return found

    def _receive(self, seconds: float) -> object:
        try:
            if not self.connection.poll(max(seconds, 0)):
                self.stop()
                raise Gone(f"no answer in {seconds:.0f} s")
            return receive(self.connection)
        except (EOFError, OSError):
            raise self._gone() from None

    def _gone(self) -> Gone:
        self.connection.close()
        status = self.process.wait()
        return Gone(f"the process ended with status {status}")

    def stop(self) -> None:
        """End the process, whatever it does."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


class Pool:
    """One process of each tree. A dead one is replaced, unless it did not even start."""

    def __init__(self, trees: Sequence[Tree], device: str, patience: float) -> None:
        self.device = device
        self.patience = patience
        self.workers = {tree.name: Worker(tree, device) for tree in trees}
        self.origins: dict[str, dict[str, str | None]] = {tree.name: {} for tree in trees}
        self.broken: dict[str, str] = {}

    def ask(self, name: str, request: Request, seconds: float) -> Answer:
        """The answer of the tree called `name`; what goes wrong there is the answer's reason."""
        if name in self.broken:
            return Answer(skipped=self.broken[name])
        worker = self.workers[name]
        try:
            worker.greet(min(seconds, START_SECONDS))
        except Gone as gone:
            self.broken[name] = f"{FAILED} to start: {gone}"
            return Answer(skipped=self.broken[name])
        self.origins[name] = worker.origin
        try:
            return worker.ask(request, min(seconds, self.patience))
        except Gone as gone:
            self.workers[name] = Worker(worker.tree, self.device)
            return Answer(skipped=f"{FAILED}: {gone}")

    def stop(self) -> None:
        """End all processes."""
        for worker in self.workers.values():
            worker.stop()


def compile_ahead(
    trees: Sequence[Tree],
    jobs: Sequence[Job],
    device: str,
    *,
    processes: int,
    deadline: float,
) -> int:
    """Run every job once on every tree, in `processes` processes at a time for all trees together,
    so that the kernels are in the cache on disk; returns how many of these runs ended.

    A failure here is not reported, because it occurs again in the measurement. Jobs that remain at
    `deadline` (of `time.monotonic`) are not run.
    """
    waiting = {tree.name: deque(_kernels_first(jobs)) for tree in trees}
    count = max(processes, len(trees))
    started = [Worker(trees[number % len(trees)], device) for number in range(count)]
    busy = {worker.connection: worker for worker in started}
    done = 0
    try:
        while busy and (left := deadline - time.monotonic()) > 0:
            ready = wait(busy, min(left, START_SECONDS))
            if not ready:  # all of them hang
                break
            for worker in [
                busy.pop(connection) for connection in list(busy) if connection in ready
            ]:
                done += _run_next(worker, waiting[worker.tree.name])
                if not worker.connection.closed:
                    busy[worker.connection] = worker
    finally:
        for worker in started:
            worker.stop()
    return done


def _run_next(worker: Worker, waiting: deque[Job]) -> bool:
    """Hear the worker's greeting or answer and post its next job; whether it was an answer.

    A worker that died or has nothing left to do ends with a closed connection.
    """
    answered = bool(worker.origin)
    try:
        if answered:
            worker.collect(0)
        else:
            worker.greet(0)
        if waiting:
            worker.post(Request(waiting.popleft()))
        else:
            worker.stop()
    except Gone:
        return False
    return answered


def _kernels_first(jobs: Iterable[Job]) -> list[Job]:
    """One job of each set of kernels before the second of any, so that no two processes compile the
    same if they can help it."""
    seen: Counter[tuple[object, ...]] = Counter()
    ranked = []
    for job in jobs:
        ranked.append((seen[job.kernels], job))
        seen[job.kernels] += 1
    return [job for _, job in sorted(ranked, key=lambda pair: pair[0])]
