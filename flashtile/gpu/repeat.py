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
Bind = Callable[[Tensors], Any]
# A function that makes an argument from other tensors; None if the argument has no tensor.
ArgumentBinder = Callable[[Any], Bind | None]


class Repeat(NamedTuple):
    """A launch that has been made before."""

    launcher: Callable[..., Any]
    arguments: list[Any]  # in order
    binds: list[tuple[int, Bind]]  # of the arguments that differ from call to call

    def run(self, tensors: Tensors) -> None:
        """Launch with other tensors."""
        arguments = self.arguments.copy()
        for index, make in self.binds:
            arguments[index] = make(tensors)
        self.launcher(*arguments)


def repeat_of(
    launcher: Callable[..., Any], arguments: Sequence[Any], binder: ArgumentBinder
) -> Repeat:
    """How to repeat ``launcher(*arguments)``."""
    constants, binds = split(arguments, binder)
    return Repeat(launcher, constants, binds)


def split(
    arguments: Sequence[Any], binder: ArgumentBinder
) -> tuple[list[Any], list[tuple[int, Bind]]]:
    """The arguments that never differ, with None in place of the others, and what makes those."""
    made = [(index, binder(argument)) for index, argument in enumerate(arguments)]
    binds = [(index, make) for index, make in made if make is not None]
    constants = list(arguments)
    for index, _ in binds:
        constants[index] = None
    return constants, binds


class TensorIndex:
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


def public_binder(tensor_index: TensorIndex) -> ArgumentBinder:
    """For the arguments of Triton's public interface: tensors, tuples with tensors, descriptors."""

    def binder(argument: Any) -> Bind | None:
        if isinstance(argument, Tensor):
            return _tensor_binder(argument, tensor_index)
        if isinstance(argument, tuple):
            return tuple_binder(argument, binder)
        if is_descriptor(argument):
            return _descriptor_binder(argument, _tensor_binder(argument.base, tensor_index))
        return None

    return binder


def _tensor_binder(x: Tensor, tensor_index: TensorIndex) -> Bind:
    """The binder of a tensor that starts where `x` does in one of the call's tensors."""
    number, offset = tensor_index.index_and_offset(x)
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


def tuple_binder(argument: Any, binder: ArgumentBinder) -> Bind | None:
    """The binder of a tuple, which may be a named one."""
    constants, binds = split(argument, binder)
    if not binds:
        return None
    build = getattr(type(argument), "_make", type(argument))

    def make(tensors: Tensors) -> Any:
        parts = constants.copy()
        for index, make_part in binds:
            parts[index] = make_part(tensors)
        return build(parts)

    return make


def _descriptor_binder(argument: Any, make_base: Bind) -> Bind:
    """The binder of a TMA descriptor: it copies the descriptor without Triton's checks."""
    kind = type(argument)
    fields = {**vars(argument), "base": None}

    def make(tensors: Tensors) -> Any:
        fresh = object.__new__(kind)
        fresh.__dict__ = fields.copy()
        fresh.__dict__["base"] = make_base(tensors)
        return fresh

    return make
