"""A forward and backward with the backward in PyTorch's own thread and in the calling one.

    python -m benchmarks.backward_thread

PyTorch runs the backward on a GPU in a thread of its own, unless the caller turns that off with
`torch.autograd.set_multithreading_enabled`. At small shapes, handing the backward to the other
thread takes longer than the kernels. The script prints each library's host time, both ways.
"""

from __future__ import annotations

from functools import partial

import torch

from flashtile.cli.timing import Call, Timing, interleave

from .measure import HostTimer, default_device
from .peers import PEERS
from .presets import plain_case
from .shapes import Case, make_inputs

LIBRARIES = ("flashtile", "flashtile-triton", "sdpa")
BUDGET_MS = 100.0  # of the time that is counted, a twentieth of the time that passes


def in_thread(call: Call, own: bool) -> object:
    """The call, with a thread of its own for the backward or without."""
    with torch.autograd.set_multithreading_enabled(own):
        return call()


def measure(case: Case, device: str) -> dict[str, float]:
    """Median microseconds of a forward and backward by library and thread."""
    calls: dict[str, Call] = {}
    for name in LIBRARIES:
        both = PEERS[name](case, make_inputs(case, device)).call("both")
        for where, own in (("own", True), ("caller's", False)):
            calls[f"{name}, {where}"] = partial(in_thread, both, own)
            for _ in range(6):
                calls[f"{name}, {where}"]()
    samples = interleave(calls, HostTimer(device), budget_ms=BUDGET_MS)
    return {name: Timing.of(times).median_ms * 1e3 for name, times in samples.items()}


def main() -> None:
    device = default_device()
    for head_dim, length in ((64, 128), (64, 1024), (128, 512)):
        case = plain_case(head_dim, length, causal=True)
        print(f"{length} tokens, head dim {head_dim}")
        for name, time in measure(case, device).items():
            print(f"  {name:28s} {time:7.1f} µs", flush=True)


if __name__ == "__main__":
    main()
