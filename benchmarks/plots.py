"""Pictures of a run: speed and memory against length, speed against density, drawn shapes,
masks next to FlexAttention, calls of models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from .rows import Provenance, Row, faster_than_full, is_ours, with_backend

# A peer has the same colour in every picture; colour-blind people can tell the colours apart.
COLOURS = {
    "flashtile": "#0072b2",
    "flashtile-triton": "#56b4e9",
    "flashtile-deterministic": "#009e73",
    "flashtile-float8": "#d55e00",
    "flashtile-float8-head": "#e69f00",
    "flashtile-function": "#d55e00",
    "flashtile-spans": "#e69f00",
    "sdpa": "#d55e00",
    "sdpa-flash": "#d55e00",
    "sdpa-efficient": "#8c564b",
    "sdpa-math": "#cc79a7",
    "standard": "#7f7f7f",
    "flex": "#009e73",
    "cudnn": "#e69f00",
    "fa2": "#d55e00",
    "fa2-package": "#f0e442",
    "fa3": "#000000",
    "fa4": "#882255",
}
MARKERS = {
    "flashtile": "o",
    "flashtile-triton": "o",
    "flashtile-float8": "o",
    "flashtile-float8-head": "o",
    "flashtile-function": "s",
    "flashtile-spans": "D",
    "fa2": "s",
    "cudnn": "^",
    "fa3": "D",
    "fa4": "v",
    "flex": "P",
}
DASHES = {"math": ":", "efficient": "-.", "triton": "--", "deterministic": ":"}  # after the hyphen
Panel = tuple[bool, tuple[int, int, int]]  # causal; head dim, heads, key heads


def draw(folder: Path, rows: Sequence[Row], provenance: Provenance) -> list[Path]:
    """Draw the PNGs for which there are enough rows; returns the files.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib.figure  # noqa: F401  # fails here, not half-way

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    ordered = sorted(rows, key=_series)
    for _, group in groupby(ordered, key=_series):
        series = list(group)
        if series[0].seed:  # drawn shapes have no common sizes: see below
            continue
        for name, picture in PICTURES.items():
            if figure := picture(series, provenance):
                paths.append(_save(folder, name, series[0], figure))
    for direction in dict.fromkeys(row.direction for row in rows):
        if figure := _models([row for row in rows if row.direction == direction], provenance):
            paths.append(_save(folder, f"models-{direction}", None, figure))
    for _, group in groupby(ordered, key=lambda row: (row.preset, row.dtype, row.direction)):
        series = list(group)
        if figure := _density(series, provenance):
            paths.append(_save(folder, "density", series[0], figure))
        if figure := _drawn(series, provenance):
            paths.append(_save(folder, "drawn", series[0], figure))
        if figure := _next_to_flex(series, provenance):
            paths.append(_save(folder, "flex", series[0], figure))
    return paths


def _series(row: Row) -> tuple[object, ...]:
    """Rows of one picture. A preset groups its batches; otherwise each has its own picture."""
    return (row.preset, row.dtype, row.direction, row.variant, 0 if row.preset else row.batch)


def _save(folder: Path, name: str, row: Row | None, figure: Any) -> Path:
    parts = [name] if row is None else [name, row.preset, row.direction, row.dtype]
    if row is not None and name not in ("density", "drawn", "flex"):
        parts += [row.variant, "" if row.preset else f"b{row.batch}"]
    path = folder / (re.sub(r"[^\w.]+", "-", "-".join(filter(None, parts))) + ".png")
    figure.savefig(path, dpi=130)
    return path


def _speed(rows: list[Row], provenance: Provenance) -> Any:
    """Panels of speed against length: a column each head dim, a row each mask."""
    measured = _with_lengths([row for row in rows if row.tflops is not None])
    if not measured:
        return None
    cached = all(row.gbps is not None for row in measured)
    label = "GB/s of cache read" if cached else "TFLOP/s"
    figure, grid = _panels(measured, f"{_named(measured[0])}: speed against length", provenance)
    for panel, axis in grid:
        here = [row for row in measured if _panel(row) == panel]
        _lines(axis, here, _length, lambda row: row.gbps if cached else row.tflops)
        best = max((_best(row) for row in here), default=0.0)
        if 0 < best < 3 * max(row.gbps or row.tflops or 0.0 for row in measured):
            name = "one large sum" if cached else f"{measured[0].dtype} matrix product 8192³"
            axis.axhline(best, color="0.6", linewidth=1, label=name)
        _dress(axis, label, measured)
    _from_zero(grid)
    return _with_legend(figure, grid)


def _host(rows: list[Row], provenance: Provenance) -> Any:
    """Panels of the host's time of a call against length."""
    measured = _with_lengths([row for row in rows if row.host_us is not None])
    if not measured:
        return None
    title = f"{_named(measured[0])}: the host's time of a call"
    figure, grid = _panels(measured, title, provenance)
    for panel, axis in grid:
        here = [row for row in measured if _panel(row) == panel]
        _lines(axis, here, _length, lambda row: row.host_us)
        _dress(axis, "host time of an eager call, µs", measured)
    _from_zero(grid)
    return _with_legend(figure, grid)


def _best(row: Row) -> float:
    """The GPU's peak in the row's run, in the row's unit; 0 if not measured."""
    value, percent = row.tflops, row.percent_of_matmul
    if row.gbps is not None:
        value, percent = row.gbps, row.percent_of_read
    return 100 * (value or 0) / percent if percent else 0.0


def _memory(rows: list[Row], provenance: Provenance) -> Any:
    """Panels of peak memory against length, both logarithmic; where a peer failed it says why.

    A peak of 0 is left out: results count, so other memory was freed meanwhile.
    """
    measured = _with_lengths([row for row in rows if row.peak_mib])
    if not measured or len({row.batch for row in measured}) > 1:
        return None
    passes = "forward" if rows[0].direction in ("forward", "decode") else "forward and backward"
    title = f"{_named(measured[0])}: peak memory of {passes} against length"
    figure, grid = _panels(measured, title, provenance, width=6.4)
    for panel, axis in grid:
        here = [row for row in measured if _panel(row) == panel]
        _lines(axis, here, _length, lambda row: row.peak_mib)
        failed = [row for row in rows if row.skipped and _panel(row) == panel]
        for height, text in enumerate(_failures(failed)):
            position = {"xy": (0.02, 0.96 - 0.05 * height), "xycoords": "axes fraction"}
            axis.annotate(text, **position, va="top", fontsize=8, color="0.3")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        low, high = axis.get_ylim()
        axis.set_ylim(low, high * 4 if failed else high)
        _dress(axis, "peak memory above the inputs, MiB", rows)
    return _with_legend(figure, grid)


PICTURES = {"speed": _speed, "host": _host, "memory": _memory}  # of one series against length


def _failures(rows: list[Row]) -> Iterator[str]:
    """A line for each missing point, with the reason."""
    for row in sorted(rows, key=lambda row: (row.peer, row.seqlen_k)):
        reason = row.skipped if len(row.skipped) < 60 else row.skipped[:57] + "..."
        yield f"no {row.peer} at {row.seqlen_k:,}: {reason}"


def _density(rows: list[Row], provenance: Provenance) -> Any:
    """Panels of speed-up over full attention against the share of the scores that is left."""
    speed_ups = faster_than_full(rows)
    if not speed_ups:
        return None
    measured = list(speed_ups)
    head = f"{rows[0].direction}, {rows[0].dtype}, {measured[0].seqlen_k:,} tokens"
    title = f"{head}: speed against the share of scores left"
    figure, grid = _panels(measured, title, provenance, width=6.4, by_mask=False)
    for panel, axis in grid:
        here = [row for row in measured if _panel(row)[1] == panel[1]]
        masks = [row for row in here if row.causal]  # causality and windows, a point each
        _lines(axis, [row for row in here if not row.causal], _percent, speed_ups.get)
        for row in masks:
            axis.plot(_percent(row), speed_ups[row], **_style(row), fillstyle="none")
        for name, named in groupby(masks, key=lambda row: row.variant):
            top = max(named, key=lambda row: speed_ups[row])
            point = (_percent(top), speed_ups[top])
            text = "causal" if name == "dense" else name
            axis.annotate(text, point, (7, 5), textcoords="offset points", fontsize=9)
        ends = sorted({100.0, *map(_percent, here)})
        ideal = [100 / end for end in ends]
        axis.plot(ends, ideal, color="0.6", linestyle=":", label="ideal: time as scores")
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        _dress(axis, "times as fast as full attention")
        _ticks(axis, {share: f"{share:g}" for share in (6.25, 12.5, 25, 50, 100)})
        axis.set_xlabel("scores left by the mask, % of full attention")
    return _with_legend(figure, grid)


def _drawn(rows: list[Row], provenance: Provenance) -> Any:
    """How many times as fast as each peer flashtile is in each drawn shape, the worst first."""
    times: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        if row.seed and row.median_ms:
            times.setdefault((row.seed, row.index), {})[row.peer] = row.median_ms
    ratios = [
        {peer: ms / found["flashtile"] for peer, ms in found.items() if not is_ours(peer)}
        for found in times.values()
        if "flashtile" in found
    ]
    ordered = sorted(filter(None, ratios), key=lambda ratio: min(ratio.values()))
    if not ordered:
        return None
    title = f"drawn shapes, {rows[0].direction}, {rows[0].dtype}: flashtile against each library"
    figure, [(_, axis)] = _panels(rows[:1], title, provenance, width=9.0, by_mask=False)
    seeds = sorted({seed for seed, _ in times})
    named = f"seed{'s' * (len(seeds) > 1)} {' and '.join(map(str, seeds))}"
    axis.set_title(f"{len(ordered)} shapes, {named}", fontsize=10)
    for peer in sorted({peer for ratio in ordered for peer in ratio}):
        points = [
            (n, min(max(ratio[peer], 0.25), 4.0))
            for n, ratio in enumerate(ordered, 1)
            if peer in ratio
        ]
        style = {"color": COLOURS.get(peer), "marker": MARKERS.get(peer, "x"), "markersize": 5}
        axis.plot(*zip(*points, strict=True), label=peer, linestyle="", **style)
    axis.axhline(1.0, color="0.4", linewidth=1, label="equally fast")
    axis.set_yscale("log", base=2)
    ticks = {0.25: "≤ 0.25", 0.5: "0.5", 0.8: "0.8", 1: "1", 1.25: "1.25", 2: "2", 4: "≥ 4"}
    axis.set_ylim(0.22, 4.6)
    axis.set_yticks(list(ticks), list(ticks.values()))
    axis.yaxis.minorticks_off()
    axis.set_xlabel("shapes, the worst for flashtile first")
    axis.set_ylabel("times as fast as the library")
    axis.grid(alpha=0.3)
    return _with_legend(figure, [(_panel(rows[0]), axis)])


def _models(rows: list[Row], provenance: Provenance) -> Any:
    """The speedup of flashtile over each library for each call, with the worst call at the
    bottom."""
    measured = [row for row in rows if row.preset == "gpu-models" and row.median_ms]
    ours = {row.variant: row.median_ms for row in measured if row.peer == "flashtile"}
    ratios: dict[str, dict[str, float]] = {}
    for row in measured:
        if not is_ours(row.peer) and (mine := ours.get(row.variant)) and row.median_ms:
            ratios.setdefault(row.variant, {})[row.peer] = row.median_ms / mine
    if not ratios:
        return None
    names = sorted(ratios, key=lambda name: min(ratios[name].values()))
    title = f"attention calls of models, {measured[0].direction}: flashtile against each library"
    figure, [(panel, axis)] = _panels(measured[:1], title, provenance, width=9.0, by_mask=False)
    figure.set_figheight(2.0 + 0.24 * len(names))
    axis.set_title(f"{len(names)} calls", fontsize=10)
    for peer in sorted({row.peer for row in measured if not is_ours(row.peer)}):
        points = [
            (min(r[peer], 4.0), n) for n, r in enumerate(map(ratios.get, names)) if r and peer in r
        ]
        style = {"color": COLOURS.get(peer), "marker": MARKERS.get(peer, "x")}
        if points:
            axis.plot(*zip(*points, strict=True), label=peer, linestyle="", **style)
    axis.axvline(1.0, color="0.4", linewidth=1, label="equally fast")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xscale("log", base=2)
    ticks = {0.25: "0.25", 0.5: "0.5", 0.8: "0.8", 1: "1", 1.25: "1.25", 2: "2", 4: "≥ 4"}
    axis.set_xticks(list(ticks), list(ticks.values()))
    axis.xaxis.minorticks_off()
    axis.set_xlabel("times as fast as the library")
    axis.grid(alpha=0.3)
    return _with_legend(figure, [(panel, axis)])


def _next_to_flex(rows: list[Row], provenance: Provenance) -> Any:
    """How many times as fast as FlexAttention each way to write a mask or function is."""
    flex = {row.subject: row.median_ms for row in rows if row.peer == "flex"}
    ratios = {
        row: base / row.median_ms
        for row in rows
        if is_ours(row.peer) and row.median_ms and (base := flex.get(row.subject))
    }
    if not ratios or rows[0].preset != "gpu-masks":
        return None
    names = list(dict.fromkeys(row.variant for row in sorted(ratios, key=lambda row: row.index)))
    title = f"masks and score functions, {rows[0].direction}, {rows[0].dtype}"
    shown = [replace(row, causal=False) for row in ratios]
    figure, grid = _panels(shown, title, provenance, width=6.4, by_mask=False)
    for panel, axis in grid:
        here = [row for row in ratios if _panel(row)[1] == panel[1]]
        for peer in dict.fromkeys(row.peer for row in here):
            points = [(ratios[row], names.index(row.variant)) for row in here if row.peer == peer]
            style = {"color": COLOURS.get(peer), "marker": MARKERS.get(peer, "x")}
            axis.plot(*zip(*points, strict=True), label=peer, linestyle="", **style)
        axis.axvline(1.0, color="0.4", linewidth=1, label="as fast as FlexAttention")
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set_xlim(left=0)
        axis.set_xlabel("times as fast as FlexAttention")
        axis.grid(alpha=0.3)
    return _with_legend(figure, grid)


def _length(row: Row) -> float:
    return row.seqlen_k


def _percent(row: Row) -> float:
    return 100 * (row.density or 1)


def _panel(row: Row) -> Panel:
    return row.causal, (row.head_dim, row.heads_q, row.heads_kv)


def _with_lengths(rows: list[Row]) -> list[Row]:
    """The rows of panels with more than one length: one point is no line."""
    lengths: dict[Panel, set[int]] = {}
    for row in rows:
        lengths.setdefault(_panel(row), set()).add(row.seqlen_k)
    return [row for row in rows if len(lengths[_panel(row)]) > 1]


def _named(row: Row) -> str:
    batch = "" if row.preset else f", batch {row.batch}"
    what = row.variant if row.direction == "decode" else f"{row.variant} attention, {row.direction}"
    return f"{what}, {row.dtype}{batch}"


def _panels(
    rows: list[Row], title: str, provenance: Provenance, *, width: float = 4.4, by_mask: bool = True
) -> tuple[Any, list[tuple[Panel, Any]]]:
    """A figure with a titled axis for each mask (down) and each head dim (across)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    masks = sorted({row.causal for row in rows}) if by_mask else [False]
    sizes = sorted({_panel(row)[1] for row in rows})
    size = (max(7.0, width * len(sizes)), 3.4 * len(masks) + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(masks), len(sizes), squeeze=False, sharey=True)
    grid = []
    for causal, line in zip(masks, axes, strict=True):
        for size_key, axis in zip(sizes, line, strict=True):
            head_dim, heads_q, heads_kv = size_key
            heads = str(heads_q) if heads_q == heads_kv else f"{heads_q}:{heads_kv}"
            mask = ("causal, " if causal else "full, ") if by_mask else ""
            axis.set_title(f"{mask}head dim {head_dim}, {heads} heads", fontsize=10)
            grid.append(((causal, size_key), axis))
    names = {"torch": "torch", "triton": "Triton", "flashtile": "flashtile"}
    versions = [f"{label} {provenance[key]}" for key, label in names.items() if provenance.get(key)]
    origin = ", ".join([str(provenance["device"]), *versions, str(provenance["date"])])
    figure.suptitle(f"{title}\n{origin}", fontsize=11)
    return figure, grid


def _lines(
    axis: Any, rows: list[Row], x: Callable[[Row], float], y: Callable[[Row], float | None]
) -> None:
    """A line for each peer."""
    for peer in dict.fromkeys(row.peer for row in rows):
        points = sorted((row for row in rows if row.peer == peer), key=x)
        label = with_backend(peer, points)
        axis.plot(list(map(x, points)), list(map(y, points)), label=label, **_style(points[0]))


def _style(row: Row) -> dict[str, Any]:
    return {
        "color": COLOURS.get(row.peer, COLOURS.get(row.provider)),
        "linestyle": DASHES.get(row.peer.partition("-")[2], "-"),
        "marker": MARKERS.get(row.provider, "x"),
        "markersize": 5,
    }


def _dress(axis: Any, label: str, rows: Sequence[Row] = ()) -> None:
    """Labels with units; the lengths of `rows` below, with their batches where these differ.

    Of many lengths only the powers of two have room.
    """
    batches = {row.batch for row in rows}
    has_room = len({row.seqlen_k for row in rows}) <= 8
    ticks = {
        row.seqlen_k: _tick(row.seqlen_k) + (f"\nbatch {row.batch}" if len(batches) > 1 else "")
        for row in rows
        if has_room or row.seqlen_k.bit_count() == 1
    }
    _ticks(axis, ticks)
    axis.set_xlabel("sequence length, tokens")
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)


def _ticks(axis: Any, ticks: Mapping[Any, str]) -> None:
    """A logarithmic x axis with only these ticks."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(ticks), list(ticks.values()))
    axis.xaxis.minorticks_off()


def _from_zero(grid: list[tuple[Panel, Any]]) -> None:
    """Start the y axis of all panels at zero. They share the axis, so call this after every line is
    drawn: a limit stops autoscaling."""
    grid[0][1].set_ylim(bottom=0)


def _tick(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def _with_legend(figure: Any, grid: list[tuple[Panel, Any]]) -> Any:
    handles = {line.get_label(): line for _, axis in grid for line in axis.get_lines()}
    named = {label: line for label, line in handles.items() if not label.startswith("_")}
    columns = max(3, int(figure.get_figwidth() / 1.8))
    figure.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=columns, fontsize=9
    )
    return figure
