"""The command line of a benchmark that prints a table, and its CSV file."""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from flashtile.cli.machine import provenance

from .rows import recorded

Values = Sequence[object]
Measure = Callable[[argparse.Namespace], Iterable[Values]]


class Command(argparse.ArgumentParser):
    """The options that such benchmarks share.

    Args:
        module: name of the benchmark inside `benchmarks`.
        doc: its docstring, of which the first sentence describes it.
        device: default of `--device`; None for a benchmark of the CPU, which has no such option.
        budget_ms: default of `--budget`, the milliseconds for a group of calls that take turns;
            None for a benchmark without one.
    """

    def __init__(
        self, module: str, doc: str, *, device: str | None = "cuda", budget_ms: float | None = None
    ) -> None:
        self.command = ["python", "-m", f"benchmarks.{module}"]
        super().__init__(shlex.join(self.command), description=doc.partition("\n\n")[0])
        self.set_defaults(device="cpu")
        if device:
            self.add_argument("--device", default=device, help="(default: %(default)s)")
        if budget_ms:
            meaning = "milliseconds for calls that take turns (default: %(default)s)"
            self.add_argument("--budget", type=float, default=budget_ms, metavar="MS", help=meaning)
        self.add_argument("--csv", type=Path, metavar="FILE", help="what to write (default: none)")

    def run(self, argv: Sequence[str] | None, columns: Mapping[str, int], measure: Measure) -> int:
        """Print each line when it has been measured, and write it where `--csv` says, with the
        origin of the measurement behind it.

        Args:
            argv: the command line (default: that of the process).
            columns: name and printed width of each column.
            measure: the lines for the parsed options.
        """
        argv = sys.argv[1:] if argv is None else list(argv)
        args = self.parse_args(argv)
        origin = provenance(args.device, recorded(self.command, argv))

        def show(values: Values) -> None:
            cells = (f"{x!s:>{width}}" for x, width in zip(values, columns.values(), strict=True))
            print(*cells, flush=True)

        if args.csv:
            args.csv.parent.mkdir(parents=True, exist_ok=True)
        with open(args.csv or os.devnull, "w", 1, "utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow((*columns, *origin))
            for number, values in enumerate(measure(args)):
                if number == 0:
                    show([*columns])
                show(values)
                writer.writerow((*values, *origin.values()))
        return 0
