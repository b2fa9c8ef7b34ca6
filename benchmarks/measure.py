"""How it is measured: time, peak memory and error of a call."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

Call = Callable[[], object]
Timer = Callable[[Call], float]  # milliseconds of one run of the call

TURN_MS = 10.0  # a call faster than this runs several times in its turn
MAX_REPEATS = 20
MAX_ROUNDS = 200


class Timing(NamedTuple):
    """Median and spread of the samples, milliseconds."""

    median_ms: float
    p20_ms: float
    p80_ms: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Quantiles of `samples`, linear between neighbours."""
        values = torch.tensor(samples, dtype=torch.float64)
        quantiles = values.quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64))
        return cls(*quantiles.tolist())


def interleave(
    calls: Mapping[str, Call],
    timer: Timer,
    *,
    budget_ms: float,
    min_rounds: int = 5,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Time all calls in turns, in a new random order each round; returns every sample.

    The machine drifts while it is measured (clocks, heat, neighbours). In one run and a random
    order the drift meets every call alike, so that the ratios hold even when the times do not.

    Args:
        budget_ms: how long to measure, all calls together; at least `min_rounds` rounds.
    """
    shuffle = random.Random(seed).shuffle
    first = {name: timer(call) for name, call in calls.items()}  # warms up; not a sample
    repeats = {
        name: max(1, min(MAX_REPEATS, int(TURN_MS / max(ms, 1e-3)))) for name, ms in first.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    spent = 0.0
    for done in range(MAX_ROUNDS):
        if done >= min_rounds and spent >= budget_ms:
            break
        order = list(calls)
        shuffle(order)
        for name in order:
            turn = [timer(calls[name]) for _ in range(repeats[name])]
            samples[name] += turn
            spent += sum(turn)
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

    The flushes also keep the card busy while the call is being launched, for about a quarter of a
    millisecond, so that a short kernel's time does not include the launch. The last one reads: what
    it leaves in the cache need not be written back in the call's time.
    """

    FLUSH_BYTES = 256 << 20
    FLUSHES = 3

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.flush = torch.empty(self.FLUSH_BYTES // 4, dtype=torch.float32, device=device)

    def __call__(self, call: Call) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self.device):
            for _ in range(self.FLUSHES):
                self.flush.zero_()
            self.flush.sum()
            start.record()
            call()
            stop.record()
            stop.synchronize()
        return start.elapsed_time(stop)


class HostTimer:
    """Milliseconds until an eager call returns, without waiting for what it launched.

    A burst of calls goes out to an idle card, few enough that the queue of launches never fills.
    """

    BURST = 20

    def __init__(self, device: str) -> None:
        self.wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None

    def __call__(self, call: Call) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(self.BURST):
            call()
        took = time.perf_counter() - start
        self.wait()
        return took / self.BURST * 1e3


@lru_cache
def matmul_tflops(device: str, dtype: torch.dtype, size: int = 8192) -> float:
    """TFLOP/s that the device reaches in one large matrix product: what attention could."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    samples = interleave({"matmul": lambda: a @ b}, timer_for(device), budget_ms=500)
    return 2 * size**3 / Timing.of(samples["matmul"]).median_ms / 1e9


@lru_cache
def read_gbps(device: str, size: int = 2 << 30) -> float:
    """GB/s at which the device reads in one large sum: what a cache could be read at."""
    x = torch.ones(size // 4, device=device)
    samples = interleave({"sum": x.sum}, timer_for(device), budget_ms=100)
    return size / Timing.of(samples["sum"]).median_ms / 1e6


def captured(call: Call) -> Call:
    """The call as a CUDA graph: what remains is the card's own time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def peak_bytes(call: Call, device: str = "cpu") -> int:
    """The most memory that `call` holds at once, above what is held when it begins.

    What the call returns counts. On a CPU every allocation and release that passes PyTorch's
    allocator is recorded, the scratch space inside its C++ kernels included.
    """
    if torch.device(device).type == "cuda":
        gc.collect()  # what an earlier call left must not be freed in this one
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler logs its own start otherwise
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    ) as profile:
        call()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = peak = 0
    for _, change in sorted(changes, key=lambda timed: timed[0]):
        held += change
        peak = max(peak, held)
    return peak


class Errors(NamedTuple):
    """Distance from the truth: the largest, and the root of the mean square."""

    max_error: float
    rms_error: float


def errors(got: Sequence[Tensor], truth: Sequence[Tensor]) -> Errors:
    """Error over all elements of several tensors taken together; NaN if any is NaN."""
    difference = torch.cat(
        [
            (g.detach().double() - t.detach().double()).flatten()
            for g, t in zip(got, truth, strict=True)
        ]
    )
    return Errors(difference.abs().max().item(), difference.square().mean().sqrt().item())
