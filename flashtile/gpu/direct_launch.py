"""Launch compiled kernels without Triton's Python code, which takes longer than the launch itself.

``compiled[grid](*arguments)`` ends in a call of a function in C. Triton prepares that call once for
us, and we write down its arguments instead of launching. A later call replaces the stream, the
addresses and the tensor maps. Triton has no public way to do this, so only releases that we have
tested take this path, and only while nobody watches the launches.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from types import BuiltinFunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from ..lru import memoised
from .launch import Launch, ordered
from .repeat import TensorIndex, Tensors, is_descriptor

TESTED = ("3.6.", "3.9.")
IS_TESTED = triton.__version__.startswith(TESTED) and torch.version.hip is None
if IS_TESTED:  # builds for ROCm may lack this module
    from triton.backends.nvidia import driver as nvidia

Encode = Callable[[int], Any]  # makes a tensor map for an address

_STREAM = object()  # stands for the stream in the arguments that we write down


def are_launches_hooked() -> bool:
    """Whether hooks, such as those of a profiler, are called at each launch."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        # Triton's own one is an object with a list of functions.
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


# Where an argument is among the addresses of a call, of which the first is the stream: its index,
# and the bytes between the address and the part of the tensor that the argument is.
IndexAndOffset = tuple[int, int]


class Parts(NamedTuple):
    """Arguments of the function in C, in order, and what differs from call to call."""

    constants: list[Any]
    numbers: list[tuple[int, IndexAndOffset]]  # with the index of the argument
    maps: list[tuple[int, IndexAndOffset, Encode]]  # likewise, of tensor maps
    tuples: list[tuple[int, Parts]]

    def filled(self, addresses: tuple[int, ...]) -> tuple[Any, ...]:
        """The arguments with the stream and the addresses of a call."""
        arguments = self.constants.copy()
        for argument, (index, offset) in self.numbers:
            arguments[argument] = addresses[index] + offset
        for argument, (index, offset), encode in self.maps:
            arguments[argument] = _tensor_map(addresses[index] + offset, encode)
        for argument, parts in self.tuples:
            arguments[argument] = parts.filled(addresses)
        return tuple(arguments)


class Addresses:
    """A list of a stream and the addresses of tensors, which grows with each new tensor."""

    STREAM = 0, 0

    def __init__(self, tensor_index: TensorIndex) -> None:
        self._tensor_index = tensor_index
        self.tensors: list[int] = []  # the indices of the tensors whose addresses follow the stream

    def index_and_offset(self, x: Tensor) -> IndexAndOffset:
        """Where the address of `x` is, which the list contains from now on.

        Raises:
            LookupError: `x` is neither one of the call's tensors nor a part of one.
        """
        number, offset = self._tensor_index.index_and_offset(x)
        if number not in self.tensors:
            self.tensors.append(number)
        return self.tensors.index(number) + 1, offset


Calls = tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]  # functions in C and arguments


class DirectLaunches:
    """Launches on one device that have been made before, without Triton's Python code."""

    def __init__(
        self, launches: list[tuple[Callable[..., Any], Parts]], tensors: Sequence[int]
    ) -> None:
        """
        Args:
            launches: functions in C with their arguments.
            tensors: the indices of the tensors of `Addresses`, at least two.
        """
        self._launches = launches
        self._pick: Callable[[Tensors], tuple[Tensor, ...]] = itemgetter(*tensors)
        self._device = driver.active.get_current_device()
        self._current_stream = driver.active.get_current_stream

    def run(self, tensors: Tensors) -> None:
        """Launch with other tensors."""
        addresses = map(Tensor.data_ptr, self._pick(tensors))
        for function, arguments in _calls(self, (self._current_stream(self._device), *addresses)):
            function(*arguments)

    def calls(self, addresses: tuple[int, ...]) -> Calls:
        """What to call for a stream and addresses."""
        return tuple((function, parts.filled(addresses)) for function, parts in self._launches)


# Arguments depend on nothing but the launches and the numbers in `addresses`: they hold no tensor.
# Programs use the same addresses again and again, because PyTorch's allocator does.
@memoised(1024)
def _calls(launches: DirectLaunches, addresses: tuple[int, ...]) -> Calls:
    return launches.calls(addresses)


def direct_launches(
    launches: Sequence[Launch], compiled: Sequence[Any], tensor_index: TensorIndex
) -> DirectLaunches | None:
    """How to repeat launches on the current device by the function in C; None if Triton's Python
    code has to run.

    Raises:
        LookupError: an argument has a tensor that is not one of the call's.
    """
    addresses, found = Addresses(tensor_index), []
    for launch, kernel in zip(launches, compiled, strict=True):
        parts = _parts_of_launch(launch, kernel, addresses)
        if parts is None:
            return None
        found.append((_function_in_c(kernel.run.launch), parts))
    if len(addresses.tensors) < 2:  # no kernel of ours has so few
        return None
    return DirectLaunches(found, addresses.tensors)


def _parts_of_launch(launch: Launch, compiled: Any, addresses: Addresses) -> Parts | None:
    """The arguments of one of the launches; None if Triton's Python code has to run."""
    if not IS_TESTED or type(getattr(compiled, "run", None)) is not nvidia.CudaLauncher:
        return None
    run, arguments = compiled.run, ordered(launch)
    if run.global_scratch_size > 0 or run.profile_scratch_size > 0:  # allocated at each launch
        return None
    layouts = compiled.metadata.tensordesc_meta or ()
    descriptors = [x for x in arguments if is_descriptor(x)]
    if len(layouts) != len(descriptors):
        return None
    maps = [
        (addresses.index_and_offset(descriptor.base), _encoder(descriptor, layout))
        for descriptor, layout in zip(descriptors, layouts, strict=True)
    ]
    return _parts(_arguments_in_c(launch, compiled), addresses, iter(maps))


def _function_in_c(launch: Callable[..., Any]) -> Callable[..., Any]:
    """The function that Triton's wrapper, which replaces descriptors, calls."""
    if isinstance(launch, BuiltinFunctionType):
        return launch
    function: Callable[..., Any] = inspect.getclosurevars(launch).nonlocals["launcher"]
    return function


def _arguments_in_c(launch: Launch, compiled: Any) -> tuple[Any, ...]:
    """What Triton passes to the function in C, on the stream `_STREAM` and without hooks."""
    calls: list[tuple[Any, ...]] = []

    def write_down(*arguments: Any) -> None:
        calls.append(arguments)

    meta = compiled.metadata.tensordesc_meta
    run = copy.copy(compiled.run)
    run.launch = nvidia.wrap_handle_tensordesc(write_down, compiled.src.signature, meta)
    packed, hooks = compiled.packed_metadata, (None, None, None)
    run(*launch.grid_of_three, _STREAM, compiled.function, packed, *hooks, *ordered(launch))
    (arguments,) = calls
    return arguments


def _parts(
    arguments: Sequence[Any], addresses: Addresses, maps: Iterator[tuple[IndexAndOffset, Encode]]
) -> Parts:
    """The stream, addresses and tensor maps among `arguments`, and in sequences among them."""
    parts = Parts(list(arguments), [], [], [])
    for index, argument in enumerate(arguments):
        if argument is _STREAM:
            parts.numbers.append((index, addresses.STREAM))
        elif isinstance(argument, Tensor):  # Triton need not ask the driver about an address
            parts.numbers.append((index, addresses.index_and_offset(argument)))
        elif isinstance(argument, nvidia.PyCUtensorMap):
            parts.maps.append((index, *next(maps)))
        elif isinstance(argument, (tuple, list)):
            inner = _parts(argument, addresses, maps)
            if inner.numbers or inner.maps or inner.tuples:
                parts.tuples.append((index, inner))
                parts.constants[index] = None
            continue
        else:
            continue
        parts.constants[index] = None  # nothing here keeps a tensor alive
    return parts


def _encoder(descriptor: Any, layout: Any) -> Encode:
    """A function that makes the tensor map that Triton makes of a descriptor, for an address."""
    fields = {**vars(descriptor), "base": None}
    # Later releases of Triton pass more arguments, which are not used.
    ignored = (None,) * (len(inspect.signature(nvidia.make_tensordesc_arg).parameters) - 2)

    def encode(address: int) -> Any:
        base = SimpleNamespace(data_ptr=lambda: address)
        moved = SimpleNamespace(**{**fields, "base": base})
        return nvidia.make_tensordesc_arg(moved, layout, *ignored)[0]

    return encode


# A map depends on nothing but the address and what `encode` holds (sizes, strides, the box and the
# type of elements). One that outlives its tensor is therefore right for another tensor at the same
# address too. Training uses the same addresses again and again.
@memoised(8192)
def _tensor_map(address: int, encode: Encode) -> Any:
    return encode(address)
