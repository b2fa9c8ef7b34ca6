"""Calls one after another and after a rest, in turns, with the GPU's clock and power beside them.

    python -m benchmarks.clocks --set gpu-models --numbers 31 30 --peers flashtile fa4

Two kernels may differ because one of them draws more power: a call that lowers the clock is slow
only among others. `row_ms` is the mean time of a call in a row of two seconds, `rested_ms` the
median of calls after a fifth of a second without work. The clock of the multiprocessors and the
power are means over the row but for its first third, in MHz and watts (nvidia-ml-py reads them).
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from .command import Command
from .peers import PEERS, failures_of
from .prepared import DIFFERENTIATED, Skip
from .profiled_call import find_case
from .shapes import make_inputs

REST_S, RESTED_CALLS = 0.2, 5
COLUMNS = {
    "case": 24, "pass": 8, "peer": 10, "row_ms": 9, "rested_ms": 9, "clock": 6, "power": 6,
}  # fmt: skip


def timed(call: Callable[[], object], count: int) -> float:
    """Milliseconds of a call, the mean of `count` in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def sensors(seconds: float) -> tuple[float, float]:
    """Mean clock and power from a third of `seconds` on."""
    time.sleep(seconds / 3)
    end = time.monotonic() + seconds / 2
    read = []
    while time.monotonic() < end:
        read.append((torch.cuda.clock_rate(), torch.cuda.power_draw() / 1000))
        time.sleep(0.02)
    clocks, watts = zip(*read, strict=True)
    return statistics.mean(clocks), statistics.mean(watts)


def measured(call: Callable[[], object], seconds: float) -> tuple[object, ...]:
    """Times after a rest and in a row, clock and power."""
    for _ in range(2):
        call()
    rested = []
    for _ in range(RESTED_CALLS):
        torch.cuda.synchronize()
        time.sleep(REST_S)
        torch.cuda._sleep(2_000_000)  # the host launches the call meanwhile
        rested.append(timed(call, 1))
    rested_ms = statistics.median(rested)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(sensors, seconds)
        row_ms = timed(call, max(int(1000 * seconds / rested_ms), 1))
    clock, power = reading.result()
    return f"{row_ms:.4f}", f"{rested_ms:.4f}", f"{clock:.0f}", f"{power:.0f}"


def measure(args: Namespace) -> Iterator[tuple[object, ...]]:
    """The lines: the peers of a case in turns, `--turns` times."""
    for case in (find_case(args.set, number) for number in args.numbers):
        inputs = make_inputs(case, args.device)
        for _ in range(args.turns):
            for peer in args.peers:
                for direction in args.directions:
                    try:
                        with failures_of(peer), torch.set_grad_enabled(direction in DIFFERENTIATED):
                            call = PEERS[peer](case, inputs).call(direction)
                            values = measured(call, args.seconds)
                    except Skip as reason:
                        values = (reason, "", "", "")
                    yield case.variant, direction, peer, *values


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the lines."""
    command = Command("clocks", __doc__)
    command.add_argument("--set", default="gpu-models", help="as --cases of compare_trees")
    command.add_argument("--numbers", nargs="+", type=int, default=[31, 30, 1], help="its cases")
    command.add_argument("--peers", nargs="+", choices=sorted(PEERS), default=["flashtile"])
    command.add_argument(
        "--pass",
        nargs="+",
        choices=("forward", "backward"),
        dest="directions",
        default=("forward",),
    )
    command.add_argument("--turns", type=int, default=2, help="of the peers of a case")
    command.add_argument("--seconds", type=float, default=2.0, help="of a row")
    return command.run(argv, COLUMNS, measure)


if __name__ == "__main__":
    sys.exit(main())
