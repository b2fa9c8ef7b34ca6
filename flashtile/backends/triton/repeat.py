"""Repeating a plain forward launch without Triton's own preparations, which cost more than the
launch itself.

Triton looks at every argument of every launch (types, alignment, numbers worth compiling in) to
find the compiled kernel. Calls that agree in `repeat_key` agree in all of that, so the second one
goes straight to the kernel, through the public way that Triton's tutorials take:
``compiled[grid](*arguments)``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...problem import AttentionProblem, Operands

_CACHE_SIZE = 1024


class Repeat(NamedTuple):
    """A launch that has been made before."""

    compiled: Any
    grid: tuple[int, int, int]
    rest: tuple[Any, ...]  # the arguments behind q, k, v, out and lse
    needs_scratch: bool


_known: dict[Any, Repeat] = {}


def repeat_key(problem: AttentionProblem, operands: Operands) -> Any:
    """What decides the compiled kernel; None for a call with more than q, k, v to it."""
    if problem.layout != "dense" or any(x is not None for x in operands[3:]):
        return None
    q, k, v = operands.q, operands.k, operands.v
    alignment = q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16
    return problem, q.device.index, q.stride(), k.stride(), v.stride(), alignment


def known(key: Any) -> Repeat | None:
    """The launch of a call with this key, if there was one."""
    return None if key is None else _known.get(key)


def remember(key: Any, repeat: Repeat) -> None:
    """Keep a launch for `known`."""
    if len(_known) >= _CACHE_SIZE:
        _known.clear()
    _known[key] = repeat


def run(repeat: Repeat, leading: tuple[Any, ...], lse: Tensor) -> None:
    """Launch again, with new tensors."""
    repeat.compiled[repeat.grid](*leading, lse, *repeat.rest)
