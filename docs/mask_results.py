"""The tables of performance-masks.md and of shared prefixes, from benchmarks/results.

h200/masks/masks-*.csv      python -m benchmarks --preset gpu-masks
h200/masks/first-call.csv   python -m benchmarks.first_call --cases masks
h100/masks/block-masks.csv  python -m benchmarks.block_masks
h200/masks/cascade.csv      python -m benchmarks --preset gpu-cascade
"""

from __future__ import annotations

import csv
from pathlib import Path

from generated import dated, markdown_table

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
WAYS = {
    "flashtile": "as options",
    "flashtile-function": "as functions",
    "flashtile-spans": "as spans",
}

Row = dict[str, str]


def blocks() -> dict[str, str]:
    """The tables by the name of their block, or how to measure what is missing."""
    return {
        "masks forward": speeds("forward"),
        "masks backward": speeds("backward"),
        "first call": first_calls(),
        "block masks": block_masks(),
    }


def read(pattern: str) -> list[Row]:
    """The lines of all files with such a name; none before they were measured."""
    rows: list[Row] = []
    for path in sorted(RESULTS.glob(f"{pattern}.csv")):
        with path.open(encoding="utf-8") as file:
            rows += csv.DictReader(file)
    return rows


def missing(command: str) -> str:
    return f"Not measured yet: `python -m {command}`."


def speeds(direction: str) -> str:
    """Milliseconds of a pass, and in brackets how many times as fast as FlexAttention."""
    cases: dict[tuple[str, str], dict[str, float]] = {}
    rows = sorted(read("h200/masks/masks-*"), key=lambda row: int(row["index"]))
    for row in rows:
        if row["pass"] == direction and row["median_ms"]:
            case = cases.setdefault((row["head_dim"], row["variant"]), {})
            case[row["provider"]] = float(row["median_ms"])
    if not cases:
        return missing("benchmarks --preset gpu-masks")
    lines = []
    for (head_dim, variant), times in cases.items():
        flex = times.get("flex")
        cells = [_time(times.get(way), flex) for way in WAYS]
        lines.append([f"{head_dim}, {variant}", *cells, "–" if flex is None else f"{flex:.2f}"])
    return dated(markdown_table(["head dim, mask", *WAYS.values(), "FlexAttention"], lines), rows)


def _time(mine: float | None, flex: float | None) -> str:
    if mine is None:
        return "–"
    return f"{mine:.2f}" if flex is None else f"{mine:.2f} ({flex / mine:.2f}×)"


def first_calls() -> str:
    """Seconds of the first call, with an empty disk cache and with the kernels on disk; of
    FlexAttention, the import after a plus.
    """
    rows = read("h200/masks/first-call")
    seconds = {(row["case"], row["cache"]): _first_call(row) for row in rows}
    names = [name for name, cache in seconds if cache == "cold" and not name.startswith("flex-")]
    lines = []
    for name in names:
        if (f"flex-{name}", "cold") not in seconds:
            continue
        cells = [name.removesuffix("-128").replace("-", " ")]
        for cache in ("cold", "warm"):
            cells += [seconds.get((who, cache), "–") for who in (name, f"flex-{name}")]
        lines.append(cells)
    if not lines:
        return missing("benchmarks.first_call --cases masks")
    names = [f"{who}, {what}" for what in ("compiled", "on disk") for who in ("ours", "Flex")]
    return dated(markdown_table(["first call", *names], lines), rows)


def _first_call(row: Row) -> str:
    if row["failed"]:
        return "fails"
    first, imported = float(row["first_call"]), float(row["peer_import"])
    return f"{first:.2f} + {imported:.2f}" if imported else f"{first:.2f}"


def block_masks() -> str:
    """Milliseconds of making a block mask from a function."""
    cases: dict[str, dict[str, Row]] = {}
    rows = read("h100/masks/block-masks")
    for row in rows:
        cases.setdefault(row["mask"], {})[row["maker"]] = row
    if not cases:
        return missing("benchmarks.block_masks")
    makers = ("flashtile", "flex", "flex, compiled")
    lines = [
        [mask, *(f"{float(found[x]['median_ms']):,.3g}" if x in found else "–" for x in makers)]
        for mask, found in cases.items()
    ]
    header = ["mask", "flashtile", "FlexAttention", "FlexAttention, compiled"]
    return dated(markdown_table(header, lines), rows)


def cascade() -> str:
    """Microseconds of a decoding step."""
    cases: dict[tuple[str, str, str], dict[str, float]] = {}
    rows = read("h200/masks/cascade")
    for row in rows:
        if row["median_ms"]:
            case = cases.setdefault((row["variant"], row["heads_q"], row["heads_kv"]), {})
            case[row["provider"]] = 1e3 * float(row["median_ms"])
    if not cases:
        return missing("benchmarks --preset gpu-cascade")
    lines = []
    for (variant, heads_q, heads_kv), times in cases.items():
        kind = variant.removeprefix("shared prefix").removeprefix(", ") or "plain cache"
        shared, plain = times.get("flashtile"), times.get("flashtile-unshared")
        cells = ["–" if x is None else f"{x:.0f}" for x in (shared, plain, times.get("fa3"))]
        ratio = "–" if shared is None or plain is None else f"{plain / shared:.2f}×"
        lines.append([f"{kind}, heads {heads_q}:{heads_kv}", *cells, ratio])
    header = ["cache", "prefix read once", "without", "FlashAttention-3", "gain"]
    return dated(markdown_table(header, lines), rows)
