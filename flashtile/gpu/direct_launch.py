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
from .repeat import Numbers, Tensors, is_descriptor

TESTED = ("3.6.", "3.9.")
IS_TESTED = triton.__version__.startswith(TESTED) and torch.version.hip is None
if IS_TESTED:  # builds for ROCm may lack this module
    from triton.backends.nvidia import driver as nvidia

Encode = Callable[[int], Any]  # makes a tensor map for an address

_STREAM = object()  # stands for the stream in the arguments that we write down


def are_launches_watched() -> bool:
    """Whether hooks, such as those of a profiler, are called at each launch."""
    runtime = knobs.runtime
    return _does_something(runtime.launch_enter_hook) or _does_something(runtime.launch_exit_hook)


def _does_something(hook: Any) -> bool:
    """Whether a hook has an effect; Triton's own one is an object with a list of functions."""
    return hook is not None and getattr(hook, "calls", True) != []


class Parts(NamedTuple):
    """Arguments of the function in C, in order, and what differs from call to call."""

    constants: list[Any]
    numbers: list[tuple[int, int]]  # index of the argument, and of its address in `Addresses`
    maps: list[tuple[int, int, Encode]]  # likewise, of tensor maps
    tuples: list[tuple[int, Parts]]

    def filled(self, addresses: list[int]) -> list[Any]:
        """The arguments with the stream and the addresses of a call."""
        arguments = self.constants.copy()
        for index, place in self.numbers:
            arguments[index] = addresses[place]
        for index, place, encode in self.maps:
            arguments[index] = _tensor_map(addresses[place], encode)
        for index, parts in self.tuples:
            arguments[index] = tuple(parts.filled(addresses))
        return arguments


class Addresses:
    """The indices of a stream and of the addresses of tensors in a list of them."""

    STREAM = 0

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self.tensors: list[int] = []  # the indices of the tensors whose addresses follow the stream

    def place_of(self, x: Tensor) -> int:
        """The index of the address of `x`, which the list contains from now on.

        Raises:
            LookupError: `x` is not one of the call's tensors.
        """
        number = self._numbers.of(x)
        if number not in self.tensors:
            self.tensors.append(number)
        return self.tensors.index(number) + 1


class DirectLaunches(NamedTuple):
    """Launches on one device that have been made before, without Triton's Python code."""

    launches: list[tuple[Callable[..., Any], Parts]]
    pick: Callable[[Tensors], tuple[Tensor, ...]]  # the tensors of `Addresses`
    device: int
    current_stream: Callable[[int], int]

    def run(self, tensors: Tensors) -> None:
        """Launch with other tensors."""
        present = self.pick(tensors)
        addresses = [self.current_stream(self.device), *map(Tensor.data_ptr, present)]
        for function, parts in self.launches:
            function(*parts.filled(addresses))


def direct_launches(
    launches: Sequence[Launch], compiled: Sequence[Any], numbers: Numbers
) -> DirectLaunches | None:
    """How to repeat launches on the current device by the function in C; None if Triton's Python
    code has to run.

    Raises:
        LookupError: an argument has a tensor that is not one of the call's.
    """
    addresses, found = Addresses(numbers), []
    for launch, kernel in zip(launches, compiled, strict=True):
        parts = _parts_of_launch(launch, kernel, addresses)
        if parts is None:
            return None
        found.append((_function_in_c(kernel.run.launch), parts))
    active = driver.active
    device, current_stream = active.get_current_device(), active.get_current_stream
    if len(addresses.tensors) < 2:  # no kernel of ours has so few; `pick` would not return a tuple
        return None
    pick = itemgetter(*addresses.tensors)
    return DirectLaunches(found, pick, device, current_stream)


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
        (addresses.place_of(descriptor.base), _encoder(descriptor, layout))
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
    arguments: Sequence[Any], addresses: Addresses, maps: Iterator[tuple[int, Encode]]
) -> Parts:
    """The stream, addresses and tensor maps among `arguments`, and in sequences among them."""
    parts = Parts(list(arguments), [], [], [])
    for index, argument in enumerate(arguments):
        if argument is _STREAM:
            parts.numbers.append((index, addresses.STREAM))
        elif isinstance(argument, Tensor):  # Triton need not ask the driver about an address
            parts.numbers.append((index, addresses.place_of(argument)))
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
