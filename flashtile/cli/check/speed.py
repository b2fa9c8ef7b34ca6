"""Time some calls alternately with PyTorch's `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import api
from ..timing import Call, Timing, interleave, timer_for

HEADS, BUDGET_MS = 8, 500.0

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """Lengths and head dim of a causal call, batch 1 on a CPU and 8 on a GPU."""

    length: int
    head_dim: int


SHAPES = (Shape(1024, 64), Shape(2048, 64), Shape(2048, 128))


class Time(NamedTuple):
    """Medians of one pass, in milliseconds."""

    shape: Shape
    direction: str
    flashtile: float
    sdpa: float


def measure(shapes: tuple[Shape, ...], device: str) -> Iterator[Time]:
    """Time each shape: the forward, and forward and backward together."""
    on_gpu = torch.device(device).type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for shape in shapes:
        size = (8 if on_gpu else 1, shape.length, HEADS, shape.head_dim)
        q, k, v, dout = torch.randn(4, *size, device=device, dtype=dtype).unbind()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        for direction, way in (("forward", _forward), ("forward and backward", _both)):
            calls = {f.__name__: way(f, leaves, dout) for f in (flashtile, sdpa)}
            samples = interleave(calls, timer_for(device), budget_ms=BUDGET_MS)
            medians = (Timing.of(samples[name]).median_ms for name in calls)
            yield Time(shape, direction, *medians)


def table(times: Iterable[Time]) -> list[list[str]]:
    """Headings, then a line for each time."""
    headings = ["tokens", "head dim", "pass", "flashtile ms", "SDPA ms", "flashtile is"]
    lines = [
        [
            f"{time.shape.length:,}",
            str(time.shape.head_dim),
            time.direction,
            f"{time.flashtile:.3g}",
            f"{time.sdpa:.3g}",
            f"{time.sdpa / time.flashtile:.2f} x as fast",
        ]
        for time in times
    ]
    return [headings, *lines]


def flashtile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = api.attention(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    return out


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _forward(attend: Attend, leaves: list[Tensor], dout: Tensor) -> Call:
    detached = [x.detach() for x in leaves]
    return lambda: attend(*detached)


def _both(attend: Attend, leaves: list[Tensor], dout: Tensor) -> Call:
    return lambda: torch.autograd.grad(attend(*leaves), leaves, dout)
