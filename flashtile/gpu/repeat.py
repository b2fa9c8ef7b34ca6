"""A launch that is made again with other tensors: its arguments, and how to make those that hold
tensors of the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

Tensors = tuple[Tensor | None, ...]
Make = Callable[[Tensors], Any]
# A function that makes an argument from other tensors; None if the argument has no tensor.
Maker = Callable[[Any], Make | None]


class Repeat(NamedTuple):
    """A launch that has been made before."""

    launcher: Callable[..., Any]
    arguments: list[Any]  # in order
    makers: list[tuple[int, Make]]  # of the arguments that differ from call to call

    def run(self, tensors: Tensors) -> None:
        """Launch with other tensors."""
        arguments = self.arguments.copy()
        for index, make in self.makers:
            arguments[index] = make(tensors)
        self.launcher(*arguments)


def repeat_of(launcher: Callable[..., Any], arguments: Sequence[Any], maker: Maker) -> Repeat:
    """How to repeat ``launcher(*arguments)``."""
    constants, makers = split(arguments, maker)
    return Repeat(launcher, constants, makers)


def split(arguments: Sequence[Any], maker: Maker) -> tuple[list[Any], list[tuple[int, Make]]]:
    """The arguments that never differ, with None in place of the others, and what makes those."""
    made = [(index, maker(argument)) for index, argument in enumerate(arguments)]
    makers = [(index, make) for index, make in made if make is not None]
    constants = list(arguments)
    for index, _ in makers:
        constants[index] = None
    return constants, makers


class Numbers:
    """Which of a call's tensors an argument is, or which part of one."""

    def __init__(self, tensors: Tensors) -> None:
        present = [(number, x) for number, x in enumerate(tensors) if x is not None]
        self._by_identity = {id(x): number for number, x in present}
        # A view that starts where exactly one of the tensors does is a view of that one, and so is
        # any view of memory in which exactly one of the tensors is.
        self._by_start = _of_one_tensor((x.data_ptr(), number) for number, x in present)
        self._by_memory = _of_one_tensor((_memory(x), number) for number, x in present)
        self._starts = {number: x.data_ptr() for number, x in present}

    def index_and_offset(self, x: Tensor) -> tuple[int, int]:
        """The index of the tensor that `x` is a view of, and the bytes between their starts.

        Raises:
            LookupError: `x` is a copy, or not one of the call's tensors at all.
        """
        number = self._by_identity.get(id(x))
        if number is None:
            number = self._by_start.get(x.data_ptr())
        if number is not None:
            return number, 0
        number = self._by_memory[_memory(x)]
        return number, x.data_ptr() - self._starts[number]


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _of_one_tensor(found: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The number of the tensor at each address where there is only one."""
    pairs = list(found)
    times = Counter(address for address, _ in pairs)
    return {address: number for address, number in pairs if times[address] == 1}


def public_maker(numbers: Numbers) -> Maker:
    """For the arguments of Triton's public interface: tensors, tuples with tensors, descriptors."""

    def maker(argument: Any) -> Make | None:
        if isinstance(argument, Tensor):
            return _tensor_maker(argument, numbers)
        if isinstance(argument, tuple):
            return tuple_maker(argument, maker)
        if is_descriptor(argument):
            return _descriptor_maker(argument, _tensor_maker(argument.base, numbers))
        return None

    return maker


def _tensor_maker(x: Tensor, numbers: Numbers) -> Make:
    """The maker of a tensor that starts where `x` does in one of the call's tensors."""
    number, offset = numbers.index_and_offset(x)
    if offset == 0:
        return itemgetter(number)
    sizes, strides, dtype, size = x.shape, x.stride(), x.dtype, x.element_size()

    def make(tensors: Tensors) -> Tensor:
        whole = tensors[number]
        assert whole is not None
        start = whole.storage_offset() * whole.element_size() + offset
        part: Tensor = whole.view(dtype).as_strided(sizes, strides, start // size)
        return part

    return make


def is_descriptor(argument: Any) -> bool:
    """Whether an argument describes a tensor for TMA. A tuple of new tokens has a `base`, too."""
    return not isinstance(argument, tuple) and isinstance(getattr(argument, "base", None), Tensor)


def tuple_maker(argument: Any, maker: Maker) -> Make | None:
    """The maker of a tuple, which may be a named one."""
    constants, makers = split(argument, maker)
    if not makers:
        return None
    build = getattr(type(argument), "_make", type(argument))

    def make(tensors: Tensors) -> Any:
        parts = constants.copy()
        for index, make_part in makers:
            parts[index] = make_part(tensors)
        return build(parts)

    return make


def _descriptor_maker(argument: Any, make_base: Make) -> Make:
    """The maker of a TMA descriptor: it copies the descriptor without Triton's checks."""
    kind = type(argument)
    fields = {**vars(argument), "base": None}

    def make(tensors: Tensors) -> Any:
        fresh = object.__new__(kind)
        fresh.__dict__ = fields.copy()
        fresh.__dict__["base"] = make_base(tensors)
        return fresh

    return make
