"""Measure one case: time all peers alternately, then the memory and the error of each."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TextIO

import torch
from torch import Tensor

from flashtile.cli.timing import Call, Timer, Timing, interleave, timer_for
from flashtile.testing import attention_reference, attention_varlen_reference

from .float8 import QUANTIZERS
from .layer import in_layer
from .measure import (
    Errors,
    HostTimer,
    captured,
    errors,
    matmul_tflops,
    memory_bytes,
    peak_bytes,
    read_gbps,
)
from .peers import PEERS, failures_of
from .prepared import DIFFERENTIATED, EXTRA_LEAVES, Prepared, Skip
from .rows import Row
from .shapes import Case, Inputs, document_lengths, make_inputs, visible

MIB = 2**20
TRUTH_MATRICES = 16  # score matrices that the float64 reference holds at once, with its gradients
HOST_SECONDS = 1.0  # for timing the host, for each case and pass


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
    host: bool = False  # the host's time of a call as well
    cuda_graph: bool = False  # only forward and decode


@dataclass(frozen=True)
class Task:
    """One pass of one case, with the data that its measurements share."""

    case: Case
    direction: str
    inputs: Inputs
    settings: Settings
    timer: Timer
    truth: dict[str, Tensor]  # `accuracy` compares with these; empty if it is not wanted


def measure_case(case: Case, settings: Settings, timer: Timer | None = None) -> list[Row]:
    """A row for each pass and peer. The skipped say why; all do when the case itself failed."""
    directions = [row_direction(case, direction) for direction in settings.directions]
    try:
        with failures_of("flashtile"):
            return _measure_passes(case, directions, settings, timer)
    except Skip as reason:
        pairs = product(directions, settings.peers)
        rows = [Row.of(case, name, direction) for direction, name in pairs]
        return [replace(row, skipped=str(reason)) for row in rows]


def _measure_passes(
    case: Case, directions: list[str], settings: Settings, timer: Timer | None
) -> list[Row]:
    inputs = make_inputs(case, settings.device)
    timer = timer or timer_for(settings.device)
    wanted: dict[str, Tensor] = {}
    if settings.accuracy and _has_truth(case, inputs):
        wanted = truth(case, inputs, any(direction in DIFFERENTIATED for direction in directions))
    rows = []
    for direction in directions:
        with torch.set_grad_enabled(direction in DIFFERENTIATED):
            rows += _measure(Task(case, direction, inputs, settings, timer, wanted))
    return rows


def row_direction(case: Case, direction: str) -> str:
    """What rows call a pass of this case."""
    if case.recipe is not None and direction == "forward":
        return "quantize"
    return "decode" if case.cached and direction == "forward" else direction


def _measure(task: Task) -> list[Row]:
    """The rows of all peers; they are timed together, other quantities are measured one by one."""
    settings = task.settings
    rows = {name: Row.of(task.case, name, task.direction) for name in settings.peers}
    ready: dict[str, Prepared] = {}
    calls: dict[str, Call] = {}
    for name in settings.peers:
        try:
            ready[name], calls[name] = prepare(name, task)
        except Skip as reason:
            rows[name] = replace(rows[name], skipped=str(reason))
    samples = time_calls(calls, task.timer, settings)
    host: Mapping[str, list[float]] = {}
    if settings.host:
        budget = HOST_SECONDS * 1e3 / HostTimer.BURST  # a sample is the mean of a burst
        host = interleave(calls, HostTimer(settings.device), budget_ms=budget)
    calls.clear()  # a backward holds its forward's results
    for name, prepared in ready.items():
        row = rows[name].timed(task.case, samples[name])
        row = replace(row, backend=prepared.backend or row.backend)
        if host:
            row = replace(row, host_us=Timing.of(host[name]).median_ms * 1e3)
        try:
            with failures_of(name):
                rows[name] = _examined(row, prepared, task)
        except Skip as reason:
            rows[name] = replace(rows[name], skipped=str(reason))
    return list(rows.values())


def prepare(name: str, task: Task) -> tuple[Prepared, Call]:
    """The call of the peer `name`, run once to see that it works.

    Raises:
        Skip: the peer is missing here or cannot do the case.
    """
    if task.case.cached and task.direction in DIFFERENTIATED:
        raise Skip("a cache has no backward")
    if task.case.recipe is not None and name not in QUANTIZERS:
        raise Skip("attends, and this case quantises")
    with failures_of(name):
        prepared = PEERS[name](task.case, task.inputs)
        if task.case.layer:
            prepared = in_layer(prepared, task.case)
        call = prepared.call(task.direction)
        if task.settings.cuda_graph and task.direction not in DIFFERENTIATED:
            call = captured(call)
        call()
    return prepared, call


def time_calls(
    calls: Mapping[str, Call], timer: Timer, settings: Settings
) -> dict[str, list[float]]:
    """Samples in milliseconds, by peer."""
    budget = settings.seconds * 1e3 * len(calls)
    return interleave(calls, timer, budget_ms=budget, min_rounds=settings.min_rounds)


def _examined(row: Row, prepared: Prepared, task: Task) -> Row:
    """`row` with the memory, the error and the share of the GPU's best."""
    settings = task.settings
    if settings.memory:
        peak = peak_memory(prepared, task.direction, settings.device)
        row = replace(row, peak_mib=peak / MIB)
    if task.truth:
        row = replace(row, **accuracy(prepared, task)._asdict())
    if torch.device(settings.device).type == "cuda":
        if row.tflops is not None:
            best = matmul_tflops(settings.device, task.case.torch_dtype)
            row = replace(row, percent_of_matmul=100 * row.tflops / best)
        if row.gbps is not None:
            row = replace(row, percent_of_read=100 * row.gbps / read_gbps(settings.device))
    return row


def peak_memory(prepared: Prepared, direction: str, device: str) -> int:
    """Bytes above the inputs: of the forward, or of the forward with its backward."""
    backward = direction in DIFFERENTIATED
    with torch.set_grad_enabled(backward):
        return peak_bytes(prepared.forward_and_backward if backward else prepared.forward, device)


def accuracy(prepared: Prepared, task: Task) -> Errors:
    """Error of the output (forward), of all gradients together (backward) or of everything."""
    names = ("out", *prepared.leaves)
    if task.direction in DIFFERENTIATED:
        results = prepared.forward_and_backward()
    else:
        results = (prepared.forward(),)
    got = {name: prepared.public(name, x) for name, x in zip(names, results, strict=False)}
    if task.direction == "backward":
        del got["out"]
    part = [_first_group(task.case, name, x) for name, x in got.items()]
    return errors(part, [task.truth[name] for name in got])


def _first_group(case: Case, name: str, x: Tensor) -> Tensor:
    """The part of a tensor that belongs to the first key head and the query heads it serves."""
    heads = 1 if name in ("k", "v") else case.heads_q // case.heads_kv
    return x.narrow({"sink": 0, "relative_bias": 0, "bias": 1}.get(name, -2), 0, heads)


def _has_truth(case: Case, inputs: Inputs) -> bool:
    """Whether float64 can judge it: no layer, no dropout, enough memory, and no cache that differs
    from the case's keys."""
    scores = case.batch * case.seqlen_q * case.seqlen_k
    if case.documents:  # padded to the longest
        scores = case.documents * max(document_lengths(case)) ** 2
    wanted = TRUTH_MATRICES * 8 * scores * case.heads_q // case.heads_kv
    return (
        not (case.dropout or case.layer or case.cache_dtype or case.appends or case.recipe)
        and wanted < (memory_bytes(inputs.q.device) or wanted) / 2
    )


def truth(case: Case, inputs: Inputs, backward: bool) -> dict[str, Tensor]:
    """Out and, on request, the gradients by name, in float64, of the first key head's group."""
    options: dict[str, Any] = {
        "causal": case.causal,
        "window_size": case.window,
        "attention_chunk": case.chunk,
        "softcap": case.softcap,
    }
    if inputs.alibi_slopes is not None:
        options["alibi_slopes"] = inputs.alibi_slopes[: case.heads_q // case.heads_kv]
    if inputs.tiles is not None or case.prefix:
        options |= {"causal": False, "window_size": (-1, -1), "attention_chunk": 0}
        options["block_mask"] = visible(case, inputs, case.seqlen_q, case.seqlen_k)
    named = {name: getattr(inputs, name) for name in ("q", "k", "v", *EXTRA_LEAVES)}
    leaves = {
        name: _first_group(case, name, x).double().requires_grad_()
        for name, x in named.items()
        if x is not None
    }
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    options |= {name: x for name, x in leaves.items() if name in EXTRA_LEAVES}
    if "relative_bias" in options:
        options["bias"] = _by_distance(options.pop("relative_bias"), case)
    with torch.set_grad_enabled(backward), inputs.q.device:
        if inputs.cu_seqlens is None:
            out = attention_reference(q, k, v, **options).out
        else:
            cu, longest = inputs.cu_seqlens, int(inputs.cu_seqlens.diff().max())
            out = attention_varlen_reference(q, k, v, cu, cu, longest, longest, **options).out
    if not backward:
        return {"out": out}
    dout = _first_group(case, "out", inputs.dout).double()
    gradients = torch.autograd.grad(out, tuple(leaves.values()), dout)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def _by_distance(table: Tensor, case: Case) -> Tensor:
    """A relative bias as a matrix for each head, (heads, M, N). Its backward takes atomics: that of
    indexing handles a number that millions of scores share on one thread."""
    M, N, R = case.seqlen_q, case.seqlen_k, case.relative
    rows, keys = (torch.arange(n, device=table.device) for n in (M, N))
    column = (keys - rows[:, None] - (N - M)).clamp(-R, R) + R
    return table.index_select(1, column.flatten()).unflatten(1, (M, N))


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
