"""Measure the time, peak memory and error of a call."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.cli.timing import Call, Timer, Timing, cpu_timer, interleave, timer_for


class HostTimer:
    """Milliseconds until an eager call returns, without waiting for what it launched.

    Sends a burst of calls to an idle GPU; they are so few that the launch queue never fills.
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


def default_device() -> str:
    """The GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def memory_bytes(device: torch.device) -> int | None:
    """Size in bytes of a device's memory; None if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def wall_timer(device: str) -> Timer:
    """Milliseconds of the wall clock until the device is done."""
    if torch.device(device).type == "cpu":
        return cpu_timer

    def timer(call: Call) -> float:
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        return (time.perf_counter() - start) * 1e3

    return timer


@lru_cache
def matmul_tflops(device: str, dtype: torch.dtype, size: int = 8192) -> float:
    """TFLOP/s of one large matrix product on the device, an upper bound for attention."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    samples = interleave({"matmul": lambda: a @ b}, timer_for(device), budget_ms=500)
    return 2 * size**3 / Timing.of(samples["matmul"]).median_ms / 1e9


@lru_cache
def read_gbps(device: str, size: int = 2 << 30) -> float:
    """GB/s of one large sum on the device, an upper bound for reading a cache."""
    x = torch.ones(size // 4, device=device)
    samples = interleave({"sum": x.sum}, timer_for(device), budget_ms=100)
    return size / Timing.of(samples["sum"]).median_ms / 1e6


def captured(call: Call) -> Call:
    """The call as a CUDA graph, so that only the GPU's time remains."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(_: Call = call) -> None:  # keeps the tensors that the graph reads
        graph.replay()

    return replay


def peak_bytes(call: Call, device: str = "cpu") -> int:
    """The peak memory of `call`, above what is allocated when it begins.

    Results count. On a CPU every allocation and release that passes PyTorch's
    allocator is recorded, the scratch space inside its C++ kernels included.
    """
    if torch.device(device).type == "cuda":
        gc.collect()  # garbage of an earlier call must not be freed during this one
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
