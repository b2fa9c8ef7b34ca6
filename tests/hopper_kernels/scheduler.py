"""Threads of which one runs at a time, and in which order they meet is drawn from a seed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

PROGRAMS_AT_ONCE = 3
PACES = (1.0, 1.0, 0.03)  # a slow thread lets the others come far past it

context = threading.local()


def released() -> None:
    """A semaphore may only be released after this thread's additions have landed."""
    assert not context.bulk + context.arriving, "released before the additions have landed"


class Deadlock(AssertionError):
    """Every thread waits."""


class Scheduler:
    """One thread runs at a time; `meet` is where another one may go on."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.turns: dict[Any, threading.Lock] = {}  # released when a thread may go on
        self.waiting: dict[Any, Callable[[], bool]] = {}
        self.pace: dict[Any, float] = {}
        self.copies: list[Callable[[], None]] = []
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.finished: set[Any] = set()
        self.started: set[Any] = set()
        self.programs: set[Any] = set()

    def start(self, programs: dict[Any, Callable[[], bool]]) -> None:
        """Run all threads to their end, and all copies; PROGRAMS_AT_ONCE of `programs` at a time,
        each only after its condition is true.
        """
        self.programs = set(programs)
        for thread, may_start in programs.items():
            self.waiting[thread] = partial(self._has_room, may_start)
        self._pick()
        self.ended.wait()
        if self.error is not None:
            raise self.error

    def _has_room(self, may_start: Callable[[], bool]) -> bool:
        return len(self.started - self.finished) < PROGRAMS_AT_ONCE and may_start()

    def spawn(self, function: Callable[[], None], program: tuple[int, ...]) -> threading.Thread:
        """A thread that starts when the scheduler picks it."""

        def run() -> None:
            context.program = program
            context.products, context.bulk, context.arriving = [], [], []
            context.unfenced = set()
            try:
                self._until_picked(thread)
                if thread in self.programs:
                    self.started.add(thread)
                function()
            except BaseException as error:
                self.error = self.error or error
            finally:
                self.finished.add(thread)
                self._pick()

        thread = threading.Thread(target=run, daemon=True)
        self.pace[thread] = self.random.choice(PACES)
        self.turns[thread] = threading.Lock()
        self.turns[thread].acquire()
        self.waiting[thread] = lambda: True
        thread.start()
        return thread

    def slow_down(self) -> None:
        """Pick this thread as rarely as any."""
        self.pace[threading.current_thread()] = min(PACES)

    def meet(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others go on until `ready`, and until this thread is picked again."""
        thread = threading.current_thread()
        self.waiting[thread] = ready
        self._pick()
        self._until_picked(thread)

    def _until_picked(self, thread: threading.Thread) -> None:
        self.turns[thread].acquire()
        if self.error is not None:
            raise self.error

    def _pick(self) -> None:
        """Let one thread go on, or all of them after an error."""
        while self.error is None:
            ready = [t for t, condition in self.waiting.items() if condition()]
            paces = [*(self.pace[t] for t in ready), *(1.0 for _ in self.copies)]
            if not paces:
                if self.waiting:
                    self.error = Deadlock(f"{len(self.waiting)} threads wait for ever")
                break
            choice = self.random.choices(range(len(paces)), paces)[0]
            if choice < len(ready):
                del self.waiting[ready[choice]]
                return self.turns[ready[choice]].release()
            self.copies.pop(choice - len(ready))()
        waiting, self.waiting = self.waiting, {}
        for thread in waiting:
            self.turns[thread].release()
        self.ended.set()
