"""The host's time of short calls, without a GPU: Triton's real launchers over a CUDA driver that
does nothing, and tensors on the CPU that count as if on a GPU.

    PYTHONPATH=.venv/triton-3.6.0:.:tests python -m hopper_kernels.host_time
    PYTHONPATH=.venv/triton-3.6.0:.:tests python -m hopper_kernels.host_time --profile "decode"

Each time is the least of many bursts of five calls, in microseconds. It lacks what only a GPU has:
the driver's own time, and the thread that runs a backward. To compare another version of flashtile,
put its folder before this one on the path.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import flashtile
from benchmarks.peers import PEERS
from benchmarks.prepared import DIFFERENTIATED
from benchmarks.presets import plain_case
from benchmarks.shapes import Case, make_inputs, vary
from flashtile.distributed import ContextParallel

from .fake_cuda import as_if_on_a_gpu, fake_driver
from .silent_communicator import SilentCommunicator

BURST, SECONDS = 5, 2.0
Call = Callable[[], Any]


class Empty(torch.autograd.Function):
    """The least that any function in Python takes, forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        ctx.save_for_backward(q, k, v)
        return q.detach()

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        return ctx.saved_tensors


def cases() -> dict[str, tuple[Case, str, str]]:
    """(case, pass, backend) by name."""
    dense = plain_case(64, 128, batch=1, heads_q=2, heads_kv=2, causal=True)
    packed = vary(dense, "varlen")
    step = plain_case(
        64, 1024, batch=1, heads_q=4, heads_kv=2, seqlen_q=1, causal=True, cached=True
    )
    appends = replace(step, appends=True)
    return {
        "forward": (dense, "forward", "flashtile"),
        "both": (dense, "both", "flashtile"),
        "forward, packed": (packed, "forward", "flashtile"),
        "both, packed": (packed, "both", "flashtile"),
        "both, Triton": (dense, "both", "flashtile-triton"),
        "decode": (step, "forward", "flashtile"),
        "decode, append": (appends, "forward", "flashtile"),
        "decode, append and rotary": (replace(appends, rotates=True), "forward", "flashtile"),
    }


@contextmanager
def stand_in() -> Iterator[None]:
    """A driver that does nothing, for tensors on the CPU."""
    with (
        tempfile.TemporaryDirectory() as folder,
        fake_driver(Path(folder), records=False) as driver,
        as_if_on_a_gpu(),
        patch.object(driver, "get_current_stream", {None: 0, 0: 0}.get),
    ):
        yield


def microseconds(call: Call) -> float:
    """The least time of a call in a burst."""
    times, end = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(BURST):
            call()
        times.append(time.perf_counter() - start)
    return min(times) / BURST * 1e6


def steps_over_ranks() -> dict[str, Call]:
    """Steps of decoding on the first of two ranks, without exchanges, by name."""
    q = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
    tensors = torch.zeros(2, 1, 1024, 2, 64, dtype=torch.bfloat16)
    new = torch.zeros(2, 1, 1, 2, 64, dtype=torch.bfloat16)
    lengths = torch.full((1,), 500, dtype=torch.int32)
    counts = cycle(range(900))
    step = partial(ContextParallel.over(SilentCommunicator(0, 2)).decode, q, *tensors)
    append, window = partial(step, *new, causal=True), {"window_size": (127, 0)}
    return {
        "over ranks": lambda: step(cache_seqlens=next(counts)),
        "over ranks, append": lambda: append(cache_seqlens=next(counts)),
        "over ranks, append, window": lambda: append(cache_seqlens=next(counts), **window),
        "over ranks, tensor": lambda: append(cache_seqlens=lengths),
        "over ranks, tensor, window": lambda: append(cache_seqlens=lengths, **window),
    }


def calls(names: list[str]) -> Iterator[tuple[str, Call]]:
    """The calls, each made often enough to be prepared."""
    for name, step in steps_over_ranks().items():
        if name in names:
            for _ in range(6):
                step()
            yield name, step
    for name, (case, direction, peer) in cases().items():
        if name not in names:
            continue
        with torch.set_grad_enabled(direction in DIFFERENTIATED):
            inputs = make_inputs(case, "cpu")
            call = PEERS[peer](case, inputs).call(direction)
            for _ in range(6):
                call()
            yield name, call


def empty() -> Call:
    """A forward and backward of `Empty`."""
    q, k, v = (torch.zeros(8, requires_grad=True) for _ in range(3))
    dout = torch.zeros(8)
    return lambda: torch.autograd.grad(Empty.apply(q, k, v), (q, k, v), dout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "names",
        nargs="*",
        default=[*cases(), *steps_over_ranks()],
        help="of the calls (default: all)",
    )
    parser.add_argument("--profile", action="store_true", help="print the functions of each call")
    chosen = parser.parse_args()
    print(flashtile.__file__)
    with stand_in():
        print(f"{'empty autograd.Function':28s} {microseconds(empty()):7.1f} µs", flush=True)
        for name, call in calls(chosen.names):
            print(f"{name:28s} {microseconds(call):7.1f} µs", flush=True)
            if chosen.profile:
                profile = cProfile.Profile()
                profile.runcall(lambda call=call: [call() for _ in range(2000)])
                pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
