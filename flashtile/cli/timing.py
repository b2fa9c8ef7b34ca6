"""Time calls alternately, by the clock of their device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

Call = Callable[[], object]
Timer = Callable[[Call], float]  # milliseconds of one run of the call

Name = TypeVar("Name", bound=Hashable)

BATCH_MS = 10.0  # a call faster than this runs several times in each round
MAX_REPEATS = 5
MAX_ROUNDS = 200


class Timing(NamedTuple):
    """Median and spread of the samples, in milliseconds."""

    median_ms: float
    p20_ms: float
    p80_ms: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Quantiles of `samples`, linearly interpolated."""
        values = torch.tensor(samples, dtype=torch.float64)
        quantiles = values.quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64))
        return cls(*quantiles.tolist())


def interleave(
    calls: Mapping[Name, Call],
    timer: Timer,
    *,
    budget_ms: float,
    min_rounds: int = 5,
) -> dict[Name, list[float]]:
    """Time all calls once a round, in a new random order each round; return every sample.

    The machine's speed drifts during a measurement (clocks, heat, other programs). Within one run
    and in random order, the drift affects all calls equally, so ratios are reliable even if times
    are not.

    Args:
        budget_ms: time to measure all calls together; at least `min_rounds` rounds.
    """
    shuffle = random.Random(0).shuffle
    first = {name: timer(call) for name, call in calls.items()}  # warms up; not a sample
    repeats = {
        name: max(1, min(MAX_REPEATS, int(BATCH_MS / max(ms, 1e-3)))) for name, ms in first.items()
    }
    samples: dict[Name, list[float]] = {name: [] for name in calls}
    spent = 0.0
    for done in range(max(MAX_ROUNDS, min_rounds)):
        if done >= min_rounds and spent >= budget_ms:
            break
        order = list(calls)
        shuffle(order)
        for name in order:
            batch = [timer(calls[name]) for _ in range(repeats[name])]
            samples[name] += batch
            spent += sum(batch)
    return samples


def timer_for(device: str) -> Timer:
    """The clock of `device`: the processor's, or CUDA events."""
    return CudaTimer(device) if torch.device(device).type == "cuda" else cpu_timer


def cpu_timer(call: Call) -> float:
    """Wall-clock milliseconds of one run."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


class CudaTimer:
    """Milliseconds between two CUDA events around the call, after flushing the L2 cache.

    The GPU first waits, so that the host has launched the whole call before it begins. The time is
    therefore that of the GPU, unless the host needs more than about a millisecond for the call.
    Writes flush the cache; a read follows them, so that the call's time does not include writing
    back cache lines.
    """

    FLUSH_BYTES = 256 << 20
    WAIT_CYCLES = 2_000_000  # 1.0 ms at 1.98 GHz, the clock of an H200

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.flush = torch.empty(self.FLUSH_BYTES // 4, dtype=torch.float32, device=device)

    def __call__(self, call: Call) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self.device):
            torch.cuda._sleep(self.WAIT_CYCLES)
            self.flush.zero_()
            self.flush.sum()
            start.record()
            call()
            stop.record()
            stop.synchronize()
        return start.elapsed_time(stop)
