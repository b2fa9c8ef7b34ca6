"""Compare runs: a table and a picture of loss and speed.

`python -m training.compare [key=value ...] --attn flashtile sdpa ...` trains once for each of them
from the same seed; the keys are those of training.train, and finished runs are not repeated.
`python -m training.compare --runs FOLDER FOLDER ...` reads what was trained already.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

matplotlib.use("agg")
from matplotlib import pyplot as plt

from .attention import ATTENTIONS
from .curves import column, smoothed
from .metrics import Row, read_metrics

FIRST_STEPS = 100  # where curves are compared; later, rounding errors have grown too much


@dataclass(frozen=True)
class Result:
    """One line of the table. Distances are from the first run's loss in nats a token."""

    run: str
    devices: int
    final_loss: float  # mean of the last tenth of the steps
    bits_per_byte: float  # validation, last
    largest_distance: float  # over the first FIRST_STEPS steps
    tokens_per_second: float  # median, over all devices
    speed_ratio: float  # first run's tokens a second and device over this one's
    mfu: float  # median
    peak_memory_mib: float


def main(arguments: list[str] | None = None) -> None:
    """Train if asked, write compare.csv and compare.png to the folder and print the table."""
    asked, overrides = parse(arguments)
    runs = asked.runs or train(asked.attn, asked.folder, overrides)
    curves = {run.name: read_metrics(run / "metrics.csv") for run in runs}
    starts = {run.name: last_start(run) for run in runs}
    results = compare(curves, {name: start.get("devices", 1) for name, start in starts.items()})
    asked.folder.mkdir(parents=True, exist_ok=True)
    write_csv(results, starts, asked.folder / "compare.csv")
    draw(curves, asked.folder / "compare.png")
    Console().print(as_table(results))
    print(f"{asked.folder / 'compare.csv'}, {asked.folder / 'compare.png'}")


def train(names: list[str], folder: Path, overrides: list[str]) -> list[Path]:
    """A run for each attention; their folders."""
    for name in names:
        command = [sys.executable, "-m", "training.train", *overrides]
        command += [f"attn={name}", f"run_dir={folder / name}"]
        print(f"attn={name}", flush=True)
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"the run with attn={name} failed; the others are in {folder}")
    return [folder / name for name in names]


def last_start(run: Path) -> dict[str, Any]:
    """Machine, versions, command and devices of the last time that `run` was started."""
    return json.loads((run / "provenance.jsonl").read_text(encoding="utf-8").splitlines()[-1])


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides that go to every run."""
    parser = argparse.ArgumentParser(prog="python -m training.compare", description=__doc__)
    parser.add_argument(
        "--attn",
        nargs="+",
        choices=ATTENTIONS,
        default=["flashtile", "sdpa"],
        help="attentions to train with, a run each (default: flashtile sdpa)",
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="compare these finished runs and train nothing (default: train)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/compare"),
        metavar="DIR",
        help="folder of the runs and the comparison (default: %(default)s)",
    )
    asked, overrides = parser.parse_known_args(arguments)
    for override in overrides:
        if override.startswith("-") or "=" not in override:
            parser.error(f"{override!r} is neither an option nor key=value")
        if override.split("=")[0] in ("attn", "run_dir"):
            parser.error(f"{override!r}: use --attn and --folder")
    if asked.runs and overrides:
        parser.error(f"{overrides[0]!r}: --runs trains nothing")
    for run in asked.runs or []:
        if not (run / "metrics.csv").is_file():
            parser.error(f"--runs: {str(run)!r} holds no metrics.csv")
    return asked, overrides


def compare(curves: dict[str, list[Row]], devices: dict[str, int]) -> list[Result]:
    """A result for each run; the first run is the baseline."""
    (first_name, first), *_ = curves.items()
    first_speed = np.nanmedian(column(first, "tokens_per_second")) / devices[first_name]
    results = []
    for name, rows in curves.items():
        loss, speed = column(rows, "loss"), np.nanmedian(column(rows, "tokens_per_second"))
        shared = {row.step: row.loss for row in first if row.step <= FIRST_STEPS}
        distances = [abs(row.loss - shared[row.step]) for row in rows if row.step in shared]
        results.append(
            Result(
                run=name,
                devices=devices[name],
                final_loss=float(loss[-max(1, len(loss) // 10) :].mean()),
                bits_per_byte=rows[-1].validation_bits_per_byte,
                largest_distance=max(distances, default=float("nan")),
                tokens_per_second=float(speed),
                speed_ratio=float(first_speed / (speed / devices[name])),
                mfu=float(np.median(column(rows, "mfu"))),
                peak_memory_mib=max(row.peak_memory_mib for row in rows),
            )
        )
    return results


def write_csv(results: list[Result], starts: dict[str, dict[str, Any]], path: Path) -> None:
    """Write the table as CSV, each line with the provenance of its run."""
    lines = []
    for result in results:
        start = {key: value for key, value in starts[result.run].items() if key != "devices"}
        lines.append(asdict(result) | start)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def as_table(results: list[Result]) -> Table:
    """The table as text."""
    first = results[0].run
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        caption="on: devices; bits/B: validation bits per byte; "
        f"dist.: from the loss of {first}, largest of {FIRST_STEPS} steps; "
        f"ratio: tokens/s and device of {first} over this run's",
    )
    headings = {
        "run": "{}",
        "on": "{}",
        "loss": "{:.4f}",
        "bits/B": "{:.3f}",
        "dist.": "{:.1e}",
        "tokens/s": "{:,.0f}",
        "ratio": "{:.2f}",
        "MFU": "{:.1%}",
        "MiB": "{:,.0f}",
    }
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "run" else "right", no_wrap=True)
    for result in results:
        values = zip(headings.values(), asdict(result).values(), strict=True)
        table.add_row(*("-" if value != value else form.format(value) for form, value in values))
    return table


def draw(curves: dict[str, list[Row]], path: Path) -> None:
    """Loss, its distance from the first run, and speed, as a PNG at `path`."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    first, *_ = curves.values()
    reference = {row.step: row.loss for row in first}
    for number, (name, rows) in enumerate(curves.items()):
        loss, steps = column(rows, "loss"), column(rows, "step")
        style = {"color": f"C{number}", "label": name}
        dashes = (0, (4, 2 * number)) if number else "-"  # so that equal curves are all visible
        left.plot(steps, smoothed(loss, max(1, len(rows) // 40)), linestyle=dashes, **style)
        if number:
            distance = [abs(row.loss - reference.get(row.step, np.nan)) for row in rows]
            middle.semilogy(steps, np.maximum(distance, 1e-9), linewidth=0.8, **style)
        right.bar(name, np.nanmedian(column(rows, "tokens_per_second")), color=f"C{number}")
    left.set(xlabel="step", ylabel="training loss (nats a token)")
    left.legend()
    middle.axhline(1e-3, color="gray", linestyle=":")
    middle.set(xlabel="step", ylabel=f"|loss - loss of {next(iter(curves))}|")
    right.set(ylabel="tokens a second, median")
    plt.setp(right.get_xticklabels(), rotation=30, ha="right")
    for axes in (left, middle):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
