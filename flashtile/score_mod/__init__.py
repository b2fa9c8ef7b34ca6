"""Score functions, ``score_mod(score, b, h, i, j)``, as in FlexAttention.

A function is traced on single numbers (`trace`), written as a `Program` of pointwise operations
(`convert`, `program`) and differentiated as such (`derivative`). Backends get the texts of both
programs, and the numbers of all captured tensors in two buffers. `evaluate` runs programs on tiles
in PyTorch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..autocast import autocast_off, without_autocast
from ..lru import Memo
from . import in_graph
from .closure import dependencies
from .derivative import derivative
from .program import parsed
from .trace import ScoreFunction, Traced, traced
from .window import windowed

__all__ = [
    "Described",
    "ScoreFunction",
    "derivative",
    "described",
    "parsed",
    "times_traced",
    "windowed",
]


class Described(NamedTuple):
    """A score function for one call."""

    program: str
    values: Tensor | None  # (n,) float32 or float64, the captured floating-point numbers, in order
    integers: Tensor | None  # (n,) int64, the captured integers and bools


class _Trace(NamedTuple):
    """A trace without the captured tensors: their indices among those of `dependencies`."""

    trace: Traced
    captured: tuple[int, ...]


_traces: Memo[Any, _Trace] = Memo(256)
_times: Memo[str, int] = Memo(256)  # that a function with this program has been traced
_lock = threading.Lock()


def described(function: ScoreFunction, dtype: torch.dtype, device: torch.device) -> Described:
    """The program of a score function and the numbers that it reads, for scores of `dtype`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `trace.traced`.
    """
    if is_dynamo_compiling():
        recorded = in_graph.recorded(function, dtype, device)
        if not recorded:
            return torch.compiler.disable(described)(function, dtype, device)
        return _with_buffers(recorded[0], recorded[1:], device)
    known = dependencies(function)
    if known is None:
        found = _traced(function, dtype, device)
        return _described(found, found.captured, device)
    facts, tensors = known
    key = (facts, dtype, device, torch.get_default_dtype(), torch.get_default_device())
    memo = _traces.get(key)
    if memo is None:
        found = _traced(function, dtype, device)
        numbers = {id(x): number for number, x in enumerate(tensors)}
        if all(id(x) in numbers for x in found.captured):
            indices = tuple(numbers[id(x)] for x in found.captured)
            _traces[key] = _Trace(found._replace(captured=()), indices)
        return _described(found, found.captured, device)
    return _described(memo.trace, tuple(tensors[n] for n in memo.captured), device)


def times_traced(program: str) -> int:
    """How often functions with this program have been traced in this process since the caches were
    last emptied.
    """
    return _times.get(program, 0)


def _traced(function: ScoreFunction, dtype: torch.dtype, device: torch.device) -> Traced:
    found = traced(function, dtype, device)
    with _lock:
        for program in {found.program, windowed(found.program).program}:
            _times[program] = _times.get(program, 0) + 1
    return found


def _described(trace: Traced, captured: tuple[Tensor, ...], device: torch.device) -> Described:
    with autocast_off(device):
        tensors = trace.preparation(*captured)
    return _with_buffers(trace.program, tensors, device)


def _with_buffers(program: str, tensors: Sequence[Tensor], device: torch.device) -> Described:
    for x in tensors:
        if x.device != device and x.dim() > 0:
            raise ValueError(f"score_mod: got a captured tensor on {x.device}, want {device}")
    values = [x for x in tensors if x.is_floating_point()]
    integers = [x for x in tensors if not x.is_floating_point()]
    is_double = any(x.dtype == torch.float64 for x in values)
    return Described(
        program,
        _buffer(values, torch.float64 if is_double else torch.float32, device),
        _buffer(integers, torch.int64, device),
    )


def _buffer(tensors: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """All numbers of the tensors, one after the other."""
    if not tensors:
        return None
    return _joined(tensors[0], [x.to(device, dtype).reshape(-1) for x in tensors])


@without_autocast
def _joined(first: Tensor, flat: list[Tensor]) -> Tensor:
    return flat[0] if len(flat) == 1 else torch.cat(flat)
