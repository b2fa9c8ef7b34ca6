"""Calls over ranks by several versions of flashtile, in turns.

    python -m benchmarks.context.compare_trees base=../base again=../base new=. --csv compared.csv

A tree is a folder with a version of flashtile, as for `benchmarks.compare_trees`. Each has a
process for every rank, and one tree measures at a time, in a new random order in each round. The
cases are those of the preset `context`; a tree whose results are far from float64 ends the run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from flashtile.cli.machine import provenance

from ..compare_trees.__main__ import tree_of
from ..compare_trees.processes import ROOT, Tree
from ..measure import default_device
from ..report import plain_table
from ..rows import recorded
from .case import DIRECTIONS, prepared_peer
from .cases import cases
from .rows import ContextRow, write
from .timing import Timed, median_of
from .together import Team, connected

# As in `compare_trees.worker`: flashtile is the current folder's, and `benchmarks` is this one.
START = (
    "import sys, flashtile; sys.path.insert(0, sys.argv[1]); "
    "from benchmarks.context.compare_trees import answer_requests; answer_requests()"
)
ANSWER = "answer: "  # begins the line of an answer; PyTorch prints lines, too
FIRST_PORT = 29511


def answer_requests() -> None:
    """The process of a rank: measure a call for each line of the standard input."""
    team = Team.of(connected())
    known: tuple[int, str] | None = None
    for line in sys.stdin:
        case, direction = json.loads(line)
        if known != (case, direction):
            call = prepared_peer(cases(team.device)[case - 1], "flashtile", direction, team)
            known = case, direction
        timed = Timed(team, call, nullcontext)
        timed.warm_up()
        timed.measure()
        if dist.get_rank() == 0:
            times = [median_of(x, max) for x in (timed.single, timed.steady, timed.host)]
            print(ANSWER + json.dumps(times), flush=True)
    dist.destroy_process_group()


class Ranks:
    """The processes of one tree."""

    def __init__(self, tree: Tree, ranks: int, port: int) -> None:
        group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", START, str(ROOT)],
                cwd=tree.folder,
                env={
                    **os.environ,
                    **tree.environment,
                    **group,
                    **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def ask(self, case: int, direction: str) -> list[float]:
        """Milliseconds of a call alone and of each of several, and of the host for each of these.

        Raises:
            RuntimeError: a process ended.
        """
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([case, direction]) + "\n")
            process.stdin.flush()
        assert self.processes[0].stdout is not None
        for line in self.processes[0].stdout:
            if line.startswith(ANSWER):
                return list(json.loads(line.removeprefix(ANSWER)))
        raise RuntimeError(f"case {case}, {direction}: the first rank ended")

    def stop(self) -> None:
        """End the processes, which wait for another line."""
        for process in self.processes:
            process.communicate()


def main(argv: Sequence[str] | None = None) -> int:
    """Run with `argv` (by default the command line)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.context.compare_trees",
        description="Measure calls over ranks by versions of flashtile, in turns.",
    )
    parser.add_argument("trees", nargs="+", type=tree_of, metavar="NAME=DIR", help="versions")
    for name, default, meaning in (
        ("--ranks", 2, "processes of each tree"),
        ("--rounds", 8, "how often each call is measured"),
    ):
        help = f"{meaning} (default: {default})"
        parser.add_argument(name, type=int, default=default, metavar="N", help=help)
    parser.add_argument(
        "--cases", type=int, nargs="+", metavar="N", help="by number (default: all)"
    )
    parser.add_argument("--csv", type=Path, help="CSV file (default: none)")
    args = parser.parse_args(argv)
    device = default_device()
    trees = {
        tree.name: Ranks(tree, args.ranks, FIRST_PORT + number)
        for number, tree in enumerate(args.trees)
    }
    command = recorded(parser.prog.split(), argv)
    where = provenance("cuda:0" if device == "cuda" else device, command)
    rows: list[ContextRow] = []
    lines: list[list[str]] = []
    try:
        for number in args.cases or range(1, len(cases(device)) + 1):
            for direction in DIRECTIONS:
                found = _measured(trees, number, direction, args.rounds)
                rows += _rows(found, device, number, direction, args.ranks)
                lines.append(_line(found, number, direction))
                print(*lines[-1], sep=" | ", flush=True)
                if args.csv:
                    write(args.csv, rows, where)
    finally:
        for tree in trees.values():
            tree.stop()
    headings = [f"{name}, ms (host; to {next(iter(trees))})" for name in trees]
    print(plain_table(["case", "pass", *headings], lines))
    return 0


Times = dict[str, list[float]]  # of each tree: alone, in a row, the host


def _measured(trees: dict[str, Ranks], case: int, direction: str, rounds: int) -> Times:
    samples: dict[str, list[list[float]]] = {name: [] for name in trees}
    order = random.Random(f"{case} {direction}")
    for number in range(rounds + 1):
        for name in order.sample(list(trees), len(trees)):
            times = trees[name].ask(case, direction)
            if number:  # the first round compiles
                samples[name].append(times)
    return {
        name: [statistics.median(x) for x in zip(*of_tree, strict=True)]
        for name, of_tree in samples.items()
    }


def _rows(found: Times, device: str, number: int, direction: str, ranks: int) -> list[ContextRow]:
    case = cases(device)[number - 1]
    shared: dict[str, Any] = {
        **case._asdict(), "direction": direction, "ranks": ranks,
        "documents": len(case.lengths(ranks)),
        "process_group": "nccl" if device == "cuda" else "gloo",
    }  # fmt: skip
    return [
        ContextRow(peer=name, single_ms=alone, steady_ms=steady, host_ms=host, **shared)
        for name, (alone, steady, host) in found.items()
    ]


def _line(found: Times, number: int, direction: str) -> list[str]:
    first = next(iter(found.values()))[1]
    cells = [
        f"{steady:.3f} ({host:.3f}; {first / steady:.3f})" for _, steady, host in found.values()
    ]
    return [str(number), direction, *cells]


if __name__ == "__main__":
    sys.exit(main())
