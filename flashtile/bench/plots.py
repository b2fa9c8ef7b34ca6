"""Pictures of a measurement: speed, time and memory against length."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from .report import Provenance, Row

# One colour a peer in every picture, whoever else is in it; chosen to differ for the colour-blind.
COLOURS = {
    "flashtile": "#0072b2",
    "sdpa": "#d55e00",
    "sdpa-flash": "#d55e00",
    "sdpa-cudnn": "#e69f00",
    "sdpa-efficient": "#8c564b",
    "sdpa-math": "#cc79a7",
    "standard": "#7f7f7f",
    "flex": "#009e73",
    "fa2": "#56b4e9",
    "fa3": "#000000",
    "fa4": "#882255",
}
DASHES = {"math": ":", "efficient": "-.", "cudnn": "--", "triton": "--"}
PANELS = (
    ("tflops", "TFLOP/s", "linear"),
    ("gbps", "GB/s of cache read", "linear"),
    ("median_ms", "time, ms", "log"),
    ("peak_mib", "peak memory above inputs, MiB", "log"),
)


def draw(folder: Path, rows: Sequence[Row], provenance: Provenance) -> list[Path]:
    """A PNG for each function, mask, dtype and head dim; returns the files.

    Raises:
        ImportError: matplotlib is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    measured = sorted((row for row in rows if not row.skipped), key=_subject)
    return [
        _draw_one(folder, list(group), provenance) for _, group in groupby(measured, key=_subject)
    ]


def _subject(row: Row) -> tuple[str, bool, str, int, int, int, int]:
    heads = (row.heads_q, row.heads_kv, row.batch)
    return (row.variant, row.causal, row.dtype, row.head_dim, *heads)


def _draw_one(folder: Path, rows: list[Row], provenance: Provenance) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first = rows[0]
    directions = list(dict.fromkeys(row.direction for row in rows))
    panels = [p for p in PANELS if any(getattr(row, p[0]) is not None for row in rows)]
    figure = Figure(figsize=(4.4 * len(panels), 3.4 * len(directions) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(directions), len(panels), squeeze=False)
    for direction, axes in zip(directions, grid, strict=True):
        here = [row for row in rows if row.direction == direction]
        for (column, label, scale), axis in zip(panels, axes, strict=True):
            axis.set_title("forward + backward" if _with_forward(column, direction) else direction)
            _draw_lines(axis, here, column)
            _dress(axis, sorted({row.seqlen_k for row in here}), label, scale)
    handles = {line.get_label(): line for axis in grid.flat for line in axis.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6)
    mask = ", causal" if first.causal else ""
    figure.suptitle(
        f"{first.variant} attention{mask}, {first.dtype}, batch {first.batch}, "
        f"heads {first.heads_q}:{first.heads_kv}, head dim {first.head_dim}\n"
        f"{provenance['device']}, torch {provenance['torch']}, {provenance['date']}",
        fontsize=11,
    )
    parts = [first.variant, "causal" if first.causal else "full", first.dtype]
    sizes = f"b{first.batch}-h{first.heads_q}-{first.heads_kv}-d{first.head_dim}"
    path = folder / ("-".join([*parts, sizes]) + ".png")
    figure.savefig(path, dpi=130)
    return path


def _with_forward(column: str, direction: str) -> bool:
    return column == "peak_mib" and direction == "backward"


def _draw_lines(axis: Any, rows: list[Row], column: str) -> None:
    for peer in dict.fromkeys(row.peer for row in rows):
        points = [row for row in rows if row.peer == peer and getattr(row, column) is not None]
        points.sort(key=lambda row: row.seqlen_k)
        lengths = [row.seqlen_k for row in points]
        style = {
            "color": COLOURS.get(peer, COLOURS.get(points[0].provider)),
            "linestyle": DASHES.get(points[0].backend, "-"),
        }
        axis.plot(lengths, [getattr(row, column) for row in points], "o", label=peer, **style)
        if column == "median_ms":
            low, high = [row.p20_ms for row in points], [row.p80_ms for row in points]
            axis.fill_between(lengths, low, high, color=style["color"], alpha=0.2, linewidth=0)


def _dress(axis: Any, lengths: list[int], label: str, scale: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_xscale("log", base=2)
    axis.set_yscale(scale)
    if scale == "linear":
        axis.set_ylim(bottom=0)
    axis.set_xticks(lengths, [str(n) for n in lengths])
    axis.xaxis.minorticks_off()
    if scale == "log":
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("sequence length, tokens")
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)
