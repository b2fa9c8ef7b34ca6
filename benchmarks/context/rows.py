"""The results of the preset: one row for each pass of a case by a peer."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ContextRow:
    """Times of one pass; what was not measured is None, and a skipped peer says why."""

    peer: str
    direction: str  # "forward" or "both"
    variant: str
    dtype: str
    heads_q: int
    heads_kv: int
    head_dim: int
    window: int
    tokens: int  # of each rank
    documents: int
    ranks: int
    process_group: str  # gloo or nccl
    way: str = ""  # of flashtile
    one_process_ms: float | None = None  # on the whole sequence, alone
    slowest_rank_ms: float | None = None
    efficiency: float | None = None  # one process / (ranks x slowest rank)
    largest_error: float | None = None  # of out, from one process in the same dtype
    skipped: str = ""


def write(path: Path, rows: Iterable[ContextRow], provenance: Mapping[str, Any]) -> None:
    """A line for each row, with where it comes from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*(field.name for field in fields(ContextRow)), *provenance])
        for row in rows:
            values = [f"{x:.6g}" if isinstance(x, float) else x for x in asdict(row).values()]
            writer.writerow([*values, *provenance.values()])


def read(path: Path) -> list[dict[str, str]]:
    """The lines as text."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
