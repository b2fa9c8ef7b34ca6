"""Memoised launches: a call like an earlier one is launched without preparing its arguments again.

For a first call, the backend describes its launches (tensors with strides, numbers), and Triton
inspects every argument (type, alignment, specialised values) to find the compiled kernel. Both take
longer than the launch. A later call that differs only in the contents and addresses of its tensors
reuses the earlier launches with its own tensors and goes straight to the compiled kernel, through
the public interface ``compiled[grid](*arguments)``. Other calls are described again; a backend may
declare that they share compiled kernels, such as packed batches, whose total length always differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..lru import Memo
from .rows import ALIGNMENT  # Triton specialises kernels for tensors that start at multiples of it

if TYPE_CHECKING:  # the module imports Triton
    from .launch import Launch

Tensors = tuple[Tensor | None, ...]
Make = Callable[[Tensors], Any]


Describe = Callable[[Tensors, Tensors], "Sequence[Launch]"]


class Repeat(NamedTuple):
    """A launch that has been made before."""

    launcher: Callable[..., Any]
    arguments: list[Any]  # in order
    tensors: list[tuple[int, Make]]  # indices of the arguments that hold the call's tensors

    def run(self, tensors: Tensors) -> None:
        """Launch with other tensors."""
        arguments = self.arguments.copy()
        for index, make in self.tensors:
            arguments[index] = make(tensors)
        self.launcher(*arguments)


# States of a call without memoised launches. Many calls occur only once, so only the second call
# determines whether its launches can be repeated; launches that read copies of tensors cannot.
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
    """Make the launches of ``describe(given, made)`` on the device of the tensors.

    Args:
        name: name of the pass.
        call: hashable; together with the tensors' metadata, it determines the launches.
        given: the tensors of the call; the first one determines the device.
        made: the tensors that the call allocates, always in the same way.
        describe: returns the launches, which read the tensors themselves or copies.
        config: hashable; determines the compiled kernels, if these depend neither on all of `call`
            nor on the first sizes of the tensors.
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
    if known == ONCE:  # a tensor that this call passes twice may be two tensors in the next call
        tensors = tuple(None if x is None else x.detach() for x in tensors)
    launches = describe(tensors[: len(given)], tensors[len(given) :])
    kind = key if config is None else (name, config, *map(_kind_of, given))
    compiled = _launched(launches, kind)
    if known == NEVER:
        _repeats[key] = ONCE
    elif known == ONCE:
        _repeats[key] = _repeats_of(launches, compiled, tensors)


def _key(name: str, call: Any, given: Tensors) -> Any:
    """Everything about a call except the addresses and the contents of its tensors."""
    assert given[0] is not None
    facts = [
        None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT)
        for x in given
    ]
    return name, call, given[0].device.index, *facts


def _kind_of(x: Tensor | None) -> Any:
    """The properties of a tensor that Triton specialises on; the first size is not one of them."""
    if x is None:
        return None
    return x.device.index, x.dtype, x.shape[1:], x.stride(), x.data_ptr() % ALIGNMENT


def _launched(launches: Sequence[Launch], kind: Any) -> list[Any]:
    """Launch and return the compiled kernels; None for an empty grid and under the interpreter."""
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
    """How to repeat a launch with other `tensors`; None if it reads a copy of one of them."""
    numbers = _numbers_of(tensors)
    arguments, makers = ordered(launch), []
    try:
        for index, argument in enumerate(arguments):
            make = _maker(argument, numbers)
            if make is not None:
                makers.append((index, make))
                arguments[index] = None
    except LookupError:
        return None
    return Repeat(launch.launcher(compiled), arguments, makers)


def _numbers_of(tensors: Tensors) -> dict[Any, int]:
    """Indices of the tensors by identity and by start address, which identifies their views."""
    present = [(number, x) for number, x in enumerate(tensors) if x is not None]
    starts = Counter(x.data_ptr() for _, x in present)
    by_start = {("at", x.data_ptr()): number for number, x in present if starts[x.data_ptr()] == 1}
    return by_start | {id(x): number for number, x in present}


def _number_of(x: Tensor, numbers: dict[Any, int]) -> int:
    number = numbers.get(id(x))
    return numbers["at", x.data_ptr()] if number is None else number


def _maker(argument: Any, numbers: dict[Any, int]) -> Make | None:
    """A function that makes an argument from other tensors; None if the argument has no tensor.

    Raises:
        LookupError: the argument has a tensor that is not one of the call's.
    """
    if isinstance(argument, Tensor):
        return itemgetter(_number_of(argument, numbers))
    if isinstance(argument, tuple):
        return _tuple_maker(argument, numbers)
    if isinstance(getattr(argument, "base", None), Tensor):
        return _descriptor_maker(argument, _number_of(argument.base, numbers))
    return None


def _tuple_maker(argument: Any, numbers: dict[Any, int]) -> Make | None:
    """`_maker` for a named tuple."""
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
    """`_maker` for a TMA descriptor: it copies the descriptor without Triton's checks."""
    kind = type(argument)
    fields = {**vars(argument), "base": None}

    def make(tensors: Tensors) -> Any:
        fresh = object.__new__(kind)
        fresh.__dict__ = fields.copy()
        fresh.__dict__["base"] = tensors[number]
        return fresh

    return make
