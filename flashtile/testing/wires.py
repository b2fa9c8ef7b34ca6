"""Ranks as threads of one process, for tests of context parallelism without processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Queue
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Silence(RuntimeError):
    """A rank waited in vain."""


class ThreadCommunicator:
    """One rank of several threads; see `flashtile.distributed.collectives.Communicator`.

    It counts what it sends: `messages` with `sent_bytes`, and `notes` to all ranks.
    """

    def __init__(
        self,
        rank: int,
        mailboxes: list[list[Queue[Tensor]]],
        timeout: float,
        failed: threading.Event,
    ) -> None:
        self.rank, self.ranks = rank, len(mailboxes)
        self.global_ranks = list(range(self.ranks))
        self._mailboxes, self._timeout, self._failed = mailboxes, timeout, failed
        self.messages = self.sent_bytes = self.notes = 0

    def exchange(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], what: str
    ) -> _Arrival:
        """Send copies at once, receive when waited for."""
        for peer, x in sends.items():
            if x.numel():
                self.messages += 1
                self.sent_bytes += x.numel() * x.element_size()
                self._mailboxes[peer][self.rank].put(x.clone())
        return _Arrival(self, {peer: x for peer, x in receives.items() if x.numel()}, what)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The `x` of every rank."""
        self.notes += 1
        for peer in range(self.ranks):
            self._mailboxes[peer][self.rank].put(x.clone())
        return [self.take(peer, "all ranks") for peer in range(self.ranks)]

    def take(self, peer: int, what: str) -> Tensor:
        """The next tensor from `peer`."""
        deadline = time.monotonic() + self._timeout
        while not self._failed.is_set() and time.monotonic() < deadline:
            try:
                return self._mailboxes[self.rank][peer].get(timeout=0.1)
            except Empty:
                continue
        raise Silence(f"rank {self.rank} got nothing from rank {peer}: {what}")


class _Arrival:
    def __init__(self, comm: ThreadCommunicator, receives: Mapping[int, Tensor], what: str) -> None:
        self.comm, self.receives, self.what = comm, receives, what

    def wait(self) -> None:
        for peer, x in self.receives.items():
            arrived = self.comm.take(peer, self.what)
            if arrived.shape != x.shape or arrived.dtype != x.dtype:
                raise RuntimeError(f"{self.what}: rank {peer} sent {arrived.shape}, want {x.shape}")
            x.copy_(arrived)


def run_ranks(
    ranks: int, function: Callable[[ThreadCommunicator], Result], timeout: float = 60.0
) -> list[Result]:
    """The results of `function(comm)` on every rank, each in a thread of its own.

    Raises:
        Exception: the error of a rank; the others stop waiting for it.
    """
    mailboxes: list[list[Queue[Tensor]]] = [[Queue() for _ in range(ranks)] for _ in range(ranks)]
    failed = threading.Event()
    communicators = [ThreadCommunicator(rank, mailboxes, timeout, failed) for rank in range(ranks)]

    def run(comm: ThreadCommunicator) -> Result:
        # Otherwise autograd runs the backwards of all threads one after another, in the one thread
        # of the GPU, and a rank that waits for another one's gradients waits for ever.
        with torch.autograd.set_multithreading_enabled(False):
            try:
                return function(comm)
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(ranks, thread_name_prefix="rank") as pool:
        futures = [pool.submit(run, comm) for comm in communicators]
    errors = [future.exception() for future in futures]
    for error in sorted(filter(None, errors), key=lambda error: isinstance(error, Silence)):
        raise error
    return [future.result() for future in futures]
