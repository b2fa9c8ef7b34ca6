"""What the trees answered: times by round, ratios to the first tree, differences of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, log
from statistics import median
from typing import NamedTuple

import torch

from flashtile.cli.timing import Timing

from ..report import number
from ..rows import Row
from ..run import row_direction
from .jobs import HOST, Job
from .worker import Answer, Trace


class Ratio(NamedTuple):
    """How many times as fast a tree is as the first: median of the rounds, 20th and 80th
    percentile."""

    median: float
    p20: float
    p80: float


class Difference(NamedTuple):
    """How far the results of a tree are from those of the first; the largest over its tensors."""

    bit_equal: bool
    norm: float  # of the difference, relative to the norm of the first tree's tensor
    worst_row: float  # of a row's difference, relative to the first tree's row or a mean one


@dataclass
class Outcome:
    """What one tree answered for one job."""

    rounds: dict[int, list[float]] = field(default_factory=dict)  # milliseconds
    backend: str = ""
    skipped: str = ""
    traces: list[Trace] = field(default_factory=list)

    def take(self, number: int, answer: Answer) -> None:
        """Keep the answer of a round."""
        self.skipped = answer.skipped
        if not answer.skipped:
            self.rounds[number] = answer.times
            self.backend = answer.backend
            self.traces = self.traces or answer.traces

    @property
    def samples(self) -> list[float]:
        """The times of all rounds."""
        return [time for times in self.rounds.values() for time in times]

    def row(self, job: Job) -> Row:
        """The outcome as a line of results."""
        row = Row.of(job.case, job.peer, row_direction(job.case, job.direction))
        row = replace(row, backend=self.backend)
        if not self.samples:
            return replace(row, skipped=self.skipped or "not measured in time")
        if job.clock == HOST:
            return replace(row, host_us=median(self.samples) * 1e3)
        return row.timed(job.case, self.samples)


def ratios(base: Outcome, other: Outcome) -> Ratio | None:
    """How many times as fast as `base` the other is: median and spread of the rounds' ratios.

    Times of one round are next to each other, so that the machine's drift cancels.

    >>> ratios(Outcome({0: [2.0], 1: [4.0, 5.0, 9.0]}), Outcome({0: [1.0], 1: [2.5], 2: [7.0]}))
    Ratio(median=2.0, p20=2.0, p80=2.0)
    """
    shared = base.rounds.keys() & other.rounds.keys()
    found = [median(base.rounds[key]) / median(other.rounds[key]) for key in sorted(shared)]
    return Ratio(*Timing.of(found)) if found else None


def difference(base: Outcome, other: Outcome) -> Difference | None:
    """Of the results of two trees; None where one of them has none."""
    if not base.traces or not other.traces:
        return None
    shapes = [[x.rows.shape for x in traces] for traces in (base.traces, other.traces)]
    if shapes[0] != shapes[1]:
        return Difference(False, inf, inf)
    pairs = list(zip(base.traces, other.traces, strict=True))
    return Difference(
        all(theirs.digest == mine.digest for theirs, mine in pairs),
        _largest(_relative(mine.rows - theirs.rows, theirs.rows) for theirs, mine in pairs),
        _largest(_worst_row(mine.rows - theirs.rows, theirs.rows) for theirs, mine in pairs),
    )


def _relative(gap: torch.Tensor, base: torch.Tensor) -> float:
    return _over(gap.double().norm().item(), base.double().norm().item())


def _worst_row(gap: torch.Tensor, base: torch.Tensor) -> float:
    """Relative to the longer of the same row and a mean row: the sums of few numbers can be small
    by chance, and the first keys of a causal call have long gradients."""
    if not base.any():
        return inf if gap.any() else 0.0
    apart, rows = (x.double().square().mean(-1).sqrt() for x in (gap, base))
    return (apart / rows.clamp(min=rows.square().mean().sqrt())).max().item()


def _over(gap: float, base: float) -> float:
    return gap / base if base else inf if gap else 0.0


def _largest(values: Iterable[float]) -> float:
    return torch.tensor([0.0, *values], dtype=torch.float64).max().item()  # NaN if any is


@dataclass(frozen=True)
class Comparison:
    """One job on all trees, the first of which the others are compared with."""

    job: Job
    outcomes: dict[str, Outcome]

    @property
    def base(self) -> Outcome:
        """The outcome of the first tree."""
        return next(iter(self.outcomes.values()))

    def cells(self) -> list[str]:
        """A line of the table: the case, each tree's time, and what the others differ by."""
        case, unit = self.job.case, "us" if self.job.clock == HOST else "ms"
        causal = " causal" if case.causal else ""
        sizes = f"B{case.batch} H{case.heads_q}:{case.heads_kv} D{case.head_dim} N{case.seqlen_k}"
        how = "" if self.job.clock == "gpu" else f" {self.job.clock}"
        cells = [
            f"{case.preset} {case.index}",
            f"{self.job.direction}{how}",
            f"{'' if case.variant == 'dense' else case.variant + ' '}{sizes}{causal}",
        ]
        for outcome in self.outcomes.values():
            row = outcome.row(self.job)
            time = row.host_us if self.job.clock == HOST else row.median_ms
            cells.append("-" if time is None else f"{number(time)} {unit}")
            if outcome is not self.base:
                cells += [self._faster(outcome), self._apart(outcome)]
        return cells

    def _faster(self, outcome: Outcome) -> str:
        found = ratios(self.base, outcome)
        return f"{found.median:.3f}" if found else "-"

    def _apart(self, outcome: Outcome) -> str:
        found = difference(self.base, outcome)
        if found is None:
            return "-"
        return "=" if found.bit_equal else f"{found.norm:.0e} {found.worst_row:.0e}"


def headings(trees: Sequence[str]) -> list[str]:
    """Of the table that `Comparison.cells` fills."""
    others = [text for name in trees[1:] for text in (name, "x", "differs, a row")]
    return ["case", "pass", "shape", trees[0], *others]


def summary(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """For each set, pass and tree but the first: the ratios and the differences in few words."""
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for comparison in comparisons:
        job = comparison.job
        how = job.direction if job.clock == "gpu" else f"{job.direction} {job.clock}"
        groups.setdefault((job.case.preset, how, job.peer), []).append(comparison)
    return [
        [preset, how, name, *_in_short(together, name)]
        for (preset, how, _), together in groups.items()
        for name in list(together[0].outcomes)[1:]
    ]


SUMMARY = ["set", "pass", "tree", "cases", "mean x", "least", "most", "bit-equal", "differs", "row"]


def _in_short(comparisons: Sequence[Comparison], name: str) -> list[str]:
    pairs = [(comparison.base, comparison.outcomes[name]) for comparison in comparisons]
    faster = [found.median for pair in pairs if (found := ratios(*pair))]
    apart = [gap for pair in pairs if (gap := difference(*pair))]
    speed = ["-"] * 3
    if faster:
        mean = exp(sum(map(log, faster)) / len(faster))
        speed = [f"{value:.3f}" for value in (mean, min(faster), max(faster))]
    gaps = [_largest(x.norm for x in apart), _largest(x.worst_row for x in apart)]
    return [
        f"{len(faster)}/{len(pairs)}",
        *speed,
        f"{sum(x.bit_equal for x in apart)}/{len(apart)}",
        *(f"{gap:.1e}" for gap in gaps),
    ]
