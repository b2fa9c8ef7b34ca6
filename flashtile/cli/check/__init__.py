"""``flashtile check``: whether flashtile's results are right on this machine, and how fast it is.

`calls` makes the core calls of the conformance suite, `judge` compares a call with float64, `speed`
times some calls, and `report` writes a report to attach to a bug.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from .. import info, machine
from .calls import Case, cases
from .judge import Outcome, outcome_of
from .report import Results, verdict, write
from .speed import SHAPES, measure, table

OUTPUT = "flashtile-check.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--quick", action="store_true", help="run fewer calls, in about a minute")
    parser.add_argument("--device", help="cpu or cuda:N (default: a GPU if there is one)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(OUTPUT),
        metavar="FILE",
        help="the report: JSON if the name ends in .json, else Markdown (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of the random inputs (default: drawn for each run; the report names it)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the check; return 0 if all calls are right, 1 if one is wrong or none could run, and 2 if
    the device or the output folder does not exist.
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if missing := machine.missing_device(device):
        print(f"--device {device}: {missing}", file=sys.stderr)
        return 2
    if not args.output.absolute().parent.is_dir():
        print(f"--output {args.output}: the folder does not exist", file=sys.stderr)
        return 2
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"flashtile on {machine.device_name(device)}, seed {seed}")
    if warning := machine.busy():
        print(f"note: {warning}")
    results = Results(info.collect(), device, seed, args.quick)
    try:
        for outcome in _judged(cases(device, args.quick), device, seed):
            results.outcomes.append(outcome)
        results.times += _timed(device, args.quick)
    except KeyboardInterrupt:
        results.stopped = True
    print(verdict(results))
    write(results, args.output)
    print(f"report: {args.output}")
    return 0 if results.passed else 1


def _judged(cases: list[Case], device: str, seed: int) -> Iterator[Outcome]:
    """The outcome of every case; prints its line, which on a terminal replaces the previous one."""
    begin, end = ("\r\x1b[K", "") if sys.stdout.isatty() else ("", "\n")
    start = time.monotonic()
    for number, case in enumerate(cases, 1):
        elapsed = time.monotonic() - start
        print(f"{begin}[{number}/{len(cases)}, {elapsed:.0f} s] {case}", end=end, flush=True)
        outcome = outcome_of(case, device, seed)
        if outcome.failures:
            print(f"{begin}FAILED {case}")
            print("\n".join(f"    {line}" for line in outcome.failures), flush=True)
        yield outcome
    print(begin, end="")


def _timed(device: str, quick: bool) -> list[list[str]]:
    """Print and return the speed table; its heading is the first line."""
    print("timing, compared with scaled_dot_product_attention", flush=True)
    lines = table(measure(SHAPES[:1] if quick else SHAPES, device))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(x.rjust(w) for x, w in zip(line, widths, strict=True)))
    return lines
