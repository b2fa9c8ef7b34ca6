"""``flash_attn.utils.benchmark``: the function that other projects' benchmarks call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import benchmark


def benchmark_forward(
    fn: Callable[..., Any],
    *inputs: Any,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> tuple[benchmark.Timer, benchmark.Measurement]:
    """Time ``fn(*inputs, **kwinputs)``, in autocast to `amp_dtype` with `amp`.

    Returns:
        PyTorch's timer, and its measurement of `repeats` calls; `verbose` prints it after `desc`.
    """
    device = next((x.device.type for x in inputs if isinstance(x, Tensor)), "cpu")

    def run() -> None:
        with torch.autocast(device, amp_dtype, enabled=amp):
            fn(*inputs, **kwinputs)

    threads = torch.get_num_threads()
    timer = benchmark.Timer("run()", globals={"run": run}, num_threads=threads)
    measurement = timer.timeit(repeats)
    if verbose:
        print(desc, "- Forward pass")
        print(measurement)
    return timer, measurement
