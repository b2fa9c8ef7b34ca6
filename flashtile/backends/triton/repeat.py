"""Repeating a forward without Triton's own preparations, which cost more than the launch itself.

Triton looks at every argument of every launch (types, alignment, numbers worth compiling in) to
find the compiled kernel. Calls that agree in `repeat_key` agree in all of that, so the second one
goes straight to the kernel, through the public way that Triton's tutorials take:
``compiled[grid](*arguments)``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...problem import AttentionProblem, Operands
from .kernel_launch import Launch, with_scratch

_CACHE_SIZE = 1024


class Repeat(NamedTuple):
    """A launch that has been made before."""

    compiled: Any
    grid: tuple[int, int, int]
    rest: tuple[Any, ...]  # the arguments behind those that hold the call's tensors
    needs_scratch: bool

    def run(self, leading: tuple[Any, ...]) -> None:
        """Launch again, with new tensors."""
        if self.needs_scratch:
            with_scratch(self.compiled[self.grid], *leading, *self.rest)
        else:
            self.compiled[self.grid](*leading, *self.rest)


_known: dict[Any, tuple[Repeat, ...]] = {}


def repeat_key(call: Any, tensors: tuple[Any, ...]) -> Any:
    """What decides the compiled kernels of a `call`, described without its `tensors`, the first of
    which says the device."""
    facts = [call, tensors[0].device.index]
    for x in tensors:
        if x is None:
            facts.append(None)
        else:
            facts += (x.shape, x.stride(), x.dtype, x.data_ptr() % 16)
    return tuple(facts)


def forward_key(problem: AttentionProblem, operands: Operands) -> Any:
    """`repeat_key` of a forward; None for one whose launches take more than `Operands` holds."""
    if problem.has_bias or problem.block_tile is not None or operands.rng_state is not None:
        return None
    return repeat_key(problem, operands)


def known(key: Any) -> tuple[Repeat, ...] | None:
    """The launches of a call with this key, if there was one."""
    return None if key is None else _known.get(key)


def remember(key: Any, launches: list[Launch], compiled: list[Any], leading: list[int]) -> None:
    """Keep what was launched for `known`; `leading` says how many arguments hold tensors."""
    if key is None or None in compiled:
        return
    if len(_known) >= _CACHE_SIZE:
        _known.clear()
    made = zip(launches, compiled, leading, strict=True)
    _known[key] = tuple(_repeat(*one) for one in made)


def _repeat(launch: Launch, compiled: Any, leading: int) -> Repeat:
    names = launch.kernel.arg_names[leading:]
    rest = tuple(launch.arguments[name] for name in names)
    x, y, z = (*launch.grid, 1, 1)[:3]
    return Repeat(compiled, (x, y, z), rest, launch.needs_scratch)
