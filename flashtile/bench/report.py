"""What is shown: a table on the terminal, CSV, JSON and pictures."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from .measure import Timing
from .shapes import Case, cache_bytes, flops

Provenance = Mapping[str, str | None]


@dataclass(frozen=True)
class Row:
    """One pass of one case by one peer. What was not measured is None; a skipped peer says why."""

    provider: str
    backend: str
    direction: str  # the column "pass"
    variant: str
    dtype: str
    causal: bool
    head_dim: int
    head_dim_v: int
    heads_q: int
    heads_kv: int
    batch: int
    seqlen_q: int
    seqlen_k: int
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    tflops: float | None = None
    gbps: float | None = None  # keys and values of a cache read
    peak_mib: float | None = None  # above the inputs; of forward and backward in a backward row
    max_error: float | None = None
    rms_error: float | None = None
    skipped: str = ""

    @classmethod
    def of(cls, case: Case, peer: str, direction: str) -> Row:
        """An empty row. `peer` is ``provider`` or ``provider-backend``."""
        provider, _, backend = peer.partition("-")
        shared = {f.name: getattr(case, f.name) for f in fields(cls) if hasattr(case, f.name)}
        return cls(provider=provider, backend=backend, direction=direction, **shared)

    def timed(self, case: Case, samples: Sequence[float]) -> Row:
        """The row with what follows from the samples, milliseconds each."""
        timing = Timing.of(samples)
        seconds = timing.median_ms / 1e3
        return replace(
            self,
            **timing._asdict(),
            tflops=flops(case, self.direction) / seconds / 1e12,
            gbps=cache_bytes(case) / seconds / 1e9 if case.cached else None,
        )

    @property
    def peer(self) -> str:
        """Provider and backend in one word."""
        return f"{self.provider}-{self.backend}" if self.backend else self.provider


def records(rows: Sequence[Row], provenance: Provenance) -> list[dict[str, Any]]:
    """The rows as flat dicts, each with where it comes from; the columns of the CSV file."""
    flat = []
    for row in rows:
        values = {"pass" if k == "direction" else k: v for k, v in asdict(row).items()}
        flat.append({**values, **provenance})
    return flat


def write_csv(path: Path, rows: Sequence[Row], provenance: Provenance) -> None:
    """One line a row, under a line of column names."""
    lines = records(rows, provenance)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        for line in lines:
            writer.writerow({k: _short(v) for k, v in line.items()})


def write_json(path: Path, rows: Sequence[Row], provenance: Provenance) -> None:
    """``{"machine", "rows"}``; a number that was not measured is null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": dict(provenance), "rows": records(rows, {})}
    path.write_text(json.dumps(content, indent=1) + "\n")


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


# Heading, and what stands under it.
TABLE: dict[str, Callable[[Row], str]] = {
    "pass": lambda row: row.direction,
    "function": lambda row: row.variant,
    "dtype": lambda row: row.dtype,
    "causal": lambda row: "yes" if row.causal else "no",
    "B": lambda row: str(row.batch),
    "heads": lambda row: f"{row.heads_q}:{row.heads_kv}",
    "D": lambda row: str(row.head_dim),
    "length": lambda row: str(row.seqlen_k),
    "who": lambda row: row.peer,
    "ms (20-80 %)": lambda row: _spread(row),
    "TFLOP/s": lambda row: _number(row.tflops),
    "GB/s": lambda row: _number(row.gbps),
    "peak MiB": lambda row: _number(row.peak_mib),
    "max error": lambda row: _number(row.max_error, ".1e"),
    "rms error": lambda row: _number(row.rms_error, ".1e"),
}

SUBJECT = ("pass", "function", "dtype", "causal", "B", "heads", "D", "length")


def _number(value: float | None, form: str = ".3g") -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if form == ".3g" and abs(value) >= 1000 else format(value, form)


def _spread(row: Row) -> str:
    if row.median_ms is None:
        return "-"
    return f"{_number(row.median_ms)} ({_number(row.p20_ms)}-{_number(row.p80_ms)})"


def table(rows: Sequence[Row]) -> tuple[str, list[str], list[list[str]]]:
    """What was measured: a line with all that is the same throughout, headings, cells."""
    measured = [row for row in rows if not row.skipped]
    columns = {heading: [cell(row) for row in measured] for heading, cell in TABLE.items()}
    columns = {heading: cells for heading, cells in columns.items() if set(cells) != {"-"}}
    same = {h: cells for h, cells in columns.items() if h in SUBJECT and len(set(cells)) == 1}
    title = ", ".join(f"{heading} {cells[0]}" for heading, cells in same.items())
    differ = {heading: cells for heading, cells in columns.items() if heading not in same}
    return title, list(differ), [list(line) for line in zip(*differ.values(), strict=True)]


def show(rows: Sequence[Row]) -> None:
    """Print the table, then every skipped peer with its reason."""
    title, headings, lines = table(rows)
    if lines:
        print(title)
        print_table(headings, lines)
    for line in skipped_lines(rows):
        print(line)


def skipped_lines(rows: Sequence[Row]) -> list[str]:
    """One line for each reason: who was skipped, where, why."""
    reasons: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for row in rows:
        if row.skipped:
            peers, functions = reasons.setdefault(row.skipped, ({}, {}))
            peers[row.peer] = functions[row.variant] = None
    return [
        f"skipped {', '.join(peers)} ({', '.join(functions)}): {reason}"
        for reason, (peers, functions) in reasons.items()
    ]


def print_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """With rich where it is installed, in plain columns elsewhere."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain_table(headings, lines))
        return
    grid = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False)
    for column, text in zip(grid.columns, lines[0], strict=True):
        column.no_wrap = True
        column.justify = "right" if text[:1].isdigit() or text == "-" else "left"
    for line in lines:
        grid.add_row(*line)
    Console(width=500).print(grid)  # better wrapped by the terminal than cut off


def plain_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns padded with spaces."""
    cells = [headings, *lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = (
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        for line in cells
    )
    return "\n".join(line.rstrip() for line in padded)
