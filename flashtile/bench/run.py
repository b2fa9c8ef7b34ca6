"""One case measured: every peer timed in turns, then its memory and its error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TextIO

import torch
from torch import Tensor

from ..testing import attention_reference, attention_varlen_reference
from .measure import Errors, Timer, captured, errors, interleave, peak_bytes, timer_for
from .peers import PEERS, prepare
from .prepared import Prepared, Skip
from .report import Row
from .shapes import Case, Inputs, crop, make_inputs, visible

ACCURACY_LENGTH = 1024  # longer cases are judged on a crop of this length
MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """How to measure, whatever the case."""

    device: str = "cpu"
    peers: tuple[str, ...] = ("flashtile", "sdpa", "standard")
    directions: tuple[str, ...] = ("forward",)
    seconds: float = 0.5  # of timing, a peer and a pass
    min_rounds: int = 5
    memory: bool = True
    accuracy: bool = True
    cuda_graph: bool = False  # forward alone


def measure_case(case: Case, settings: Settings, timer: Timer | None = None) -> list[Row]:
    """A row for each pass and peer, skipped peers included."""
    timer = timer or timer_for(settings.device)
    inputs = make_inputs(case, settings.device)
    rows = []
    for direction in settings.directions:
        ready: dict[str, Prepared] = {}
        skipped: dict[str, str] = {}
        for name in settings.peers:
            try:
                if case.cached and direction == "backward":
                    raise Skip("a cache has no backward")
                ready[name] = prepare(name, case, inputs, direction == "backward")
            except Skip as reason:
                skipped[name] = str(reason)
        samples = time_passes(ready, direction, timer, settings)
        for name in settings.peers:
            row = Row.of(case, name, direction)
            if name in skipped:
                rows.append(replace(row, skipped=skipped[name]))
            else:
                rows.append(_filled(row, name, case, ready[name], samples[name], settings))
    return rows


def time_passes(
    ready: dict[str, Prepared], direction: str, timer: Timer, settings: Settings
) -> dict[str, list[float]]:
    """Samples in milliseconds of one pass, by peer."""
    calls: dict[str, Callable[[], object]] = {}
    with torch.set_grad_enabled(direction == "backward"):
        for name, prepared in ready.items():
            calls[name] = prepared.backward() if direction == "backward" else prepared.forward
            if settings.cuda_graph and direction == "forward":
                calls[name] = captured(prepared.forward)
        budget = settings.seconds * 1e3 * len(calls)
        return interleave(calls, timer, budget_ms=budget, min_rounds=settings.min_rounds)


def _filled(
    row: Row,
    peer: str,
    case: Case,
    prepared: Prepared,
    samples: list[float],
    settings: Settings,
) -> Row:
    """`row` with the time from the samples, the memory and the error."""
    row = replace(row.timed(case, samples), backend=prepared.backend or row.backend)
    if settings.memory:
        row = replace(row, peak_mib=peak_memory(prepared, row.direction, settings.device) / MIB)
    if settings.accuracy and not case.dropout:  # each library drops other elements
        found = accuracy(peer, case, prepared, row.direction, settings.device)
        row = replace(row, max_error=found.max_error, rms_error=found.rms_error)
    return row


def peak_memory(prepared: Prepared, direction: str, device: str) -> int:
    """Bytes above the inputs: of the forward, or of the forward with the backward behind it."""
    with torch.set_grad_enabled(direction == "backward"):
        backward = direction == "backward"
        return peak_bytes(prepared.forward_and_backward if backward else prepared.forward, device)


def accuracy(peer: str, case: Case, prepared: Prepared, direction: str, device: str) -> Errors:
    """Error of the output (forward) or of all gradients together (backward) against float64."""
    small = crop(case, ACCURACY_LENGTH)
    if small != case:
        prepared = PEERS[peer](small, make_inputs(small, device))
    backward = direction == "backward"
    names = ("out", *prepared.leaves)
    if backward:
        got = prepared.forward_and_backward()
    else:
        with torch.no_grad():
            got = (prepared.forward(),)
    found = [prepared.public(name, x) for name, x in zip(names, got, strict=False)]
    wanted = truth(small, backward)
    return errors(found[1:], wanted[1:]) if backward else errors(found[:1], wanted[:1])


@lru_cache(maxsize=2)
def truth(case: Case, backward: bool) -> tuple[Tensor, ...]:
    """Out and, on request, the gradients of q, k, v, bias and sink, in float64."""
    inputs = make_inputs(case)
    options: dict[str, Any] = {
        "causal": case.causal,
        "window_size": case.window,
        "attention_chunk": case.chunk,
        "softcap": case.softcap,
        "alibi_slopes": inputs.alibi_slopes,
    }
    if inputs.tiles is not None:
        options["block_mask"] = visible(case, inputs, case.seqlen_q, case.seqlen_k)
    leaves = _double_leaves(inputs)
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    options |= {name: x for name, x in leaves.items() if name in ("bias", "sink")}
    with torch.set_grad_enabled(backward):
        if inputs.cu_seqlens is None:
            out = attention_reference(q, k, v, **options).out
        else:
            cu, longest = inputs.cu_seqlens, int(inputs.cu_seqlens.diff().max())
            out = attention_varlen_reference(q, k, v, cu, cu, longest, longest, **options).out
    if not backward:
        return (out,)
    return out, *torch.autograd.grad(out, tuple(leaves.values()), inputs.dout.double())


def _double_leaves(inputs: Inputs) -> dict[str, Tensor]:
    named = {name: getattr(inputs, name) for name in ("q", "k", "v", "bias", "sink")}
    return {name: x.double().requires_grad_() for name, x in named.items() if x is not None}


def with_progress(cases: Iterable[Case], stream: TextIO | None = None) -> Iterator[Case]:
    """Yield the cases and say on `stream`, by default stderr, which one is being measured."""
    cases, stream = list(cases), stream or sys.stderr
    begin, end = ("\r\x1b[K", "") if stream.isatty() else ("", "\n")
    start = time.monotonic()
    for number, case in enumerate(cases, 1):
        elapsed = time.monotonic() - start
        text = f"[{number}/{len(cases)}, {elapsed:.0f} s] {case.label}"
        print(f"{begin}{text}", end=end, file=stream, flush=True)
        yield case
    print(f"{begin}measured {len(cases)} cases in {time.monotonic() - start:.0f} s", file=stream)
