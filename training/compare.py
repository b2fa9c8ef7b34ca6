"""One run for each attention from the same seed: a table and a picture of loss and speed.

`python -m training.compare [key=value ...] [--attn flashtile sdpa eager flex] [--folder FOLDER]`
The keys are those of training.train. Runs that are finished are read, not repeated.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

matplotlib.use("agg")
from matplotlib import pyplot as plt

from .curves import column, smoothed
from .metrics import Row, read_metrics
from .settings import ATTENTIONS

FIRST_STEPS = 100  # for the distance of the curves, before rounding has grown into another path


@dataclass(frozen=True)
class Result:
    """One line of the table. Distances are from the first run's loss in nats a token."""

    attn: str
    final_loss: float  # mean of the last tenth of the steps
    bits_per_byte: float  # validation, last
    largest_distance: float  # over the first FIRST_STEPS steps
    tokens_per_second: float  # median
    speed_ratio: float  # first run's tokens a second over this one's
    mfu: float  # median
    peak_memory_mib: float


def main(arguments: list[str] | None = None) -> None:
    """Train, then write compare.csv and compare.png to the folder and print the table."""
    asked, overrides = parse(arguments)
    for name in asked.attn:
        command = [sys.executable, "-m", "training.train", *overrides]
        command += [f"attn={name}", f"run_dir={asked.folder / name}"]
        print(f"attn={name}", flush=True)
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"the run with attn={name} failed; the others are in {asked.folder}")
    curves = {name: read_metrics(asked.folder / name / "metrics.csv") for name in asked.attn}
    results = compare(curves)
    write_csv(results, asked.folder)
    draw(curves, asked.folder / "compare.png")
    Console().print(as_table(results))
    print(f"{asked.folder / 'compare.csv'}, {asked.folder / 'compare.png'}")


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides that go to every run."""
    parser = argparse.ArgumentParser(prog="python -m training.compare", description=__doc__)
    parser.add_argument("--attn", nargs="+", choices=ATTENTIONS, default=["flashtile", "sdpa"])
    parser.add_argument("--folder", type=Path, default=Path("runs/compare"))
    asked, overrides = parser.parse_known_args(arguments)
    for override in overrides:
        if override.startswith("-") or "=" not in override:
            parser.error(f"{override!r} is neither an option nor key=value")
        if override.split("=")[0] in ("attn", "run_dir"):
            parser.error(f"{override!r}: use --attn and --folder")
    return asked, overrides


def compare(curves: dict[str, list[Row]]) -> list[Result]:
    """A result for each run; the first is what the others are measured against."""
    first, *_ = curves.values()
    first_speed = np.nanmedian(column(first, "tokens_per_second"))
    results = []
    for name, rows in curves.items():
        loss, speed = column(rows, "loss"), np.nanmedian(column(rows, "tokens_per_second"))
        shared = {row.step: row.loss for row in first if row.step <= FIRST_STEPS}
        distances = [abs(row.loss - shared[row.step]) for row in rows if row.step in shared]
        results.append(
            Result(
                attn=name,
                final_loss=float(loss[-max(1, len(loss) // 10) :].mean()),
                bits_per_byte=rows[-1].validation_bits_per_byte,
                largest_distance=max(distances, default=float("nan")),
                tokens_per_second=float(speed),
                speed_ratio=float(first_speed / speed),
                mfu=float(np.median(column(rows, "mfu"))),
                peak_memory_mib=max(row.peak_memory_mib for row in rows),
            )
        )
    return results


def write_csv(results: list[Result], folder: Path) -> None:
    """The table for machines, compare.csv: each line with the provenance of its run."""
    lines = []
    for result in results:
        starts = (folder / result.attn / "provenance.jsonl").read_text(encoding="utf-8")
        lines.append(asdict(result) | json.loads(starts.splitlines()[-1]))
    with (folder / "compare.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def as_table(results: list[Result]) -> Table:
    """The table for people."""
    first = results[0].attn
    table = Table(
        title="one seed, several attentions",
        box=SIMPLE_HEAD,
        caption=f"distance: from the loss of {first}, largest of {FIRST_STEPS} steps; "
        f"speed-up: of {first} over this run",
    )
    headings = {
        "attn": "{}",
        "loss": "{:.4f}",
        "bits/byte": "{:.3f}",
        "distance": "{:.1e}",
        "tokens/s": "{:,.0f}",
        "speed-up": "{:.2f}",
        "MFU": "{:.1%}",
        "MiB": "{:,.0f}",
    }
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "attn" else "right", no_wrap=True)
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
        dashes = (0, (4, 2 * number)) if number else "-"  # so that equal curves are all seen
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
    for axes in (left, middle):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
