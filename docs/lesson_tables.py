"""The tables of lesson 8, from the measurements that are committed; `performance.py` writes them.

Until they exist, a sentence in their place says so.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from generated import markdown_table

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "h200" / "lesson"

# TFLOP/s of the same schedules in table 2 of the FlashAttention-3 paper, on an H100.
PAPER = {"everything": 661, "no overlap in a warpgroup": 582, "no roles": 570}
LINES = {
    "everything": "everything",
    "no ping-pong": "no ping-pong",
    "no overlap in a warpgroup": "no overlap in a warpgroup",
    "neither": "neither of the two",
    "no roles": "no roles, so no ping-pong",
    "nothing": "no roles, no overlap",
    "flashtile": "flashtile's own kernel",
    "cuDNN": "cuDNN",
}


def ablation(folder: Path = FOLDER) -> str:
    """TFLOP/s of every schedule, next to the paper's."""
    rows: dict[str, dict[str, str]] = {}
    if (path := folder / "ablation.csv").exists():
        with path.open(encoding="utf-8") as file:
            rows = {row["schedule"]: row for row in csv.DictReader(file)}
    measured = {name: float(row["tflops"]) for name, row in rows.items()}
    table = markdown_table(
        ["schedule", "TFLOP/s", "of everything", "the paper's", "of everything"],
        [[title, *pair(measured, name), *pair(PAPER, name)] for name, title in LINES.items()],
    )
    if not rows:
        return f"**Not measured yet**: the first two columns wait for an H200.\n\n{table}"
    row = next(iter(rows.values()))
    versions = f"torch {row['torch']}, Triton {row['triton']}, commit {row['commit']}"
    return f"Ours: {row['device']}, {versions}, {row['date']}, medians.\n\n{table}"


def pair(speeds: dict[str, float] | dict[str, int], name: str) -> list[str]:
    """A speed, and its part of that of the first schedule."""
    if name not in speeds:
        return ["–", "–"]
    return [f"{speeds[name]:.0f}", f"{speeds[name] / speeds['everything']:.2f}"]


def timeline(folder: Path = FOLDER) -> str:
    """The picture, and the median cycles of every stage of a consumer."""
    path = folder / "timeline.json"
    if not path.exists():
        return "**Not measured yet**: the picture and the cycles of each stage wait for an H200."
    trace = json.loads(path.read_text(encoding="utf-8"))
    pictures = "\n\n".join(
        f"```{{image}} ../figures/hopper_timeline_{theme}.png\n:class: only-{theme}\n"
        ":alt: What the producer and both consumers do during four steps, by schedule\n```"
        for theme in ("light", "dark")
    )
    rows = [
        [LINES[name], *(f"{cycles:,.0f}" for cycles in found["stages"].values())]
        for name, found in trace["schedules"].items()
    ]
    header = ["K", "turn", "issue", "S", "softmax", "O", "step"]
    return f"{pictures}\n\n{markdown_table(['median cycles', *header], rows)}"
