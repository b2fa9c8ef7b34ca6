"""The performance targets on a GPU, relative to other libraries in the same run on one H200.

The portable backend (Triton) is compared with FlashAttention-2, the Hopper backend with the fastest
of FlashAttention-3, FlashAttention-4 and cuDNN: times of one case, measured alternately. Masks
are compared with full attention by the same peer, decoding with the faster of two libraries and
with the memory's speed, caches of other kinds with the plain one, float8 with FlashAttention-3's,
quantising with a copy, the host's time of a call with a limit. All are ratios: more is better. A
target is the smallest ratio that a case may have; some also have a geometric mean to reach, over
all cases of a run or of a seed that drew them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import geometric_mean

from .rows import Row, faster_than_full
from .shapes import drawn_as

HOPPER_RIVALS = ("fa3", "fa4", "cudnn")
LONG = 4096
FIELD = "gpu-field"


@dataclass(frozen=True)
class Target:
    """One target: the rows it applies to, what is compared, and the smallest accepted ratios."""

    about: str
    ours: str  # the peer
    others: tuple[str, ...]  # peers, of whom the fastest counts; another variant; a limit
    least: float  # of each case
    belongs: Callable[[Row], bool]
    mean: float = 0.0  # geometric, of all cases; 0: none is wanted


def _dense(
    direction: str, head_dims: Sequence[int], shortest: int, longest: int = 1 << 30
) -> Callable[[Row], bool]:
    def belongs(row: Row) -> bool:
        is_plain = row.variant == "dense" and row.preset in ("gpu-dense", "gpu-hopper")
        is_asked = row.direction == direction and row.head_dim in head_dims
        return is_plain and is_asked and shortest <= row.seqlen_k <= longest

    return belongs


def _variant(direction: str, *names: str) -> Callable[[Row], bool]:
    return lambda row: row.variant in names and row.direction == direction and row.preset != FIELD


def _masks(direction: str, *variants: str) -> Callable[[Row], bool]:
    def belongs(row: Row) -> bool:
        is_asked = not variants or row.variant in variants
        return row.preset == "gpu-masks" and row.direction == direction and is_asked

    return belongs


def _field(direction: str) -> Callable[[Row], bool]:
    return lambda row: row.preset == FIELD and row.direction == direction


TRITON, FA2 = "flashtile-triton", ("fa2",)
PAGED_PREFILL = ("prefill, pages of 16", "prefill, pages of 256")
MAIN_DIMS, OTHER_DIMS, MORE = (64, 128, 256), (96, 192), ("grouped", "window 1024", "packed")
TARGETS = (
    Target("Triton forward, D 64, 128", TRITON, FA2, 1.35, _dense("forward", (64, 128), LONG)),
    Target("Triton backward, D 64, 128", TRITON, FA2, 1.2, _dense("backward", (64, 128), LONG)),
    Target("Triton forward, D 256", TRITON, FA2, 1.1, _dense("forward", (256,), LONG)),
    Target("Triton backward, D 256", TRITON, FA2, 1.1, _dense("backward", (256,), LONG)),
    *(
        Target(f"Hopper {direction}, {what}", "flashtile", HOPPER_RIVALS, least, rows, mean)
        for direction, other_dims, field in (
            ("forward", (1.0, 0.0), (0.95, 1.05)),
            ("backward", (0.95, 1.0), (0.92, 1.03)),
        )
        for what, (least, mean), rows in (
            ("D 64, 128, 256, N = 1k", (0.97, 1.02), _dense(direction, MAIN_DIMS, 1024, 1024)),
            ("D 64, 128, 256", (1.0, 1.05), _dense(direction, MAIN_DIMS, LONG)),
            ("D 96, 192", other_dims, _dense(direction, OTHER_DIMS, LONG)),
            ("heads 32:8; window; packed", (1.0, 0.0), _variant(direction, *MORE)),
            ("drawn shapes", field, _field(direction)),
        )
    ),
    Target(
        "whole layer: 16 heads of 128, N = 8k, causal, both passes",
        "flashtile",
        (*HOPPER_RIVALS, *FA2),
        1.0,
        _variant("both", "layer"),
    ),
    Target(
        "deterministic backward against the default",
        "flashtile-deterministic",
        ("flashtile",),
        0.9,
        lambda row: row.preset == "gpu-deterministic",
    ),
    *(
        Target(f"decoding, {what}", "flashtile", ("fa2", "fa3"), least, rows)
        for what, least, rows in (
            ("batch 1", 1.2, lambda row: row.preset == "gpu-decode" and row.batch == 1),
            ("larger batches", 1.0, lambda row: row.preset == "gpu-decode" and row.batch > 1),
        )
    ),
    *(
        Target(f"masks as {way}, {direction}", ours, ("flex",), 1.01, _masks(direction))
        for direction in ("forward", "backward")
        for way, ours in (
            ("options", "flashtile"),
            ("functions", "flashtile-function"),
            ("spans", "flashtile-spans"),
        )
    ),
    *(
        Target(about, "flashtile-spans", ("flashtile",), 0.97, _masks(direction, variant))
        for direction in ("forward", "backward")
        for about, variant in (
            (f"causal as spans, {direction}", "causal"),
            (f"documents as spans, {direction}, against packing", "documents"),
        )
    ),
    Target(
        "decoding with a shared prefix",
        "flashtile",
        ("flashtile-unshared",),
        1.0,
        lambda row: row.preset == "gpu-cascade",
    ),
    *(
        Target(about, f"flashtile-{ours}", (other,), least, lambda row: True)
        for about, ours, other, least in (
            ("float8 forward, per-head scales", "float8-head", "fa3-float8", 1.0),
            ("float8 forward, per-block scales", "float8", "flashtile-float8-head", 0.97),
            ("quantising", "quantize", "copy", 0.8),
        )
    ),
)
MASK_TARGETS = tuple(
    Target(f"Triton {direction}, {name}", TRITON, ("full",), least, _variant(direction, name))
    for name, least in (("window 1024", 8.0), ("block-sparse 12.5%", 6.0))
    for direction in ("forward", "backward")
) + tuple(
    Target(
        f"Hopper {direction}, block-sparse 12.5%",
        "flashtile",
        ("full",),
        8.0,
        _variant(direction, "block-sparse 12.5%"),
    )
    for direction in ("forward", "backward")
)
# Caches against the plain one of the same sizes, by the same peer.
CACHE_TARGETS = (
    Target(
        "decoding, float8 cache, batch 64",
        "flashtile",
        ("decode",),
        1.7,
        lambda row: row.variant == "decode, float8" and row.batch == 64,
    ),
    *(
        Target(about, "flashtile", (base,), least, _variant("decode", *names))
        for about, base, least, names in (
            ("decoding, pages of 16", "decode", 0.95, ("decode, pages of 16",)),
            ("append, rotary and attention", "decode", 0.9, ("decode, append and rotary",)),
            ("prefill from a cache", "prefill", 0.95, ("prefill, cache",)),
            ("prefill from pages", "prefill", 0.95, PAGED_PREFILL),
        )
    ),
)
HOST_US = 40.0
HOST_TARGET = Target(
    "host time of an eager forward call",
    "flashtile",
    (f"{HOST_US:.0f} µs",),
    1.0,
    lambda row: row.preset == "gpu-host" and row.direction == "forward",
)
READ_PERCENT, LARGE_CACHE = 90.0, 1e9
READ_TARGET = Target(
    "decoding over more than 1 GB",
    "flashtile",
    (f"{READ_PERCENT:.0f} % of the read bandwidth",),
    1.0,
    lambda row: (row.gbps or 0) * (row.median_ms or 0) * 1e6 > LARGE_CACHE,
)
ALL = (*TARGETS, *MASK_TARGETS, *CACHE_TARGETS, HOST_TARGET, READ_TARGET)


@dataclass(frozen=True)
class Outcome:
    """A target in one case."""

    target: Target
    row: Row
    other: str
    ratio: float

    @property
    def met(self) -> bool:
        """Whether the ratio, to the two digits that are shown, reaches the target."""
        return round(self.ratio, 2) >= self.target.least


@dataclass(frozen=True)
class Summary:
    """A target over all of its cases, or over those of one seed that drew them."""

    target: Target
    seed: int  # 0: not drawn
    outcomes: tuple[Outcome, ...]

    @property
    def about(self) -> str:
        """The target, and the seed if there is one."""
        return f"{self.target.about}, seed {self.seed}" if self.seed else self.target.about

    @property
    def ratios(self) -> list[float]:
        """Of all cases."""
        return [outcome.ratio for outcome in self.outcomes]

    @property
    def mean(self) -> float:
        """The geometric mean of all ratios."""
        return geometric_mean(self.ratios)

    @property
    def met(self) -> int:
        """How many cases reach the target."""
        return sum(outcome.met for outcome in self.outcomes)

    @property
    def ahead(self) -> int:
        """How many cases are at least as good as what they are compared with."""
        return sum(round(ratio, 2) >= 1 for ratio in self.ratios)


def outcomes(rows: Sequence[Row]) -> list[Outcome]:
    """Every target, in each of its cases for which both sides were measured."""
    found = [*_against_peers(rows), *_against_full(rows), *_against_plain_cache(rows)]
    found += _against_limit(rows)
    return sorted(found, key=lambda outcome: ALL.index(outcome.target))


def _against_peers(rows: Sequence[Row]) -> Iterator[Outcome]:
    measured = sorted((row for row in rows if row.median_ms), key=lambda row: row.subject)
    for _, together in groupby(measured, key=lambda row: row.subject):
        times = {row.peer: (row.median_ms or 0.0, row) for row in together}
        for target in TARGETS:
            others = [(times[peer][0], peer) for peer in target.others if peer in times]
            if target.ours in times and others and target.belongs(times[target.ours][1]):
                (mine, row), (fastest, other) = times[target.ours], min(others)
                yield Outcome(target, row, other, fastest / mine)


def _against_full(rows: Sequence[Row]) -> Iterator[Outcome]:
    for row, factor in faster_than_full(rows).items():
        for target in MASK_TARGETS:
            if row.peer == target.ours and target.belongs(row):
                yield Outcome(target, row, "full", factor)


def _against_plain_cache(rows: Sequence[Row]) -> Iterator[Outcome]:
    def sizes(row: Row) -> tuple[object, ...]:
        _, _, dtype, _, _, *numbers = row.subject
        return row.peer, dtype, *numbers

    plain = {(row.variant, *sizes(row)): row.median_ms for row in rows}
    for row in rows:
        for target in CACHE_TARGETS:
            base = plain.get((*target.others, *sizes(row)))
            if base and row.median_ms and row.peer == target.ours and target.belongs(row):
                yield Outcome(target, row, target.others[0], base / row.median_ms)


def _against_limit(rows: Sequence[Row]) -> Iterator[Outcome]:
    for row in rows:
        if row.host_us and row.peer == HOST_TARGET.ours and HOST_TARGET.belongs(row):
            yield Outcome(HOST_TARGET, row, HOST_TARGET.others[0], HOST_US / row.host_us)
        share = row.percent_of_read
        if share and row.peer == READ_TARGET.ours and READ_TARGET.belongs(row):
            yield Outcome(READ_TARGET, row, READ_TARGET.others[0], share / READ_PERCENT)


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """Every target that applies, over all of its cases; the cases of each seed apart."""

    def line(outcome: Outcome) -> tuple[int, int]:
        return ALL.index(outcome.target), outcome.row.seed

    found = sorted(outcomes(rows), key=line)
    return [
        Summary(ALL[number], seed, tuple(together))
        for (number, seed), together in groupby(found, key=line)
    ]


def section(rows: Sequence[Row]) -> Iterator[str]:
    """The Markdown of the targets: a line each, then a line for every mean and case that misses."""
    found = summaries(rows)
    if not found:
        return
    yield from ("## Targets", "")
    yield "| target | wanted: least, mean | reached: least, mean, most | cases met | at or ahead |"
    yield "|---|---|---|---|---|"
    for summary in found:
        target, cases = summary.target, len(summary.outcomes)
        wanted = f"{target.least}, {target.mean}" if target.mean else f"{target.least}"
        reached = f"{min(summary.ratios):.2f}, {summary.mean:.2f}, {max(summary.ratios):.2f}"
        about = f"{summary.about}: / {' or '.join(target.others)}"
        counts = f"{summary.met} of {cases} | {summary.ahead} of {cases}"
        yield f"| {about} | {wanted} | {reached} | {counts} |"
    yield ""
    missed = [line for summary in found for line in _missed(summary)]
    if missed:
        yield from (
            "Missed:",
            "",
            "| target | case | ratio | wanted | of |",
            "|---|---|---|---|---|",
        )
        yield from (*missed, "")


def _missed(summary: Summary) -> Iterator[str]:
    target = summary.target
    if round(summary.mean, 2) < target.mean:
        cases = f"mean of {len(summary.outcomes)} cases"
        yield f"| {summary.about} | {cases} | {summary.mean:.2f} | {target.mean} | |"
    for outcome in summary.outcomes:
        if not outcome.met:
            row, ratio = outcome.row, f"{outcome.ratio:.2f}"
            mask = "causal" if row.causal else "full"
            heads = f"{row.heads_q}:{row.heads_kv} heads of {row.head_dim}"
            case = f"{drawn_as(row.index, row.seed)}{row.variant} {mask}, {heads}"
            case += f", {row.seqlen_k:,} tokens"
            yield f"| {target.about} | {case} | {ratio} | {target.least} | {outcome.other} |"
