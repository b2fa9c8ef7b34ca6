"""The terminal output: a table, and a line for each reason why a peer was skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .rows import Row, with_backend

# Heading, and the value below it.
TABLE: dict[str, Callable[[Row], str]] = {
    "pass": lambda row: row.direction,
    "seed": lambda row: str(row.seed or "-"),
    "case": lambda row: str(row.index) if row.seed else "-",
    "function": lambda row: row.variant,
    "dtype": lambda row: row.dtype,
    "causal": lambda row: "yes" if row.causal else "no",
    "B": lambda row: str(row.batch),
    "heads": lambda row: f"{row.heads_q}:{row.heads_kv}",
    "D": lambda row: str(row.head_dim),
    "length": lambda row: str(row.seqlen_k),
    "who": lambda row: with_backend(row.peer, [row]),
    "ms (20-80 %)": lambda row: _spread(row),
    "TFLOP/s": lambda row: number(row.tflops),
    "% of matmul": lambda row: number(row.percent_of_matmul, ".0f"),
    "GB/s": lambda row: number(row.gbps),
    "host us": lambda row: number(row.host_us),
    "peak MiB": lambda row: number(row.peak_mib),
    "max error": lambda row: number(row.max_error, ".1e"),
    "rms error": lambda row: number(row.rms_error, ".1e"),
}

SUBJECT = ("pass", "seed", "function", "dtype", "causal", "B", "heads", "D", "length")


def number(value: float | None, form: str = ".3g") -> str:
    """Three digits, or all before the point; a dash for what was not measured."""
    if value is None:
        return "-"
    return f"{value:.0f}" if form == ".3g" and abs(value) >= 1000 else format(value, form)


def _spread(row: Row) -> str:
    if row.median_ms is None:
        return "-"
    return f"{number(row.median_ms)} ({number(row.p20_ms)}-{number(row.p80_ms)})"


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
    """With rich if it is installed, else in plain columns."""
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
