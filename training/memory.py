"""Peak memory of a training step against the length of the context: a table and a picture.

`python -m training.memory [key=value ...] [--attn flashtile sdpa-math] [--contexts 2048 4096 ...]`
The keys are those of training.train; `experiment=gpt-64k` is made for it. An attention that
ran out of memory is not tried with longer contexts.
"""

from __future__ import annotations

import argparse
import csv
import gc
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import torch
from hydra import compose, initialize_config_dir

from flashtile.cli.machine import provenance

from .metrics import NAN, peak_memory_mib
from .settings import ATTENTIONS, Settings, read_settings
from .train import CONFIG, Run

matplotlib.use("agg")
from matplotlib import pyplot as plt


@dataclass(frozen=True)
class Point:
    """Memory and time of an optimizer step; NaN where the device has not enough memory."""

    attn: str
    context: int  # tokens
    peak_memory_mib: float
    seconds: float


def main(arguments: list[str] | None = None) -> None:
    """Measure, a line for each point; memory.csv and memory.png go to the folder."""
    asked, overrides = parse(sys.argv[1:] if arguments is None else arguments)
    if not torch.cuda.is_available():
        sys.exit("training.memory: there is no CUDA device, whose memory it measures")
    points: list[Point] = []
    for attn in asked.attn:
        for context in asked.contexts:
            point = measure(settings_of(asked.folder, overrides, attn, context))
            points.append(point)
            print(f"{attn}, {context:,} tokens: {point.peak_memory_mib:,.0f} MiB", flush=True)
            if point.peak_memory_mib != point.peak_memory_mib:
                break
    asked.folder.mkdir(parents=True, exist_ok=True)
    write_csv(points, asked.folder / "memory.csv")
    draw(points, asked.folder / "memory.png")
    print(f"{asked.folder / 'memory.csv'}, {asked.folder / 'memory.png'}")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides that go to every run."""
    parser = argparse.ArgumentParser(prog="python -m training.memory", description=__doc__)
    parser.add_argument(
        "--attn",
        nargs="+",
        choices=ATTENTIONS,
        default=["flashtile", "sdpa-math"],
        help="attentions to measure (default: flashtile sdpa-math)",
    )
    parser.add_argument(
        "--contexts",
        nargs="+",
        type=int,
        default=[2**exponent for exponent in range(11, 17)],
        metavar="N",
        help="lengths of the context, in tokens (default: the powers of two from 2048 to 65536)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/memory"),
        metavar="DIR",
        help="folder of the table and the picture (default: %(default)s)",
    )
    asked, overrides = parser.parse_known_args(arguments)
    for override in overrides:
        if override.startswith("-") or "=" not in override:
            parser.error(f"{override!r} is neither an option nor key=value")
        if override.split("=")[0] in ("attn", "data.context", "run_dir"):
            parser.error(f"{override!r}: use --attn, --contexts and --folder")
    return asked, overrides


def settings_of(folder: Path, overrides: list[str], attn: str, context: int) -> Settings:
    """The configuration of one point."""
    point = [f"attn={attn}", f"data.context={context}", f"run_dir={folder}"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG)):
        return read_settings(compose("config", overrides=[*overrides, *point]))


def measure(settings: Settings) -> Point:
    """Run two steps. The first allocates the optimizer's state; the second is timed."""
    gc.collect()  # frees the memory of earlier runs
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    seconds = memory = NAN
    try:
        run = Run(settings)
        for _ in range(2):
            began = time.perf_counter()
            run.train_step()[0].item()  # waits for the device
            seconds = time.perf_counter() - began
        memory = peak_memory_mib(run.fabric.device)
    except torch.OutOfMemoryError:
        seconds = NAN
    return Point(settings.attn, settings.data.context, memory, seconds)


def write_csv(points: list[Point], path: Path) -> None:
    """Write the table as CSV, each line with machine, versions and command."""
    command = shlex.join(["python", "-m", "training.memory", *sys.argv[1:]])
    where = provenance("cuda" if torch.cuda.is_available() else "cpu", command)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*asdict(points[0]), *where])
        writer.writeheader()
        writer.writerows(asdict(point) | where for point in points)


def draw(points: list[Point], path: Path) -> None:
    """Draw memory against context; the line of an attention ends where memory runs out."""
    figure, axes = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    for number, attn in enumerate(dict.fromkeys(point.attn for point in points)):
        own = [point for point in points if point.attn == attn]
        fits = [point for point in own if point.peak_memory_mib == point.peak_memory_mib]
        x, y = [p.context for p in fits], [p.peak_memory_mib / 1024 for p in fits]
        end = f", out of memory at {own[-1].context:,}" if len(fits) < len(own) else ""
        axes.plot(x, y, "o-", color=f"C{number}", label=attn + end)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="context (tokens)", ylabel="peak memory of a training step (GiB)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
