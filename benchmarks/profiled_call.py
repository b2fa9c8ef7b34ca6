"""Calls of single cases for a profiler: of flashtile and of its peers, each pass by itself.

    python -m benchmarks.profiled_call field:1 3 33 --peers flashtile fa4 --pass backward

Each pass runs twice, and then once between `cudaProfilerStart` and `cudaProfilerStop`, after a line
that says what it is. For its kernels, this prints the least, mean and most instructions that a
multiprocessor's tensor cores execute, the share of the time that they are busy, the cycles, and the
bytes that move between the memory and the L2 cache, all at the base clock:

    m=sm__inst_executed_pipe_tensor_op_gmma
    m=$m,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed
    m=$m,sm__cycles_active,sm__cycles_elapsed.max,gpu__time_duration.sum
    m=$m,dram__bytes_read.sum,dram__bytes_write.sum
    m=$m,lts__t_sectors_op_read.sum,lts__t_sectors_op_red.sum,smsp__inst_executed.sum
    m=$m,launch__registers_per_thread,l1tex__data_pipe_lsu_wavefronts_mem_shared.sum
    ncu --profile-from-start off --metrics $m --csv --page raw \
        python -m benchmarks.profiled_call models 5 --peers flashtile fa4

The kernels of ncu's table are in the order of these lines. `results/h200/profiles` has such tables,
shortened, and of an older commit the sections SpeedOfLight,
LaunchStats, SchedulerStats, WarpStateStats, ComputeWorkloadAnalysis and MemoryWorkloadAnalysis of
`papers 12`, by `--section` instead of `--metrics` and `--print-details all`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from .compare_trees.jobs import jobs_of
from .measure import default_device
from .peers import PEERS, failures_of
from .prepared import DIFFERENTIATED, Skip
from .shapes import Case, make_inputs

WARM_CALLS = 2


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


@contextmanager
def _profiled(device: str) -> Iterator[None]:
    """What runs in here is profiled where the profiler does not start with the process."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profile(call: Callable[[], object], label: str, device: str) -> None:
    """Run the call until nothing is prepared any more, then once for the profiler."""
    for _ in range(WARM_CALLS):
        call()
    print(label, flush=True)
    with _profiled(device):
        call()


def main(argv: Sequence[str]) -> None:
    """Run the passes of the cases that the command line names, by each peer."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiled_call")
    parser.add_argument("name", help="a set or preset, as in --cases of benchmarks.compare_trees")
    parser.add_argument("numbers", nargs="+", type=int, help="the cases")
    parser.add_argument("--peers", nargs="+", choices=sorted(PEERS), default=["flashtile"])
    parser.add_argument(
        "--pass", nargs="+", choices=("forward", "backward"), dest="directions",
        default=("forward", "backward"),
    )  # fmt: skip
    args = parser.parse_args(argv)
    device = default_device()
    for case in (find_case(args.name, number) for number in args.numbers):
        inputs = make_inputs(case, device)
        for peer in args.peers:
            for direction in ("forward",) if case.cached else args.directions:
                label = f"{case.label}, {direction}, by {peer}"
                try:
                    with failures_of(peer), torch.set_grad_enabled(direction in DIFFERENTIATED):
                        profile(PEERS[peer](case, inputs).call(direction), label, device)
                except Skip as reason:
                    print(f"{label}: left out, {reason}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
