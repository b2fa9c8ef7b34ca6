"""A picture of the efficiencies of a CSV file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .rows import read

COLOURS = {
    "flashtile": "#0072b2",
    "flashtile-gather": "#56b4e9",
    "flashtile-ulysses": "#009e73",
    "zigzag-ring": "#d55e00",
    "torch-cudnn": "#e69f00",
    "torch-flash": "#cc79a7",
}
TITLES = {"forward": "forward", "both": "forward + backward"}


def draw(path: Path, target: Path) -> Path:
    """Bars of the efficiency of every peer, a panel for each pass.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in read(path) if row["efficiency"] and row["peer"] in COLOURS]
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    subjects = list(dict.fromkeys(map(_subject, rows)))
    peers = [peer for peer in COLOURS if any(row["peer"] == peer for row in rows)]
    axes = figure.subplots(len(TITLES), 1, sharex=True)
    for axis, (direction, title) in zip(axes, TITLES.items(), strict=True):
        found = {
            (_subject(row), row["peer"]): float(row["efficiency"])
            for row in rows
            if row["direction"] == direction
        }
        _bars(axis, subjects, peers, found)
        axis.set_title(title, fontsize=10)
        axis.set_ylabel("efficiency")
    axes[-1].set_xticks(range(len(subjects)), subjects, fontsize=8)
    first = rows[0]
    origin = ", ".join(
        [first["device"], first["process_group"], f"torch {first['torch']}", first["date"]]
    )
    figure.suptitle(
        f"{first['ranks']} ranks, calls in a row: one process / (ranks x slowest rank)\n{origin}",
        fontsize=11,
    )
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(peers), fontsize=9)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)
    return target


def _bars(
    axis: Any, subjects: list[str], peers: list[str], found: dict[tuple[str, str], float]
) -> None:
    width = 0.84 / len(peers)
    for i, peer in enumerate(peers):
        known = [(x, found[s, peer]) for x, s in enumerate(subjects) if (s, peer) in found]
        centres = [x + (i - (len(peers) - 1) / 2) * width for x, _ in known]
        bars = axis.bar(centres, [y for _, y in known], 0.92 * width, color=COLOURS[peer])
        bars.set_label(peer)
        axis.bar_label(bars, fmt="%.2f", fontsize=7)
    axis.axhline(1.0, color="0.4", linewidth=1)
    axis.set_ylim(0, max(1.1, axis.get_ylim()[1]))  # labels of bars below 1 have room
    axis.grid(axis="y", alpha=0.3)


def _subject(row: dict[str, str]) -> str:
    """A case in three lines."""
    what = {"window": f"window {row['window']}", "packed": f"{row['documents']} documents"}
    heads = f"{row['heads_q']}:{row['heads_kv']} heads of {row['head_dim']}"
    return f"{what.get(row['variant'], 'causal')}\n{heads}\n{row['tokens']} tokens a rank"
