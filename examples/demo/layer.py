"""One attention layer of SmolLM2 at growing length: its time and its memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from benchmarks.measure import peak_bytes
from flashtile import attention

from .turns import best_of_three

HEADS, KEY_HEADS, HEAD_DIM = 9, 3, 64  # of SmolLM2-135M
PASSES = ("forward", "forward + backward")
STANDARD_UP_TO = {"cpu": 4096, "cuda": 8192}  # tokens; beyond, it takes minutes
COMPARED = 256  # queries whose results are compared: the last ones, which see the most keys
# The dtype of each kind of device, and the difference that its rounding explains.
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Textbook causal attention, with the whole (seq, seq) matrix in memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    M, N = scores.shape[2:]
    hidden = torch.ones(M, N, dtype=torch.bool, device=q.device).triu(1 + N - M)
    return (scores.masked_fill_(hidden, -math.inf).softmax(-1) @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with PyTorch's fused attention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def flashtile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with flashtile."""
    return attention(q, k, v, causal=True)


LAYERS: dict[str, Layer] = {"standard": standard, "sdpa": sdpa, "flashtile": flashtile}


class Row(NamedTuple):
    """One way to attend, at one length."""

    name: str
    length: int
    direction: str  # one of `PASSES`
    milliseconds: float | None  # None: it takes too long, or too much memory
    peak_mib: float | None
    error: float  # largest difference from standard attention, over the last queries


class Layers(NamedTuple):
    """All rows, and how they grow with the length."""

    rows: list[Row]
    dtype: torch.dtype = torch.float32

    def column(self, name: str, direction: str) -> list[Row]:
        """The measured rows of one line in the picture, by length."""
        return [
            row
            for row in self.rows
            if (row.name, row.direction) == (name, direction) and row.peak_mib is not None
        ]

    def growth(self, name: str, direction: str) -> float:
        """The exponent of memory over the last doubling of length: 2 is quadratic, 1 linear."""
        before, last = self.column(name, direction)[-2:]
        ratio = cast(float, last.peak_mib) / cast(float, before.peak_mib)
        return math.log(ratio) / math.log(last.length / before.length)

    @property
    def error(self) -> float:
        """The largest difference from standard attention, of any row."""
        return max(row.error for row in self.rows)

    @property
    def passed(self) -> bool:
        """Standard attention's memory is quadratic, flashtile's a straight line; equal results."""
        return all(row.error < TOLERANCES[self.dtype] for row in self.rows) and all(
            self.growth("standard", direction) > 1.7 and self.growth("flashtile", direction) < 1.3
            for direction in PASSES
        )


def measure(lengths: Sequence[int], device: str) -> Iterator[Row]:
    """Every way, direction and length."""
    dtype = DTYPES[device]
    for length in lengths:
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(1, length, heads, HEAD_DIM, device=device, dtype=dtype)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        dout = torch.randn(1, length, HEADS, HEAD_DIM, device=device, dtype=dtype)
        fits = length <= STANDARD_UP_TO[device] and standard_bytes(length) < 0.9 * free_bytes(
            device
        )
        errors = _errors(q, k, v)
        for direction in PASSES:
            calls = {
                name: _call(layer, direction, q, k, v, dout)
                for name, layer in LAYERS.items()
                if fits or name != "standard"
            }
            peaks = {name: peak_bytes(call, device) / 2**20 for name, call in calls.items()}
            seconds = best_of_three(calls, device)
            for name in LAYERS:
                milliseconds = seconds[name] * 1e3 if name in seconds else None
                yield Row(name, length, direction, milliseconds, peaks.get(name), errors[name])


def standard_bytes(length: int) -> int:
    """Bytes to train with standard attention in float32: a bit more than three score matrices."""
    return round(3.2 * HEADS * length**2 * 4)


def free_bytes(device: str) -> float:
    """Available memory in bytes; infinite if the system does not report it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        facts = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        if "MemAvailable" in facts:
            return int(facts["MemAvailable"].split()[0]) * 1024
    if hasattr(os, "sysconf"):  # elsewhere half of what is built in
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    return math.inf


def _errors(q: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
    with torch.no_grad():
        want = standard(q[:, -COMPARED:].float(), k.float(), v.float())
        return {
            name: 0.0
            if name == "standard"
            else (layer(q, k, v)[:, -COMPARED:].float() - want).abs().max().item()
            for name, layer in LAYERS.items()
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
