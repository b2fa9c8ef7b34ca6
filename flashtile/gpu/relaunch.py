"""Repeating the launches of a call without the preparations, which cost more than the launches.

A call's arguments are described (copies in boxes, strides, numbers), and Triton looks at every one
of them (types, alignment, numbers worth compiling in) to find the compiled kernel. Calls that agree
in all but their tensors' contents and places need none of that twice: the launches of the second
one are those of the first with other tensors, straight to the kernel, through the public way that
Triton's tutorials take: ``compiled[grid](*arguments)``. Calls that differ in more are described
again; a backend may say which of those share the compiled kernels, such as packed batches, whose
totals are always new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..lru import Memo
from .rows import ALIGNMENT  # Triton compiles other code for tensors that start elsewhere

Tensors = tuple[Tensor | None, ...]
Make = Callable[[Tensors], Any]


class Launch(Protocol):
    """What a backend's description of a launch offers."""

    @property
    def kernel(self) -> Any:
        """What Triton compiles."""

    @property
    def arguments(self) -> dict[str, Any]:
        """By the names of the kernel's parameters."""

    def run(self) -> Any:
        """Launch on the current device; the compiled kernel."""

    def launcher(self, compiled: Any) -> Callable[..., Any]:
        """What launches the compiled kernel on the arguments in order."""


Describe = Callable[[Tensors, Tensors], Sequence[Launch]]


class Repeat(NamedTuple):
    """A launch that has been made before."""

    launcher: Callable[..., Any]
    arguments: list[Any]  # in order
    moving: list[tuple[int, Make]]  # places of those that hold the call's tensors

    def run(self, tensors: Tensors) -> None:
        """Launch with other tensors."""
        arguments = self.arguments.copy()
        for place, make in self.moving:
            arguments[place] = make(tensors)
        self.launcher(*arguments)


# What is known of a call, where that is no list of launches. Many calls come once alone, so the
# second one decides whether its launches can be repeated: those that read copies cannot.
NEVER, ONCE, IMPOSSIBLE = "never", "once", "impossible"

_repeats: Memo[Any, list[Repeat] | str] = Memo(1024)
_compiled: Memo[Any, list[Any]] = Memo(1024)


def run_all(
    name: str,
    call: Any,
    given: Tensors,
    made: Tensors,
    describe: Describe,
    config: Any = None,
) -> None:
    """Launch what ``describe(given, made)`` says, on the device of the tensors.

    Args:
        name: of the pass.
        call: with the tensors, all that decides the launches.
        given: the tensors of the call; the first one says the device.
        made: those that were allocated for it, always in the same way.
        describe: gives the launches, of the tensors as they are or of copies.
        config: what decides the compiled kernels, where that is neither the rest of `call` nor the
            tensors' first lengths.
    """
    assert given[0] is not None
    device = given[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _run_all(name, call, given, made, describe, config)
    else:
        _run_all(name, call, given, made, describe, config)


def _run_all(
    name: str, call: Any, given: Tensors, made: Tensors, describe: Describe, config: Any
) -> None:
    key = _key(name, call, given)
    known = _repeats.get(key, NEVER)
    tensors = given + made
    if isinstance(known, list):
        for repeat in known:
            repeat.run(tensors)
        return
    if known == ONCE:  # one tensor in two places of this call may be two in the next one
        tensors = tuple(None if x is None else x.detach() for x in tensors)
    launches = describe(tensors[: len(given)], tensors[len(given) :])
    kind = key if config is None else (name, config, *map(_kind_of, given))
    compiled = _launched(launches, kind)
    if known == NEVER:
        _repeats[key] = ONCE
    elif known == ONCE:
        _repeats[key] = _repeats_of(launches, compiled, tensors)


def _key(name: str, call: Any, given: Tensors) -> Any:
    """All of a call but where its tensors lie and what they hold."""
    assert given[0] is not None
    facts = [
        None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT)
        for x in given
    ]
    return name, call, given[0].device.index, *facts


def _kind_of(x: Tensor | None) -> Any:
    """What Triton looks at in a tensor; it takes the first length as it comes."""
    if x is None:
        return None
    return x.device.index, x.dtype, x.shape[1:], x.stride(), x.data_ptr() % ALIGNMENT


def _launched(launches: Sequence[Launch], kind: Any) -> list[Any]:
    """Launch; the compiled kernels, None for one of no programs or where Triton interprets."""
    compiled = _compiled.get(kind)
    if compiled is None:
        compiled = [launch.run() for launch in launches]
        if None not in compiled:
            _compiled[kind] = compiled
        return compiled
    for launch, kernel in zip(launches, compiled, strict=True):
        launch.launcher(kernel)(*ordered(launch))
    return compiled


def _repeats_of(
    launches: Sequence[Launch], compiled: list[Any], tensors: Tensors
) -> list[Repeat] | str:
    if None in compiled:
        return IMPOSSIBLE
    made_before = zip(launches, compiled, strict=True)
    repeats = [again for one in made_before if (again := repeat_of(*one, tensors))]
    return repeats if len(repeats) == len(launches) else IMPOSSIBLE


def ordered(launch: Launch) -> list[Any]:
    """The arguments in the order of the kernel's parameters."""
    return [launch.arguments[name] for name in launch.kernel.arg_names]


def repeat_of(launch: Launch, compiled: Any, tensors: Tensors) -> Repeat | None:
    """How to make a launch again with other `tensors`; None for one that reads a copy of them."""
    numbers = _numbers_of(tensors)
    arguments, moving = ordered(launch), []
    try:
        for place, argument in enumerate(arguments):
            make = _maker(argument, numbers)
            if make is not None:
                moving.append((place, make))
                arguments[place] = None
    except LookupError:
        return None
    return Repeat(launch.launcher(compiled), arguments, moving)


def _numbers_of(tensors: Tensors) -> dict[Any, int]:
    """Tensors by identity, and by where they start, which says all of a view of one of them."""
    present = [(number, x) for number, x in enumerate(tensors) if x is not None]
    starts = Counter(x.data_ptr() for _, x in present)
    by_start = {("at", x.data_ptr()): number for number, x in present if starts[x.data_ptr()] == 1}
    return by_start | {id(x): number for number, x in present}


def _number_of(x: Tensor, numbers: dict[Any, int]) -> int:
    number = numbers.get(id(x))
    return numbers["at", x.data_ptr()] if number is None else number


def _maker(argument: Any, numbers: dict[Any, int]) -> Make | None:
    """What makes an argument out of other tensors; None for one that holds none.

    Raises:
        LookupError: it holds a tensor that is none of the call's.
    """
    if isinstance(argument, Tensor):
        return itemgetter(_number_of(argument, numbers))
    if isinstance(argument, tuple):
        return _tuple_maker(argument, numbers)
    if isinstance(getattr(argument, "base", None), Tensor):
        return _descriptor_maker(argument, _number_of(argument.base, numbers))
    return None


def _tuple_maker(argument: Any, numbers: dict[Any, int]) -> Make | None:
    """Of a named tuple."""
    makers = [_maker(part, numbers) for part in argument]
    if not any(makers):
        return None
    parts = [
        (part if make is None else None, make) for part, make in zip(argument, makers, strict=True)
    ]
    kind = type(argument)

    def make(tensors: Tensors) -> Any:
        return kind._make(part if make is None else make(tensors) for part, make in parts)

    return make


def _descriptor_maker(argument: Any, number: int) -> Make:
    """Of a tensor described for TMA: the same description, without Triton's checks."""
    kind = type(argument)
    fields = {**vars(argument), "base": None}

    def make(tensors: Tensors) -> Any:
        fresh = object.__new__(kind)
        fresh.__dict__ = fields.copy()
        fresh.__dict__["base"] = tensors[number]
        return fresh

    return make
