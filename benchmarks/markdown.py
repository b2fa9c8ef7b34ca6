"""A run as a page: for each preset, pass and quantity a table with a column for each peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from . import gpu_targets
from .report import number, skipped_lines
from .rows import Provenance, Row, faster_than_full, with_backend

PASSES = ("forward", "backward", "both", "decode", "quantize")  # in the order of the page

Value = Callable[[Row], float | None]


@dataclass(frozen=True)
class Quantity:
    """What a table shows."""

    title: str
    value: Value
    form: str = ".3g"
    has_ratio: bool = False  # last columns: ours over others', see `RATIOS`
    percent: Value = lambda row: None  # of the GPU's best, after each number


QUANTITIES = (
    Quantity(
        "TFLOP/s (% of one large matrix product)",
        lambda row: row.tflops,
        has_ratio=True,
        percent=lambda row: row.percent_of_matmul,
    ),
    Quantity(
        "GB/s (% of one large sum)",
        lambda row: row.gbps,
        has_ratio=True,
        percent=lambda row: row.percent_of_read,
    ),
    Quantity("host time of a call, µs", lambda row: row.host_us),
    # 0 is not a peak, since results count: other memory was freed during the measurement.
    Quantity("peak memory above the inputs, MiB", lambda row: row.peak_mib or None),
    Quantity("rms error against float64", lambda row: row.rms_error, ".1e"),
)

LIBRARIES = ("fa3", "fa4", "cudnn", "fa2", "sdpa-efficient", "flex")
# Ours, and whose fastest it is divided by; all of `LIBRARIES` only where all are measured.
RATIOS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("flashtile", ("fa2",)),
    ("flashtile-triton", ("fa2",)),
    ("flashtile", ("cudnn", "fa3", "fa4")),
    ("flashtile", LIBRARIES),
    *((f"flashtile{way}", ("flex",)) for way in ("", "-function", "-spans")),
    ("flashtile-spans", ("flashtile",)),
    ("flashtile", ("flashtile-unshared",)),
    ("flashtile-deterministic", ("flashtile",)),
    ("flashtile-float8", ("flashtile",)),
    ("flashtile-float8", ("flashtile-float8-head",)),
    ("flashtile-float8-head", ("fa3-float8",)),
    ("flashtile-quantize", ("copy",)),
)

# Columns that say what a line measured; those that never change are said once, above the table.
SUBJECT: dict[str, Callable[[Row], str]] = {
    "seed": lambda row: str(row.seed or ""),
    "case": lambda row: str(row.index) if row.seed else "",
    "function": lambda row: row.variant,
    "mask": lambda row: "causal" if row.causal else "full",
    "dtype": lambda row: row.dtype,
    "head dim": lambda row: str(row.head_dim),
    "heads": lambda row: f"{row.heads_q}:{row.heads_kv}",
    "batch": lambda row: str(row.batch),
    "length": lambda row: f"{row.seqlen_k:,}",
    "scores left": lambda row: f"{row.density or 1:.1%}",
}


def page(rows: Sequence[Row], provenance: Provenance, pictures: Sequence[str] = ()) -> str:
    """The whole page; `pictures` are file names beside it."""
    names = {"torch": "torch", "triton": "Triton", "flashtile": "flashtile", "commit": "commit"}
    origin = [f"{label} {provenance[key]}" for key, label in names.items() if provenance.get(key)]
    lines = [f"# {provenance['device']}, {provenance['date']}", ""]
    lines += [", ".join(origin) + ". Medians; their spread is in the CSV files.", ""]
    lines += gpu_targets.section(rows)
    lines += [line for name in pictures for line in (f"![{name}]({name})", "")]
    ordered = sorted(rows, key=lambda row: (row.preset, PASSES.index(row.direction)))
    for (preset, direction), group in groupby(ordered, key=lambda row: (row.preset, row.direction)):
        lines += _section(f"{preset or 'measured'}: {direction}", list(group))
    if skipped := skipped_lines(rows):
        lines += ["## Skipped", "", *(f"- {line}" for line in skipped), ""]
    return "\n".join(lines)


def _section(title: str, rows: list[Row]) -> Iterator[str]:
    quantities = [*QUANTITIES]
    if speed_ups := faster_than_full(rows):
        quantities.insert(1, Quantity("times as fast as full attention", speed_ups.get))
    for quantity in quantities:
        if any(quantity.value(row) is not None for row in rows):
            yield from (f"## {title}, {quantity.title}", "", *_table(rows, quantity), "")


def _table(rows: list[Row], quantity: Quantity) -> Iterator[str]:
    """The Markdown of one table, a line for each subject."""
    columns = {heading: [cell(row) for row in rows] for heading, cell in SUBJECT.items()}
    columns = {heading: cells for heading, cells in columns.items() if any(cells)}
    if len(set(columns["function"])) == 1:
        del columns["scores left"]  # follows from the mask
    same = [heading for heading, cells in columns.items() if len(set(cells)) == 1]
    differ = [heading for heading in columns if heading not in same]
    peers = list(dict.fromkeys(row.peer for row in rows if quantity.value(row) is not None))
    there = {*peers}
    ratios = [r for r in RATIOS if quantity.has_ratio and r[0] in there and there & {*r[1]}]
    ratios = [r for r in ratios if r[1] is not LIBRARIES or there >= {*LIBRARIES}]
    if same:
        yield ", ".join(f"{heading} {columns[heading][0]}" for heading in same) + ":"
        yield ""
    named = [with_backend(peer, rows) for peer in peers]
    yield _line([*differ, *named, *(_ratio_name(*ratio, peers) for ratio in ratios)])
    yield "|" + "---|" * (len(differ) + len(named) + len(ratios))
    for _, together in groupby(sorted(rows, key=_order), key=_order):
        found = {row.peer: row for row in together}
        first = next(iter(found.values()))
        cells = [SUBJECT[heading](first) for heading in differ]
        cells += [_cell(found.get(peer), quantity) for peer in peers]
        yield _line([*cells, *(_ratio(*ratio, found, quantity) for ratio in ratios)])


def _order(row: Row) -> tuple[object, ...]:
    density = round(row.density or 1, 2)  # the diagonal's share differs a little with the length
    return (row.dtype, row.head_dim, row.causal, -density, row.variant, row.seqlen_k, *row.subject)


def _cell(row: Row | None, quantity: Quantity) -> str:
    if row is None or quantity.value(row) is None:
        short = row is not None and row.skipped.startswith("out of memory")
        return "out of memory" if short else "-"
    percent = quantity.percent(row)
    suffix = "" if percent is None else f" ({percent:.0f})"
    return number(quantity.value(row), quantity.form) + suffix


def _ratio_name(ours: str, others: Sequence[str], peers: Sequence[str]) -> str:
    """The heading above a ratio."""
    there = [peer for peer in others if peer in peers]
    return f"{ours} / {there[0]}" if len(there) == 1 else f"{ours} / best of {', '.join(there)}"


def _ratio(ours: str, others: Sequence[str], found: Mapping[str, Row], quantity: Quantity) -> str:
    """Ours over the best of the others that measured it."""
    values = {peer: quantity.value(row) for peer, row in found.items()}
    best = max((value for peer in others if (value := values.get(peer))), default=None)
    mine = values.get(ours)
    return f"{mine / best:.2f}" if mine and best else "-"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
