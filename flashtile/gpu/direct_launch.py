"""Launch compiled kernels without Triton's Python code, which takes longer than the launch itself.

``compiled[grid](*arguments)`` ends in a call of a function in C. Triton prepares that call once for
us, and we write down its arguments instead of launching. A later call replaces the stream, the
addresses and the tensor maps. Triton has no public way to do this, so only releases that we have
tested take this path, and only while nobody watches the launches.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from ..lru import memoised
from .launch import Launch, ordered
from .repeat import Make, Maker, Numbers, Repeat, Tensors, is_descriptor, repeat_of, tuple_maker

TESTED = ("3.6.", "3.9.")
IS_TESTED = triton.__version__.startswith(TESTED) and torch.version.hip is None
if IS_TESTED:  # builds for ROCm may lack this module
    from triton.backends.nvidia import driver as nvidia

_STREAM = object()  # stands for the stream in the arguments that we write down


def are_launches_watched() -> bool:
    """Whether hooks, such as those of a profiler, are called at each launch."""
    runtime = knobs.runtime
    return _does_something(runtime.launch_enter_hook) or _does_something(runtime.launch_exit_hook)


def _does_something(hook: Any) -> bool:
    """Whether a hook has an effect; Triton's own one is an object with a list of functions."""
    return hook is not None and getattr(hook, "calls", True) != []


def direct_repeat(launch: Launch, compiled: Any, numbers: Numbers) -> Repeat | None:
    """How to repeat a launch on the current device by the function in C; None if Triton's Python
    code has to run.

    Raises:
        LookupError: an argument has a tensor that is not one of the call's.
    """
    if not IS_TESTED or type(getattr(compiled, "run", None)) is not nvidia.CudaLauncher:
        return None
    run, arguments = compiled.run, ordered(launch)
    if run.global_scratch_size > 0 or run.profile_scratch_size > 0:  # allocated at each launch
        return None
    layouts = compiled.metadata.tensordesc_meta or ()
    descriptors = [x for x in arguments if is_descriptor(x)]
    if len(layouts) != len(descriptors):
        return None
    maps = [_map_maker(*x, numbers) for x in zip(descriptors, layouts, strict=True)]
    maker = _maker(numbers, _stream_maker(), iter(maps))
    return repeat_of(_function_in_c(run.launch), _arguments_in_c(launch, compiled), maker)


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


def _maker(numbers: Numbers, stream: Make, maps: Iterator[Make]) -> Maker:
    """For the arguments of the function in C: the stream, addresses, tensor maps, and sequences of
    them.
    """

    def maker(argument: Any) -> Make | None:
        if argument is _STREAM:
            return stream
        if isinstance(argument, Tensor):
            return _address_maker(numbers.of(argument))
        if isinstance(argument, nvidia.PyCUtensorMap):
            return next(maps)
        if isinstance(argument, (tuple, list)):
            return tuple_maker(argument, maker)
        return None

    return maker


def _stream_maker() -> Make:
    """The maker of the current device's current stream."""
    device, current_stream = driver.active.get_current_device(), driver.active.get_current_stream
    return lambda tensors: current_stream(device)


def _address_maker(number: int) -> Make:
    """The maker of an address, which Triton need not ask the driver about."""
    return lambda tensors: tensors[number].data_ptr()  # type: ignore[union-attr]  # not None


def _map_maker(descriptor: Any, layout: Any, numbers: Numbers) -> Make:
    """The maker of the tensor map that Triton makes of a descriptor."""
    number, fields = numbers.of(descriptor.base), {**vars(descriptor), "base": None}
    # Later releases of Triton pass more arguments, which are not used.
    ignored = (None,) * (len(inspect.signature(nvidia.make_tensordesc_arg).parameters) - 2)

    def encode(address: int) -> Any:
        base = SimpleNamespace(data_ptr=lambda: address)
        moved = SimpleNamespace(**{**fields, "base": base})
        return nvidia.make_tensordesc_arg(moved, layout, *ignored)[0]

    def make(tensors: Tensors) -> Any:
        # Only tensors that are present have descriptors.
        return _tensor_map(tensors[number].data_ptr(), encode)  # type: ignore[union-attr]

    return make


# A map depends on nothing but the address and what `encode` holds (sizes, strides, the box and the
# type of elements). One that outlives its tensor is therefore right for another tensor at the same
# address too. Training uses the same addresses again and again.
@memoised(8192)
def _tensor_map(address: int, encode: Callable[[int], Any]) -> Any:
    return encode(address)
