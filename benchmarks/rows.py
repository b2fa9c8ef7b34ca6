"""The results: one `Row` for each pass of a case by a peer; to CSV and JSON, and back."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from flashtile.cli.timing import Timing

from .shapes import Case, cache_bytes, density, flops, quantized_bytes

Provenance = Mapping[str, str | None]


def is_ours(peer: str) -> bool:
    """Whether a peer is this package.

    >>> is_ours("flashtile-triton"), is_ours("fa2")
    (True, False)
    """
    return peer.partition("-")[0] == "flashtile"


def with_backend(peer: str, rows: Iterable[Row]) -> str:
    """The peer's name; for flashtile also the backends that ran, unless the name has one.

    `rows` may be of other peers too.
    """
    ran = dict.fromkeys(row.backend for row in rows if row.peer == peer and is_ours(peer))
    shown = [backend for backend in ran if backend and not peer.endswith(f"-{backend}")]
    return f"{peer} ({', '.join(shown)})" if shown else peer


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
    preset: str = ""
    seed: int = 0  # what draws the case, or only its inputs
    index: int = 0  # the number of the case in its preset, from 1
    density: float | None = None  # share of all scores that the mask leaves
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    tflops: float | None = None
    percent_of_matmul: float | None = None  # of what the GPU reaches in one large product
    gbps: float | None = None  # keys and values of a cache read, or what quantising moves
    percent_of_read: float | None = None  # of what the GPU reads in one large sum
    host_us: float | None = None  # until an eager call returns, without waiting for the GPU
    peak_mib: float | None = None  # above the inputs; with a backward, of both passes together
    max_error: float | None = None
    rms_error: float | None = None
    skipped: str = ""

    @classmethod
    def of(cls, case: Case, peer: str, direction: str) -> Row:
        """An empty row. `peer` is ``provider`` or ``provider-backend``; for flashtile's peers it is
        the provider, and `backend` is the one that ran."""
        provider, _, backend = (peer, "", "") if is_ours(peer) else peer.partition("-")
        shared = {f.name: getattr(case, f.name) for f in fields(cls) if hasattr(case, f.name)}
        shared |= {"provider": provider, "backend": backend, "direction": direction}
        return cls(density=density(case), **shared)

    def timed(self, case: Case, samples: Sequence[float]) -> Row:
        """The row with the numbers that follow from the samples in milliseconds."""
        timing = Timing.of(samples)
        seconds = timing.median_ms / 1e3
        row = replace(self, **timing._asdict())
        if case.recipe is not None:
            return replace(row, gbps=quantized_bytes(case) / seconds / 1e9)
        return replace(
            row,
            tflops=flops(case, self.direction) / seconds / 1e12,
            # What is read of a prefix that all share depends on the peer.
            gbps=cache_bytes(case) / seconds / 1e9
            if case.cached and not case.shared_prefix
            else None,
        )

    @property
    def peer(self) -> str:
        """The peer's name, a key of `peers.PEERS`."""
        if is_ours(self.provider) or not self.backend:
            return self.provider
        return f"{self.provider}-{self.backend}"

    @property
    def subject(self) -> tuple[Any, ...]:
        """The measured case without the peer: rows that may be compared share it."""
        sizes = (self.head_dim, self.head_dim_v, self.heads_q, self.heads_kv, self.batch)
        lengths = (self.seqlen_q, self.seqlen_k)
        kind = (self.preset, self.direction, self.dtype, self.variant, self.causal)
        return (*kind, *sizes, *lengths, self.seed)


def faster_than_full(rows: Sequence[Row]) -> dict[Row, float]:
    """How many times as fast each row is as the same peer's full attention of the same sizes.

    Empty if no mask except causality hides scores.
    """
    full = {_sizes(row): row.median_ms for row in rows if row.variant == "dense" and not row.causal}
    times = ((row, full.get(_sizes(row)), row.median_ms) for row in rows)
    found = {row: base / ms for row, base, ms in times if base and ms}
    return found if any(row.variant != "dense" for row in found) else {}


def _sizes(row: Row) -> tuple[object, ...]:
    preset, direction, dtype, _, _, *sizes = row.subject
    return (row.peer, preset, direction, dtype, *sizes)


COLUMNS = ["pass" if field.name == "direction" else field.name for field in fields(Row)]


def records(rows: Iterable[Row], provenance: Provenance) -> list[dict[str, Any]]:
    """The rows as flat dicts, each with where it comes from; the columns of the CSV file."""
    values = (dict(zip(COLUMNS, asdict(row).values(), strict=True)) for row in rows)
    return [{**line, **provenance} for line in values]


def without_folders(argument: str) -> str:
    """An argument as it is recorded: of an absolute path only the name, since the folder is local.

    >>> without_folders("base=/anywhere/base?DELAY=4&TRITON_CACHE_DIR=/tmp/a")
    'base=base?DELAY=4&TRITON_CACHE_DIR=a'
    """
    return re.sub(r"(^|=)/([^?&]*/)?", r"\1", argument)


def recorded(program: Sequence[str], arguments: Sequence[str]) -> str:
    """A command as it is recorded."""
    return shlex.join([*program, *map(without_folders, arguments)])


def start_csv(path: Path, provenance: Provenance) -> None:
    """Start a file with only the column names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow([*COLUMNS, *provenance])


def append_csv(path: Path, rows: Iterable[Row], provenance: Provenance) -> None:
    """One line a row, at the end of a file that was started."""
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for line in records(rows, provenance):
            writer.writerow([_short(value) for value in line.values()])


def write_csv(path: Path, rows: Iterable[Row], provenance: Provenance) -> None:
    """One line a row, under a line of column names."""
    start_csv(path, provenance)
    append_csv(path, rows, provenance)


def write_json(path: Path, rows: Sequence[Row], provenance: Provenance) -> None:
    """``{"machine", "rows"}``; a number that was not measured is null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": dict(provenance), "rows": records(rows, {})}
    path.write_text(json.dumps(content, indent=1) + "\n")


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


# How the text of a CSV cell becomes the value of a field again, by the field's type.
READ: dict[str, Callable[[str], Any]] = {
    "str": str,
    "bool": lambda text: text == "True",
    "int": int,
    "float | None": lambda text: float(text) if text else None,
}


def read_csv(path: Path) -> list[tuple[Row, dict[str, str]]]:
    """Each row with where it comes from; none of a file that holds something else.

    A column that an older file lacks keeps its default.
    """
    types = dict(zip(COLUMNS, fields(Row), strict=True))
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        wanted = {name for name, field in types.items() if field.default is MISSING}
        if not wanted <= set(reader.fieldnames or ()):
            return []
        lines = list(reader)
    found = []
    for line in lines:
        origin = {name: text for name, text in line.items() if name not in types}
        known = [name for name in COLUMNS if name in line]
        values = {types[name].name: READ[str(types[name].type)](line[name]) for name in known}
        found.append((Row(**values), origin))
    return found


def read_folder(folder: Path) -> tuple[list[Row], dict[str, str]]:
    """The rows of every CSV file in `folder` as one run, and what their provenance says together.

    Where several runs measured the same, the one with more peers counts, the later of equals; the
    others add the peers that it lacks. So peers that are compared come from one run where they can.
    """
    runs = [read_csv(path) for path in sorted(folder.glob("*.csv"))]
    runs.sort(key=lambda run: max((origin["date"] for _, origin in run), default=""))
    found: dict[tuple[Any, ...], list[list[Row]]] = {}
    for run in runs:
        rows = sorted((row for row, _ in run), key=lambda row: row.subject)
        for subject, together in groupby(rows, key=lambda row: row.subject):
            found.setdefault(subject, []).append(list(together))
    kept: list[Row] = []
    for candidates in found.values():
        candidates.sort(key=lambda together: sum(not row.skipped for row in together))
        rows = sorted((r for c in candidates for r in c), key=lambda row: not row.skipped)
        kept += {row.peer: row for row in rows}.values()
    origins = [origin for run in runs for _, origin in run]
    columns = dict.fromkeys(name for origin in origins for name in origin)
    merged = {
        name: ", ".join(dict.fromkeys(filter(None, (origin.get(name) for origin in origins))))
        for name in columns
    }
    if days := sorted(filter(None, {origin.get("date") for origin in origins})):
        merged["date"] = " to ".join(dict.fromkeys((days[0], days[-1])))
    return kept, merged
