"""The performance targets on a CPU, relative to PyTorch's own kernel in the same run.

Where the native kernel can do the job itself (full attention, causal attention of equal lengths),
flashtile may take 1.05 times as long. Elsewhere the baseline is the native kernel's time for as
many unmasked scores: 1.4 times that forward, 1.5 backward. That is its full attention, or its
causal attention when the job is causal, scaled by the scores; when decoding, its time over a
contiguous cache. Both run on the same tensors, in flashtile's layout. Memory has to grow
linearly with the length; the gradient of a bias, as large as the scores, does not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch.nn.attention import SDPBackend

from flashtile.cli.timing import cpu_timer

from .peers import flashtile, sdpa
from .prepared import DIFFERENTIATED, Prepared
from .rows import Row
from .run import MIB, Settings, peak_memory, time_calls
from .shapes import Case, flops, make_inputs, vary

LENGTHS = (1024, 2048, 4096)
DTYPES = ("float32", "bfloat16")
SAME_JOB = 1.05
SAME_SCORES = {"forward": 1.4, "backward": 1.5}
LINEAR = 1.15  # memory may grow with this power of the length
SETTINGS = Settings(peers=("flashtile",), seconds=0.8, min_rounds=3)


def cases() -> list[Case]:
    """The plain case of each group that is measured together."""
    return [
        Case(variant="targets", dtype=dtype, seqlen_q=length, seqlen_k=length)
        for dtype in DTYPES
        for length in LENGTHS
    ]


def jobs(base: Case) -> dict[str, Case]:
    """The jobs of a group, by name. Most are causal, as language models are."""
    base = replace(base, variant="dense")
    causal = replace(base, causal=True)
    return {
        "full": base,
        "causal": causal,
        "causal, M = N/2": replace(causal, seqlen_q=base.seqlen_k // 2),
        "window 512": vary(causal, "window"),
        "chunk 512": vary(causal, "chunk"),
        "varlen": vary(causal, "varlen"),
        "sink": vary(causal, "sink"),
        "block mask": vary(base, "block-sparse"),
        "softcap": vary(causal, "softcap"),
        "alibi": vary(causal, "alibi"),
        "dropout": vary(causal, "dropout"),
        "bias": vary(causal, "bias"),
        "Dv = D/2": vary(causal, "value-dim"),
        "paged decode": vary(replace(base, batch=4), "paged-decode"),
    }


def yardstick(name: str, job: Case) -> str:
    """The job that the native kernel is timed on for this one: itself where it can do it."""
    if name in ("full", "causal", "paged decode"):
        return name
    return "causal" if job.causal else "full"


@dataclass(frozen=True)
class Outcome:
    """One job at one length, and the native kernel's time for the job's share of work."""

    name: str
    row: Row
    native: Row  # of the baseline
    native_ms: float
    limit: float

    @property
    def ratio(self) -> float:
        """Ours over native."""
        assert self.row.median_ms is not None
        return self.row.median_ms / self.native_ms

    @property
    def met(self) -> bool:
        """Whether the time is within the limit."""
        return self.ratio <= self.limit


def measure(base: Case) -> list[Outcome]:
    """All jobs of a group, both passes, alternating with the native kernel."""
    return [*_measure(base, "forward"), *_measure(base, "backward")]


def _measure(base: Case, direction: str) -> list[Outcome]:
    ours = {n: case for n, case in jobs(base).items() if direction == "forward" or not case.cached}
    yardsticks = {name: yardstick(name, case) for name, case in ours.items()}
    native = {name: replace(ours[name], page_size=0) for name in sorted(set(yardsticks.values()))}
    ready = {name: flashtile(case, make_inputs(case)) for name, case in ours.items()}
    timed = {f"native {name}": _native(case) for name, case in native.items()}
    with torch.set_grad_enabled(direction in DIFFERENTIATED):
        calls = {name: prepared.call(direction) for name, prepared in (ready | timed).items()}
        samples = time_calls(calls, cpu_timer, SETTINGS)
    outcomes = []
    for name, case in ours.items():
        peak = peak_memory(ready[name], direction, SETTINGS.device)
        row = Row.of(case, "flashtile", direction).timed(case, samples[name])
        row = replace(row, backend=ready[name].backend or "", peak_mib=peak / MIB)
        other = yardsticks[name]
        peer = Row.of(native[other], "sdpa-flash", direction)
        peer = peer.timed(native[other], samples[f"native {other}"])
        assert peer.median_ms is not None
        share = flops(case, direction) / flops(native[other], direction)
        limit = SAME_JOB if name in ("full", "causal") else SAME_SCORES[direction]
        outcomes.append(Outcome(name, row, peer, peer.median_ms * share, limit))
    return outcomes


def _native(case: Case) -> Prepared:
    """PyTorch's kernel on the same tensors as flashtile."""
    return sdpa(case, make_inputs(case), SDPBackend.FLASH_ATTENTION, as_views=True)


def growth(outcomes: Sequence[Outcome]) -> float:
    """The power of the length with which the memory of one job grows; 1 is linear."""
    first, last = outcomes[0], outcomes[-1]
    lengths = last.row.seqlen_k / first.row.seqlen_k
    memory = [_counted_mib(outcome) for outcome in (first, last)]
    return math.log(memory[1] / memory[0]) / math.log(lengths)


def _counted_mib(outcome: Outcome) -> float:
    row = outcome.row
    assert row.peak_mib is not None
    if outcome.name != "bias" or row.direction == "forward":
        return row.peak_mib
    scores = row.heads_q * row.seqlen_q * row.seqlen_k
    return row.peak_mib - scores * (4 if row.dtype == "float32" else 2) / MIB


def summary(outcomes: Iterable[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Headings and a line for each job, dtype and pass, over all lengths."""
    lines = []
    ordered = sorted(outcomes, key=lambda outcome: (*_line(outcome), outcome.row.seqlen_k))
    for _, found in groupby(ordered, key=_line):
        group = list(found)
        row = group[0].row
        power = growth(group)
        failures = [str(o.row.seqlen_k) for o in group if not o.met]
        failures += ["memory"] if power > LINEAR else []
        times = [f"{o.row.median_ms:.3g} / {o.native_ms:.3g} = {o.ratio:.2f}" for o in group]
        verdict = "met" if not failures else "missed: " + ", ".join(failures)
        subject = [row.direction, row.dtype, group[0].name]
        lines.append([*subject, *times, f"{group[0].limit:.2f}", f"{power:.2f}", verdict])
    lengths = [f"{length}: ms / native = ratio" for length in LENGTHS]
    return ["pass", "dtype", "job", *lengths, "limit", "memory ~ N^", "target"], lines


def native_rows(outcomes: Iterable[Outcome]) -> list[Row]:
    """The native kernel's own lines, once each."""
    return list(dict.fromkeys(outcome.native for outcome in outcomes))


_JOBS = list(jobs(Case()))


def _line(outcome: Outcome) -> tuple[int, int, int]:
    row = outcome.row
    direction = list(SAME_SCORES).index(row.direction)
    return direction, DTYPES.index(row.dtype), _JOBS.index(outcome.name)
