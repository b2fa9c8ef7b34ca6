"""Four calls of one case for a profiler: forward and backward of a set of `compare_trees`.

    python -m benchmarks.profiled_call models 5

The kernels of the forward and the backward in the third call, with the least, mean and most
instructions that a multiprocessor's tensor cores execute, the share of the time they are busy, the
cycles, and the bytes of the memory:

    m=sm__inst_executed_pipe_tensor_op_gmma
    m=$m,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed
    m=$m,sm__cycles_active,sm__cycles_elapsed.max,gpu__time_duration.sum
    m=$m,dram__bytes_read.sum,dram__bytes_write.sum
    ncu --clock-control none --kernel-name "regex:^(forward|backward)_kernel" \
        --launch-skip 4 --launch-count 2 --metrics $m python -m benchmarks.profiled_call models 5

`results/h200/profiles` has the sections SpeedOfLight, LaunchStats, SchedulerStats, WarpStateStats,
ComputeWorkloadAnalysis and MemoryWorkloadAnalysis of `papers 12`, by `--section` instead of
`--metrics` and `--print-details all`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from .compare_trees.jobs import jobs_of
from .peers import PEERS
from .shapes import Case, make_inputs

CALLS = 4


def find_case(name: str, number: int) -> Case:
    """The case of a set, a preset or a file with this number.

    Raises:
        ValueError: there is no such case; the message lists those there are.
    """
    cases = {job.case.index: job.case for job in jobs_of(name)}
    if number not in cases:
        lines = [f"{index}: {case.label}" for index, case in cases.items()]
        raise ValueError("\n".join([f"{name} has no case {number}, but", *lines]))
    return cases[number]


def main(argv: Sequence[str]) -> None:
    """Run the case that ``NAME NUMBER`` names, forward and where it can backward."""
    name, number = argv
    case = find_case(name, int(number))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prepared = PEERS["flashtile"](case, make_inputs(case, device))
    print(f"{case.label}, by {prepared.backend}")
    for _ in range(CALLS):
        if case.cached:
            prepared.forward()
        else:
            prepared.forward_and_backward()
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
