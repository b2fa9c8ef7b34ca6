"""Blocks of a page that a script writes, between two comments that name the block."""

from __future__ import annotations

import sys
from pathlib import Path


def replaced(text: str, name: str, block: str) -> str:
    """`text` with `block` between the two comments that name it."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{block}\n{end}{after}"


def update(pages: dict[Path, dict[str, str]]) -> int:
    """Write the blocks into their pages; with ``--check``, only say whether they are current.

    Returns:
        The exit status: 1 for a block that is not current under ``--check``.
    """
    status = 0
    for path, blocks in pages.items():
        old = new = path.read_text(encoding="utf-8")
        for name, block in blocks.items():
            new = replaced(new, name, block)
        if "--check" in sys.argv:
            status |= int(new != old)
        else:
            path.write_text(new, encoding="utf-8")
    return status


def dated(table: str, rows: list[dict[str, str]], **others: list[dict[str, str]]) -> str:
    """`table`, and below it where, when and at which commits its rows were measured; `others` are
    rows that were measured apart, by what they are.
    """
    if not rows:
        return table
    devices = sorted({f"an {row['device']}" for part in (rows, *others.values()) for row in part})
    runs = [_runs(rows), *(f"{name} {_runs(part)}" for name, part in others.items())]
    where = " and ".join(devices).replace(", ", " with ")  # "AMD EPYC, 2 threads"
    return f"{table}\n\nMeasured on {where} {'; '.join(runs)}."


def _runs(rows: list[dict[str, str]]) -> str:
    return " and ".join(sorted({f"on {row['date']} at commit {row['commit'][:7]}" for row in rows}))


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table whose first column is text and whose other columns are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
