"""Draws the pictures of README.md and performance.md from the committed measurements.

``python docs/plots.py`` writes docs/_static/{speed,memory}-{light,dark}.svg.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from performance import NAMES, by_case, h200

STATIC = Path(__file__).resolve().parent / "_static"
THEMES = {"light": "#24292f", "dark": "#d0d7de"}  # text and axes; the ground is transparent
COLOURS = {
    "flashtile": "#e8590c",
    "flashtile-triton": "#ffa94d",
    "fa2": "#74808d",
    "fa3": "#4dabf7",
    "fa4": "#1c7ed6",
    "cudnn": "#69b34c",
    "standard": "#c92a55",
}


def bars(axes: Axes, direction: str) -> None:
    """TFLOP/s by length: head dim 128, causal."""
    rows = [
        row for row in h200("dense-128") if row["pass"] == direction and row["causal"] == "True"
    ]
    cases = by_case(rows, "tflops", "seqlen_q")
    peers = [peer for peer in COLOURS if any(peer in case for case in cases.values())]
    width = 0.84 / len(peers)
    for i, peer in enumerate(peers):
        positions = [x + (i - (len(peers) - 1) / 2) * width for x in range(len(cases))]
        heights = [case.get(peer, 0) for case in cases.values()]
        axes.bar(positions, heights, 0.9 * width, color=COLOURS[peer], label=NAMES[peer])
    lengths = [int(length) for (length,) in cases]
    axes.set_xticks(range(len(cases)), [short(length) for length in lengths])
    axes.set_title(direction, fontsize=11)
    axes.set_xlabel("sequence length")


def short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)


def speed() -> Figure:
    """Forward and backward next to the other libraries."""
    figure, grid = plt.subplots(1, 2, figsize=(9.6, 3.5), sharey=True, layout="constrained")
    for axes, direction in zip(grid, ("forward", "backward"), strict=True):
        bars(axes, direction)
        axes.grid(axis="y", alpha=0.25, linewidth=0.7)
        axes.set_axisbelow(True)
    grid[0].set_ylabel("TFLOP/s")
    row = h200("dense-128")[0]
    figure.suptitle(f"{row['device']}, {row['dtype']}, head dim 128, causal", fontsize=11)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return figure


def memory() -> Figure:
    """Memory of a forward with its backward, by length."""
    figure, axes = plt.subplots(figsize=(5.6, 3.5), layout="constrained")
    cases = by_case(h200("memory"), "peak_mib", "seqlen_q")
    for peer in ("standard", "fa2", "flashtile", "flashtile-triton"):
        points = [(int(length), case[peer]) for (length,), case in cases.items() if peer in case]
        colour, label = COLOURS[peer], NAMES[peer]
        axes.plot(*zip(*points, strict=True), "o-", markersize=4, color=colour, label=label)
    lengths = [int(length) for (length,) in cases]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [short(length) for length in lengths])
    axes.set_yticks([16, 256, 4096, 65536], ["16 MiB", "256 MiB", "4 GiB", "64 GiB"])
    axes.set_xlabel("sequence length")
    axes.set_title("memory above the inputs, forward and backward", fontsize=11)
    axes.grid(alpha=0.25, linewidth=0.7)
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    return figure


def drawn(name: str, theme: str) -> str:
    """One picture as SVG; equal for equal measurements and versions of Matplotlib."""
    ink = THEMES[theme]
    inked = ("text.color", "xtick.color", "ytick.color")
    inked += ("axes.labelcolor", "axes.edgecolor", "axes.titlecolor")
    style: dict[str, object] = dict.fromkeys(inked, ink)
    style |= {"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": name}
    file = StringIO()
    with plt.rc_context(style):
        figure = {"speed": speed, "memory": memory}[name]()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


if __name__ == "__main__":
    for name in ("speed", "memory"):
        for theme in THEMES:
            (STATIC / f"{name}-{theme}.svg").write_text(drawn(name, theme), encoding="utf-8")
