"""Draws the pictures of README.md and performance.md from the committed measurements.

``python docs/plots.py`` writes docs/_static/NAME-{light,dark}.svg for speed, speed-narrow, memory
and models, and for each preset of `PRESETS` that has been measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from io import StringIO
from itertools import product
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from performance import NAMES, by_case, h200, mask, of_preset

STATIC = Path(__file__).resolve().parent / "_static"
THEMES = {"light": "#24292f", "dark": "#d0d7de"}  # text and axes; the ground is transparent
COLOURS = {
    "flashtile": "#e8590c",
    "flashtile-triton": "#ffa94d",
    "fa2": "#74808d",
    "fa3": "#4dabf7",
    "fa4": "#1c7ed6",
    "cudnn": "#69b34c",
    "sdpa-efficient": "#9775fa",
    "standard": "#c92a55",
}
FASTEST = 4  # ratios above it are drawn there
# Presets with a picture of their own: the column that has a line of panels for each value, and the
# passes.
PRESETS = {
    "fa-readme": ("head_dim", {"both": "forward and backward"}),
    "lecture": ("dtype", {"forward": "forward", "backward": "backward"}),
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


def speed(*, is_narrow: bool = False) -> Figure:
    """Forward and backward next to the other libraries; one below the other for a phone."""
    shape, size = ((2, 1), (4.8, 6.4)) if is_narrow else ((1, 2), (9.6, 3.5))
    figure, grid = plt.subplots(*shape, figsize=size, sharey=True, layout="constrained")
    for axes, direction in zip(grid, ("forward", "backward"), strict=True):
        bars(axes, direction)
        axes.grid(axis="y", alpha=0.25, linewidth=0.7)
        axes.set_axisbelow(True)
    for axes in grid if is_narrow else grid[:1]:
        axes.set_ylabel("TFLOP/s")
    row = h200("dense-128")[0]
    figure.suptitle(f"{row['device']}, {row['dtype']}, head dim 128, causal", fontsize=11)
    handles, labels = grid[0].get_legend_handles_labels()
    columns = 2 if is_narrow else 6
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
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


def against_length(name: str) -> Figure:
    """TFLOP/s of a preset's peers against length: full to the left, causal to the right."""
    column, passes = PRESETS[name]
    rows = of_preset(name)
    kinds = dict.fromkeys(row[column] for row in rows)
    lines = list(product(passes, kinds))
    figure, grid = plt.subplots(
        len(lines),
        2,
        figsize=(7.2, 2.4 * len(lines) + 0.6),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    labelled = {}
    for axes, ((direction, kind), causal) in zip(
        grid.flat, product(lines, ("False", "True")), strict=True
    ):
        panel = (direction, kind, causal)
        here = [row for row in rows if (row["pass"], row[column], row["causal"]) == panel]
        if not here:  # a run that was cut off
            axes.set_visible(False)
            continue
        cases = by_case(here, "tflops", "seqlen_q")
        for peer, colour in COLOURS.items():
            points = [
                (int(length), case[peer]) for (length,), case in cases.items() if peer in case
            ]
            if points:
                (labelled[NAMES[peer]],) = axes.plot(
                    *zip(*points, strict=True), "o-", markersize=3, color=colour
                )
        lengths = [int(length) for (length,) in cases]
        ticks = [length for length in lengths if length.bit_count() == 1]
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [short(length) for length in ticks])
        axes.xaxis.minorticks_off()
        axes.set_ylim(bottom=0)
        named = f"head dim {kind}" if column == "head_dim" else kind
        axes.set_title(f"{passes[direction]}, {named}, {mask(causal)}", fontsize=10)
        axes.grid(alpha=0.25, linewidth=0.7)
    for line in grid:
        line[0].set_ylabel("TFLOP/s")
    figure.suptitle(f"{rows[0]['device']}: speed against length", fontsize=11)
    handles, names = labelled.values(), labelled.keys()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def models() -> Figure:
    """How many times as fast flashtile is as each other library, for each call of a model."""
    cases = by_case(of_preset("models"), "median_ms", "variant", "pass")
    figure, grid = plt.subplots(1, 2, figsize=(7.2, 6.4), sharey=True, layout="constrained")
    names = list(dict.fromkeys(name for name, _ in cases))[::-1]
    for axes, direction in zip(grid, ("forward", "backward"), strict=True):
        for peer, colour in {**COLOURS, "flex": "#f783ac"}.items():
            points = [
                (min(case[peer] / case["flashtile"], FASTEST), place)
                for place, name in enumerate(names)
                if peer in (case := cases[name, direction]) and peer != "flashtile"
            ]
            if points:
                axes.plot(
                    *zip(*points, strict=True), "o", markersize=4, color=colour, label=NAMES[peer]
                )
        axes.axvline(1, color=COLOURS["flashtile"], linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks([0.5, 1, 2, FASTEST], ["0.5", "1", "2", f"≥ {FASTEST}"])
        axes.xaxis.minorticks_off()
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_title(direction, fontsize=11)
        axes.set_xlabel("times as fast as the other library")
        axes.grid(alpha=0.25, linewidth=0.7)
    grid[0].set_ylim(-0.7, len(names) - 0.3)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "speed": speed,
    "speed-narrow": partial(speed, is_narrow=True),
    "memory": memory,
    "models": models,
    **{name: partial(against_length, name) for name in PRESETS},
}


def measured() -> list[str]:
    """The pictures for which there are numbers."""
    return [name for name in PICTURES if name not in PRESETS or of_preset(name)]


def drawn(name: str, theme: str) -> str:
    """One picture as SVG; equal for equal measurements and versions of Matplotlib."""
    ink = THEMES[theme]
    inked = ("text.color", "xtick.color", "ytick.color")
    inked += ("axes.labelcolor", "axes.edgecolor", "axes.titlecolor")
    style: dict[str, object] = dict.fromkeys(inked, ink)
    style |= {"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": name}
    file = StringIO()
    with plt.rc_context(style):
        figure = PICTURES[name]()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


if __name__ == "__main__":
    for name in measured():
        for theme in THEMES:
            (STATIC / f"{name}-{theme}.svg").write_text(drawn(name, theme), encoding="utf-8")
