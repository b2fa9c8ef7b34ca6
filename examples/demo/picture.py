"""The demo's picture: what is equal, and how time and memory grow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.plots import COLOURS
from benchmarks.rows import read_csv
from flashtile.cli.machine import device_name

from . import layer, model_checks

if TYPE_CHECKING:
    from .show import Results

LABELS = {"standard": "standard", "sdpa": "PyTorch SDPA", "flashtile": "flashtile"}
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "memory.csv"
GPU_TOKENS = 16384
GPU_LABELS = {"standard": "standard", "fa2": "SDPA\n(FlashAttention-2)", "flashtile": "flashtile"}
MARKS = {"standard": "s", "sdpa": "^", "flashtile": "o"}


def draw(path: Path, results: Results) -> None:
    """Write a PNG of the four checks to `path`."""
    figure = Figure(figsize=(18, 8.4), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = cast(Any, figure.subfigures(2, 1, height_ratios=(1.15, 1)))
    axes = top.subplots(1, 4)
    for column, direction in enumerate(layer.PASSES):
        _draw_memory(axes[column], results.layers, direction)
        _draw_time(axes[2 + column], results.layers, direction)
    handles, labels = axes[0].get_legend_handles_labels()
    top.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    top.suptitle(
        "One attention layer of SmolLM2-135M (heads 9:3, head dim 64, causal, "
        f"{str(results.layers.dtype).removeprefix('torch.')}) on {device_name(results.device)}",
        fontsize=12,
    )
    axes = bottom.subplots(1, 4)
    _draw_loss(axes[0], results.loss)
    _draw_continuation(axes[1], results)
    _draw_packed(axes[2], results.packed)
    _draw_gpu(axes[3])
    figure.savefig(path, dpi=110)


def _draw_memory(axis: Any, layers: layer.Layers, direction: str) -> None:
    for name in layer.LAYERS:
        rows = layers.column(name, direction)
        peaks = [row.peak_mib for row in rows]
        axis.plot([row.length for row in rows], peaks, **_style(name))
    _draw_guides(axis, layers, direction)
    _dress(axis, layers, f"peak memory, MiB\n{direction}")


def _draw_time(axis: Any, layers: layer.Layers, direction: str) -> None:
    for name in layer.LAYERS:
        rows = layers.column(name, direction)
        axis.plot([row.length for row in rows], [row.milliseconds for row in rows], **_style(name))
    _dress(axis, layers, f"time, ms\n{direction}")


def _style(name: str) -> dict[str, Any]:
    return {"label": LABELS[name], "color": COLOURS[name], "marker": MARKS[name], "linewidth": 2}


def _draw_guides(axis: Any, layers: layer.Layers, direction: str) -> None:
    """Draw quadratic and linear growth on these axes, and the gap between them."""
    last = {name: layers.column(name, direction)[-1] for name in ("standard", "flashtile")}
    lengths = [row.length for row in layers.column("flashtile", direction)]
    for name, power, label in (("standard", 2, "length²"), ("flashtile", 1, "length")):
        peak = cast(float, last[name].peak_mib)
        guide = [peak * (length / last[name].length) ** power for length in lengths]
        axis.plot(lengths, guide, ":", color="black", linewidth=1, zorder=0)
        middle = (lengths[-2] * lengths[-1]) ** 0.5
        height = peak * (middle / last[name].length) ** power
        axis.annotate(
            f"grows as {label}",
            (middle, height),
            xytext=(-6, 8),
            textcoords="offset points",
            ha="right",
            fontsize=9,
        )
    high, low = (cast(float, last[name].peak_mib) for name in ("standard", "flashtile"))
    if last["standard"].length == last["flashtile"].length:
        ends = {"xy": (lengths[-1], low * 1.3), "xytext": (lengths[-1], high / 1.3)}
        axis.annotate("", **ends, arrowprops={"arrowstyle": "<->", "color": "black"})
        axis.text(lengths[-1] / 1.08, (high * low) ** 0.5, f"{high / low:.0f}x", ha="right")


def _dress(axis: Any, layers: layer.Layers, title: str) -> None:
    lengths = sorted({row.length for row in layers.rows})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.xaxis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.set_xlabel("tokens")
    axis.set_title(title, fontsize=11)
    axis.grid(alpha=0.3)


def _draw_loss(axis: Any, loss: model_checks.Loss) -> None:
    """Plot every token's loss with two implementations; equal losses are on the diagonal."""
    reference, *_, ours = loss.per_token
    x, y = loss.per_token[reference].numpy(), loss.per_token[ours].numpy()
    limit = max(x.max(), y.max())
    axis.plot([0, limit], [0, limit], color="black", linewidth=0.8, zorder=0)
    axis.scatter(x, y, s=9, alpha=0.5, color=COLOURS["flashtile"], linewidths=0)
    axis.set_aspect("equal")
    axis.set_xlabel("loss of a token in nats, standard attention")
    axis.set_ylabel("loss of a token in nats, flashtile")
    means = loss.mean
    axis.set_title(
        f"Reading {len(x) + 1:,} tokens of Hamlet: loss\n"
        f"{means[reference]:.6f} standard, {means[ours]:.6f} flashtile",
        fontsize=11,
    )
    axis.grid(alpha=0.3)


def _draw_continuation(axis: Any, results: Results) -> None:
    axis.axis("off")
    same = "all three write the same tokens" if results.continuation.passed else "the tokens DIFFER"
    axis.set_title(f"Greedy generation with the key-value cache:\n{same}", fontsize=11)
    axis.text(0.02, 0.94, f"... {results.prompt}", color="gray", **_prose(axis))
    axis.text(
        0.02, 0.86, "\n".join(results.continuation_text.strip().splitlines()[:9]), **_prose(axis)
    )


def _prose(axis: Any) -> dict[str, Any]:
    return {
        "va": "top",
        "family": "serif",
        "style": "italic",
        "fontsize": 11,
        "parse_math": False,
        "wrap": True,
        "transform": axis.transAxes,
    }


def _draw_packed(axis: Any, packed: model_checks.Packed) -> None:
    """The time of each implementation, with the number of tokens that it computes."""
    rows = []
    for way, seconds in packed.seconds.items():
        computed = packed.real if way == model_checks.PACKED_ROW else packed.padded
        label = f"{way.replace('eager', 'standard')}\n{computed:,} tokens"
        rows.append((label, seconds, "standard" if "eager" in way else "flashtile"))
    _draw_bars(axis, rows, "s")
    worst = max(packed.differences.values())
    axis.set_title(
        f"A batch of {len(packed.lengths)} speeches, {packed.real:,} tokens without padding:\n"
        f"the logits differ by {worst:.0e}",
        fontsize=11,
    )


def _draw_gpu(axis: Any) -> None:
    """What was measured on a GPU, whatever this machine has."""
    found = {
        row.provider: (row, origin)
        for row, origin in read_csv(MEASURED)
        if row.provider in GPU_LABELS and row.seqlen_q == GPU_TOKENS
    }
    rows = [
        (
            f"{label}\n{found[name][0].peak_mib:,.0f} MiB",
            cast(float, found[name][0].median_ms),
            name,
        )
        for name, label in GPU_LABELS.items()
    ]
    _draw_bars(axis, rows, "ms")
    _, origin = found["flashtile"]
    axis.set_title(
        f"Measured on an {origin['device']}, {origin['date']}:\n"
        f"{GPU_TOKENS:,} tokens, forward + backward",
        fontsize=11,
    )


def _draw_bars(axis: Any, rows: list[tuple[str, float, str]], unit: str) -> None:
    """A bar for each (label, time in `unit`, name of its colour), from top to bottom."""
    labels, times, names = zip(*reversed(rows), strict=True)
    bars = axis.barh(labels, times, color=[COLOURS[name] for name in names])
    axis.bar_label(bars, [f"{time:.3g} {unit}" for time in times], padding=3)
    axis.set_xlim(right=1.25 * max(times))
    axis.set_xlabel(f"time, {unit}")
    axis.grid(axis="x", alpha=0.3)
