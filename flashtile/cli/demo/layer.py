"""One attention layer of SmolLM2 at growing length: its time and its memory."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ... import attention
from ...bench.measure import peak_bytes, timer_for

HEADS, KEY_HEADS, HEAD_DIM = 9, 3, 64  # of SmolLM2-135M
PASSES = ("forward", "forward + backward")
BUDGET_MS = 1500.0  # of timing, for one way at one length
MAX_ROUNDS = 9

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as the textbook has it, with the whole (seq, seq) matrix in memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill_(hidden, -math.inf).softmax(-1) @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by PyTorch's fused attention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)


def flashtile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by flashtile."""
    return cast(Tensor, attention(q, k, v, causal=True))


LAYERS: dict[str, Layer] = {"standard": standard, "sdpa": sdpa, "flashtile": flashtile}


class Row(NamedTuple):
    """One way to attend, at one length."""

    name: str
    length: int
    direction: str  # one of `PASSES`
    milliseconds: float | None  # None: not enough memory to run it
    peak_mib: float | None
    error: float | None  # largest difference from standard attention, of the result


class Layers(NamedTuple):
    """All rows, and what they say about growth."""

    rows: list[Row]

    def column(self, name: str, direction: str) -> list[Row]:
        """The rows of one line in the picture, by length."""
        return [r for r in self.rows if (r.name, r.direction) == (name, direction)]

    def growth(self, name: str, direction: str) -> float:
        """The exponent of memory against length over the last doubling: 2 is quadratic, 1 linear."""
        rows = [r for r in self.column(name, direction) if r.peak_mib is not None]
        (n1, m1), (n2, m2) = ((r.length, cast(float, r.peak_mib)) for r in rows[-2:])
        return math.log(m2 / m1) / math.log(n2 / n1)

    @property
    def passed(self) -> bool:
        """Standard attention's memory is quadratic, flashtile's a straight line; equal results."""
        return all(
            self.growth("standard", direction) > 1.7 and self.growth("flashtile", direction) < 1.3
            for direction in PASSES
        ) and all(r.error is None or r.error < 1e-4 for r in self.rows)


def measure(lengths: Sequence[int], device: str) -> Iterator[Row]:
    """Every way, direction and length, the ways in turns."""
    for length in lengths:
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(1, length, heads, HEAD_DIM, device=device)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        dout = torch.randn(1, length, HEADS, HEAD_DIM, device=device)
        fits = standard_bytes(length) < 0.8 * free_bytes(device)
        names = [name for name in LAYERS if fits or name != "standard"]
        errors = _errors(q, k, v) if fits else {}
        for direction in PASSES:
            calls = {name: _call(LAYERS[name], direction, q, k, v, dout) for name in names}
            peaks = {name: peak_bytes(call, device) / 2**20 for name, call in calls.items()}
            times = _times(calls, device)
            for name in LAYERS:
                time, peak = times.get(name), peaks.get(name)
                yield Row(name, length, direction, time, peak, errors.get(name))


def standard_bytes(length: int) -> int:
    """What standard attention needs at the most, forward and backward: five score matrices."""
    return 5 * HEADS * length**2 * 4


def free_bytes(device: str) -> float:
    """Memory that can be had, in bytes; infinite where the system does not say."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return math.inf


def _errors(q: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
    with torch.no_grad():
        want = standard(q, k, v)
        return {
            name: (layer(q, k, v) - want).abs().max().item()
            for name, layer in LAYERS.items()
            if name != "standard"
        }


def _call(
    layer: Layer, direction: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Callable[[], object]:
    if direction == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return layer(q, k, v)

        return forward
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(layer(*leaves), leaves, dout)


def _times(calls: dict[str, Callable[[], object]], device: str) -> dict[str, float]:
    """Median milliseconds; two turns at least, more while they are cheap."""
    timer = timer_for(device)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for done in range(MAX_ROUNDS):
        for name, call in calls.items():
            if done < 2 or sum(samples[name]) < BUDGET_MS:
                samples[name].append(timer(call))
    return {name: statistics.median(times) for name, times in samples.items()}
