"""``python -m benchmarks.compare_trees``: versions of flashtile, measured side by side in one run.

    python -m benchmarks.compare_trees base=../base new=. 'late=.?DELAY=400' \
        --cases papers models field:2 --csv compared.csv

A tree is a folder with a version of flashtile. The part after `?` is the environment of its
process, such as switches, a TRITON_CACHE_DIR of its own, or FLASHTILE_COMMIT where the folder has
no history. Each tree has one process, and only one process runs at a time. In each round the jobs
come in a new random order, and so do the trees of a job: a process makes the inputs, runs the call
once, then times `--calls` more. Outputs and gradients are compared with those of the first tree.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flashtile.cli.machine import busy, missing_device, provenance

from ..measure import default_device
from ..report import plain_table
from ..rows import append_csv, recorded, start_csv, without_folders
from .jobs import CLOCKS, DIRECTIONS, FIELD, SETS, Job, jobs_of
from .outcomes import SUMMARY, Comparison, Outcome, difference, headings, ratios, summary
from .processes import Pool, Tree, compile_ahead
from .worker import Request

AHEAD_SHARE = 0.5  # of the time limit that compiling ahead may take
WITHOUT_LIMIT = 1e9  # seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run with `argv` (by default the command line); returns the exit status.

    It is 0 if every tree ran every job.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(argv)
    device = args.device or default_device()
    try:
        jobs = [job for name in args.cases for job in jobs_of(name)]
        _check(args, device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    jobs = [job for job in jobs if job.direction in args.passes]
    if not jobs:
        print("these flags leave no case", file=sys.stderr)
        return 2
    if warning := busy():
        print(warning)
    start = time.monotonic()
    deadline = start + (args.limit or WITHOUT_LIMIT)
    comparisons = [Comparison(job, {tree.name: Outcome() for tree in args.trees}) for job in jobs]
    pool = Pool(args.trees, device, args.patience)
    try:
        if args.ahead:
            _compile_ahead(args, jobs, device, start)
        for number in range(args.rounds):
            if time.monotonic() >= deadline:
                break
            _measure_round(comparisons, pool, number, args, deadline)
            if args.csv:
                _write(args, argv, comparisons, pool)
            print(f"round {number + 1} of {args.rounds}: {_since(start)}", flush=True)
    finally:
        pool.stop()
    _print(comparisons, args.trees)
    broken = [x for c in comparisons for x in c.outcomes.values() if x.skipped or not x.samples]
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_trees",
        description="Measure versions of flashtile side by side and compare their results.",
        epilog=f"sets: {', '.join(SETS)}; {FIELD}:SEED:I,J takes cases I and J that SEED draws. "
        f"Clocks: {'; '.join(f'{name}: {meaning}' for name, meaning in CLOCKS.items())}.",
    )
    parser.add_argument(
        "trees",
        nargs="+",
        type=tree_of,
        metavar="NAME=DIR?VARIABLE=VALUE",
        help="folder with a version of flashtile, environment of its process (default: as here)",
    )
    for name, default, meaning in (
        ("--rounds", 6, "how often each job is measured"),
        ("--calls", 5, "timed calls in a round"),
        ("--ahead", 0, "processes that compile all kernels before"),
        ("--seed", 0, "of the random order"),
    ):
        help = f"{meaning} (default: {default})"
        parser.add_argument(name, type=int, default=default, metavar="N", help=help)
    parser.add_argument(
        "--cases",
        nargs="+",
        required=True,
        metavar="NAME",
        help=f"sets ({', '.join(SETS)}, {FIELD}:SEED), presets of python -m benchmarks, or JSON "
        "files: lists of objects with fields of Case, passes, clock, peer",
    )
    parser.add_argument(
        "--pass",
        dest="passes",
        nargs="+",
        choices=DIRECTIONS,
        default=DIRECTIONS,
        metavar="PASS",
        help=f"keep these passes of the cases (default: {' '.join(DIRECTIONS)})",
    )
    parser.add_argument("--device", help="cpu or cuda:N (default: a GPU if there is one)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop then (default: never)")
    parser.add_argument(
        "--patience",
        type=float,
        default=120,
        metavar="SECONDS",
        help="a call that takes longer has failed (default: %(default)s)",
    )
    parser.add_argument("--csv", type=Path, help="CSV file, written each round (default: none)")
    return parser


def tree_of(text: str) -> Tree:
    try:
        return Tree.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _check(args: argparse.Namespace, device: str) -> None:
    """Raise ValueError where arguments do not fit together or the machine."""
    names = [tree.name for tree in args.trees]
    if len(set(names)) < len(names):
        raise ValueError(f"trees {', '.join(names)}: each wants a name of its own")
    for name in ("rounds", "calls"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}, want at least 1")
    if missing := missing_device(device):
        raise ValueError(f"--device {device}: {missing}")


def _compile_ahead(args: argparse.Namespace, jobs: list[Job], device: str, start: float) -> None:
    deadline = start + (args.limit or WITHOUT_LIMIT) * AHEAD_SHARE
    done = compile_ahead(args.trees, jobs, device, processes=args.ahead, deadline=deadline)
    print(f"compiled ahead: {done} of {len(jobs) * len(args.trees)} runs, {_since(start)}")
    sys.stdout.flush()


def _measure_round(
    comparisons: Sequence[Comparison],
    pool: Pool,
    number: int,
    args: argparse.Namespace,
    deadline: float,
) -> None:
    """Every job on every tree once, until the deadline. What failed before is not tried again."""
    random_order = random.Random(f"{args.seed} {number}")
    for comparison in random_order.sample(comparisons, len(comparisons)):
        for name in random_order.sample(list(comparison.outcomes), len(comparison.outcomes)):
            left, outcome = deadline - time.monotonic(), comparison.outcomes[name]
            if left <= 0:
                return
            if outcome.skipped:
                continue
            request = Request(comparison.job, args.calls, traced=not outcome.traces)
            answer = pool.ask(name, request, left)
            if not answer.skipped or time.monotonic() < deadline:
                outcome.take(number, answer)


def _write(
    args: argparse.Namespace, argv: Sequence[str], comparisons: Sequence[Comparison], pool: Pool
) -> None:
    """All that is known so far, as rows with the columns of `python -m benchmarks` and more."""
    command = recorded(["python", "-m", "benchmarks.compare_trees"], argv)
    here = provenance("cpu", command)
    added = ["clock", "tree", "variables", "rounds", "ratio", "ratio_p20", "ratio_p80"]
    added += ["bit_equal", "difference", "worst_row"]
    start_csv(args.csv, {**dict.fromkeys(added, ""), **here})
    for comparison in comparisons:
        for tree in args.trees:
            outcome = comparison.outcomes[tree.name]
            ratio = ratios(comparison.base, outcome) or [None] * 3
            apart = difference(comparison.base, outcome) or [None] * 3
            variables = without_folders(tree.variables)
            found = [comparison.job.clock, tree.name, variables, len(outcome.rounds)]
            values = ["" if x is None else x for x in (*found, *ratio, *apart)]
            origin = pool.origins[tree.name] or dict.fromkeys(here, "")
            columns = {**dict(zip(added, values, strict=True)), **origin, "command": command}
            append_csv(args.csv, [outcome.row(comparison.job)], columns)


def _print(comparisons: Sequence[Comparison], trees: Sequence[Tree]) -> None:
    """The reasons of failures, every job, then the summary."""
    names = [tree.name for tree in trees]
    print(plain_table(headings(names), [comparison.cells() for comparison in comparisons]))
    reasons: dict[tuple[str, str], list[str]] = {}
    for comparison in comparisons:
        case = comparison.job.case
        for name, outcome in comparison.outcomes.items():
            if outcome.skipped:
                where = f"{case.preset} {case.index} {comparison.job.direction}"
                reasons.setdefault((name, outcome.skipped), []).append(where)
    for (name, reason), cases in reasons.items():
        print(f"{name}: {reason} ({len(cases)}: {', '.join(cases[:6])})")
    if len(names) > 1:
        print(f"x: times as fast as {names[0]}. Differences from {names[0]}: = for the same bits;")
        print("norm of the difference, and of the worst row, relative to the norm of all or a row")
        print(plain_table(SUMMARY, summary(comparisons)))


def _since(start: float) -> str:
    return f"{time.monotonic() - start:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
