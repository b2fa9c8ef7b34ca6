"""The results of the preset: one row for each pass of a case by a peer."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ALONE = "one process"


@dataclass(frozen=True)
class ContextRow:
    """Times of one pass; what was not measured is None, and a skipped peer says why.

    Efficiency is the time of one process on the whole sequence over ranks times the slowest rank.
    An error is the root mean square of the distance from float64 over that of the truth, of the
    first key head and its query heads.
    """

    peer: str  # `ALONE` for one process
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
    single_ms: float | None = None  # a call alone, of the slowest rank
    steady_ms: float | None = None  # each of calls in a row
    host_ms: float | None = None  # what the host of the slowest rank does for each of them
    single_efficiency: float | None = None
    efficiency: float | None = None  # of calls in a row
    out_error: float | None = None
    dq_error: float | None = None
    dk_error: float | None = None
    dv_error: float | None = None
    worst_error_ratio: float | None = None  # the largest quotient of an error and one process's
    peak_mib: float | None = None  # of the rank that allocates most, inputs and results included
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
