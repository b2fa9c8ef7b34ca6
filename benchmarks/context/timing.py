"""How long the ranks take for a call."""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from .together import Team

ROUNDS = 5
IN_A_ROW = 32  # calls without a wait between them, as those of a model's layers
MOST_MS = 150.0  # of them together: slow calls are fewer


class Timed:
    """A call that all ranks make together.

    Args:
        around: a context for each sample.

    Attributes:
        single, steady: milliseconds of every rank, by round: of a call alone, from when all ranks
            are ready until it is done, and of each of several calls in a row.
        host: the same of what the host does for each of the calls in a row; on a GPU it does not
            wait for them.
    """

    def __init__(
        self,
        team: Team,
        call: Callable[[], object],
        around: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.team, self.call, self.around = team, call, around
        self.single: list[list[float]] = []
        self.steady: list[list[float]] = []
        self.host: list[list[float]] = []
        self._host = 0.0  # of the last sample on this rank
        self.calls = IN_A_ROW

    def warm_up(self) -> None:
        """Call it a few times."""
        self._sample(2)
        slowest = max(self.team.tell(self._sample(1)))
        self.calls = max(1, min(IN_A_ROW, int(MOST_MS / max(slowest, 1e-3))))
        self._sample(self.calls)

    def measure(self) -> None:
        """Add a sample of both kinds."""
        mine = self._sample(1), self._sample(self.calls), self._host
        of_ranks = zip(*self.team.tell(mine), strict=True)
        for kept, samples in zip((self.single, self.steady, self.host), of_ranks, strict=True):
            kept.append(list(samples))

    def once(self) -> float:
        """Milliseconds of one call on this rank."""
        return self._sample(1)

    def _sample(self, calls: int) -> float:
        """Milliseconds of a call on this rank."""
        with self.around():
            self.team.finish()
            if self.team.device == "cpu":
                self.team.meet()
                self._host = self._calls(calls)
                return self._host
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.team.meet()
            start.record()
            self._host = self._calls(calls)
            stop.record()
            self.team.finish()
            return start.elapsed_time(stop) / calls

    def _calls(self, calls: int) -> float:
        """Milliseconds of the host for each call."""
        begin = time.perf_counter()
        for _ in range(calls):
            self.call()
        return (time.perf_counter() - begin) * 1e3 / calls


def profile(team: Team, call: Callable[[], object], calls: int, sort: str = "tottime") -> None:
    """Print what the host of rank 0 does in some calls, by a column of cProfile."""
    for _ in range(5):
        call()
    team.finish()
    functions = cProfile.Profile()
    # The backward runs in a thread of PyTorch on a GPU, which the profile does not see.
    with torch.autograd.set_multithreading_enabled(False), functions:
        for _ in range(calls):
            call()
    team.finish()
    if dist.get_rank() == 0:
        print(f"{calls} calls")
        pstats.Stats(functions).sort_stats(sort).print_stats(45)


def median_of(samples: list[list[float]], of_ranks: Callable[[list[float]], float]) -> float:
    """The median over the rounds of the slowest rank (max) or the fastest one (min)."""
    return statistics.median(map(of_ranks, samples))


def in_turn(team: Team, calls: Mapping[str, Timed]) -> dict[str, str]:
    """Measure all calls in turn. One that fails is left out from then on; returns why.

    Raises:
        Stuck: some rank waits for ever.
    """
    reasons: dict[str, str] = {}
    for number in range(ROUNDS + 1):
        for name, timed in calls.items():
            if name in reasons:
                continue
            problem = team.problem(timed.measure if number else timed.warm_up)
            if problem:
                reasons[name] = problem
    return reasons
