"""Memoised launches: a call like an earlier one is launched without preparing its arguments again.

For a first call, the backend describes its launches (tensors with strides, numbers), and Triton
inspects every argument (type, alignment, specialised values) to find the compiled kernel. Both take
longer than the launch. A later call that differs only in the contents and addresses of its tensors
is prepared: it reuses the earlier launches with its own tensors and goes straight to the compiled
kernel. There are two ways to do that, with one `Template` for the arguments of each launch: without
Triton's Python code (`DirectLaunches`), or through Triton's public interface
``compiled[grid](*arguments)``. Other calls are described again; a backend may declare that they
share compiled kernels, such as packed batches, whose total length always differs.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from operator import itemgetter
from types import BuiltinFunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from ..lru import Memo, memoised
from .described import described_launches
from .launch import Launch, compile_together, ordered, triton_hash
from .memory import NewTensor
from .rows import ALIGNMENT  # Triton specialises kernels for tensors that start at multiples of it

# Faster than `torch.cuda.current_device`, which starts CUDA. A tensor on a GPU shows that it runs.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)

Tensors = tuple[Tensor | None, ...]
Launcher = Callable[..., Any]
Bind = Callable[[Any], Any]  # an argument, from the tensors of a call or from their addresses
# The function that makes an argument in later calls; None if it is the same in all of them.
ArgumentBinder = Callable[[Any], Bind | None]
Describe = Callable[[Tensors, Tensors], Sequence[Launch]]
Allocators = Sequence[NewTensor]


class PreparedCall(NamedTuple):
    """The launches of a call that has been made before, and how to allocate what they write to."""

    public: Sequence[tuple[Launcher, Template]]  # through Triton's public interface
    direct: DirectLaunches | None  # without Triton's Python code
    allocators: Allocators  # none if the caller allocates
    device: int  # -1: a CPU

    def run(self, given: Tensors) -> tuple[Tensor, ...]:
        """Allocate tensors, make the launches, and return what was allocated."""
        if self.device != _current_device() and self.device >= 0:
            with torch.cuda.device(self.device):
                return self.run(given)
        made = tuple([allocate() for allocate in self.allocators])
        self.launch(given + made)
        return made

    def launch(self, tensors: Tensors) -> None:
        """Make the launches with other tensors."""
        if self.direct is not None and not are_launches_hooked():
            self.direct.run(tensors)
            return
        for launcher, template in self.public:
            launcher(*template.filled(tensors))


class LaunchState(Enum):
    """What is known of a call that is not prepared. Many calls occur only once, so only the second
    call determines whether its launches can be repeated; launches that read copies of tensors
    cannot.
    """

    NEW = auto()
    LAUNCHED_ONCE = auto()
    NOT_REPEATABLE = auto()


_prepared: Memo[Any, PreparedCall | LaunchState] = Memo(1024)
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
    if _is_elsewhere(given):
        with torch.cuda.device(given[0].device):  # type: ignore[union-attr]  # never None
            return run_all(name, call, given, made, describe, config)
    key = _key(name, call, given)
    known = _prepared.get(key, LaunchState.NEW)
    if isinstance(known, PreparedCall):
        known.launch(given + made)
    else:
        kind = _kind(key, name, given, config)
        _launch_described(key, kind, known, given, made, describe, ())


def allocate_and_run_all(
    name: str,
    call: Any,
    given: Tensors,
    allocators: Callable[[], Allocators],
    describe: Describe,
    config: Callable[[], Any],
) -> tuple[Tensor, ...]:
    """As `run_all`, but allocate `made` and return it.

    Args:
        allocators: returns the functions that allocate it, for this call and for those like it.
        config: returns what `run_all` gets.
    """
    if _is_elsewhere(given):
        with torch.cuda.device(given[0].device):  # type: ignore[union-attr]  # never None
            return allocate_and_run_all(name, call, given, allocators, describe, config)
    key = _key(name, call, given)
    known = _prepared.get(key, LaunchState.NEW)
    if isinstance(known, PreparedCall):
        return known.run(given)
    triton_hash()
    new = allocators()
    made = tuple([allocate() for allocate in new])
    kind = _kind(key, name, given, config())
    _launch_described(key, kind, known, given, made, describe, new)
    return made


def prepared_call(name: str, call: Any, given: Tensors) -> PreparedCall | None:
    """What `allocate_and_run_all` has prepared for calls like this one."""
    known = _prepared.get(_key(name, call, given))
    return known if isinstance(known, PreparedCall) else None


def _device(tensors: Tensors) -> int:
    """The index of the GPU of the tensors; -1 on a CPU."""
    return tensors[0].get_device()  # type: ignore[union-attr]  # never None


def _is_elsewhere(given: Tensors) -> bool:
    """Whether the tensors are on another GPU than the current one."""
    index = _device(given)
    return index >= 0 and index != _current_device()


def _launch_described(
    key: Any,
    kind: Any,
    known: PreparedCall | LaunchState,
    given: Tensors,
    made: Tensors,
    describe: Describe,
    allocators: Allocators,
) -> None:
    """Describe the launches of a call that is not prepared, make them, and prepare the call if it
    is the second one.
    """
    tensors = given + made
    # A tensor that this call passes twice may be two tensors in the next call.
    if known is LaunchState.LAUNCHED_ONCE:
        tensors = tuple(None if x is None else x.detach() for x in tensors)
    launches = describe(tensors[: len(given)], tensors[len(given) :])
    compiled = _launched(launches, kind)
    if known is LaunchState.NEW:
        _prepared[key] = LaunchState.LAUNCHED_ONCE
    elif known is LaunchState.LAUNCHED_ONCE:
        _prepared[key] = _prepare(launches, compiled, tensors, allocators)


def _key(name: str, call: Any, given: Tensors) -> Any:
    """Everything about a call except the addresses and the contents of its tensors."""
    assert given[0] is not None
    facts = [
        None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT)
        for x in given
    ]
    return name, call, given[0].device.index, *facts


def _kind(key: Any, name: str, given: Tensors, config: Any) -> Any:
    """What calls with the same compiled kernels have in common."""
    return key if config is None else (name, config, *map(_kind_of, given))


def _kind_of(x: Tensor | None) -> Any:
    """The properties of a tensor that Triton specialises on; the first size is not one of them."""
    if x is None:
        return None
    return x.device.index, x.dtype, x.shape[1:], x.stride(), x.data_ptr() % ALIGNMENT


def _launched(launches: Sequence[Launch], kind: Any) -> list[Any]:
    """Launch and return the compiled kernels; None for an empty grid and under the interpreter."""
    found = described_launches()
    if found is not None:
        found += launches
        return [None] * len(launches)
    compiled = _compiled.get(kind)
    if compiled is None:
        compile_together(launches)
        compiled = [launch.run() for launch in launches]
        if None not in compiled:
            _compiled[kind] = compiled
        return compiled
    for launch, kernel in zip(launches, compiled, strict=True):
        launch.launcher(kernel)(*ordered(launch))
    return compiled


def _prepare(
    launches: Sequence[Launch],
    compiled: list[Any],
    tensors: Tensors,
    allocators: Allocators,
) -> PreparedCall | LaunchState:
    """NOT_REPEATABLE for an empty grid, and for launches that read a copy of a tensor."""
    if None in compiled:
        return LaunchState.NOT_REPEATABLE
    tensor_index = TensorIndex(tensors)
    binder = public_binder(tensor_index)
    try:
        public = [
            (launch.launcher(kernel), Template.of(ordered(launch), binder))
            for launch, kernel in zip(launches, compiled, strict=True)
        ]
        direct = direct_launches(launches, compiled, tensor_index)
        return PreparedCall(public, direct, allocators, _device(tensors))
    except LookupError:
        return LaunchState.NOT_REPEATABLE


# A launch that is made again with other tensors: its arguments, and how to make those that hold
# tensors of the call.


class Template(NamedTuple):
    """Arguments, some of which differ from call to call."""

    constants: list[Any]  # in order; None in place of those that differ
    binds: list[tuple[int, Bind]]  # what makes those, with their indices

    @classmethod
    def of(cls, arguments: Sequence[Any], binder: ArgumentBinder) -> Template:
        """The template of the arguments of one call."""
        made = [(index, binder(argument)) for index, argument in enumerate(arguments)]
        binds = [(index, bind) for index, bind in made if bind is not None]
        constants = list(arguments)
        for index, _ in binds:
            constants[index] = None  # nothing here keeps a tensor alive
        return cls(constants, binds)

    def filled(self, call: Any) -> list[Any]:
        """The arguments of another call, from what its binds take."""
        arguments = self.constants.copy()
        for index, bind in self.binds:
            arguments[index] = bind(call)
        return arguments


def sequence_binder(
    argument: Sequence[Any], binder: ArgumentBinder, build: Callable[[list[Any]], Any]
) -> Bind | None:
    """The binder of an argument that `build` makes of its elements."""
    template = Template.of(argument, binder)
    return (lambda call: build(template.filled(call))) if template.binds else None


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
        if isinstance(argument, tuple):  # perhaps a named one
            return sequence_binder(argument, binder, getattr(argument, "_make", tuple))
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


# Launch compiled kernels without Triton's Python code, which takes longer than the launch itself.
#
# ``compiled[grid](*arguments)`` ends in a call of a function in C. Triton prepares that call once
# for us, and we write down its arguments instead of launching. A later call replaces the stream,
# the addresses and the tensor maps. Triton has no public way to do this, so only releases that we
# have tested take this path, and only while nobody watches the launches.


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


class Addresses:
    """A list of a stream and the addresses of tensors, which grows with each new tensor."""

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
        self, launches: Sequence[tuple[Launcher, Template]], tensors: Sequence[int]
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
        return tuple(
            (function, tuple(template.filled(addresses))) for function, template in self._launches
        )


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
        template = _template_in_c(launch, kernel, addresses)
        if template is None:
            return None
        found.append((_function_in_c(kernel.run.launch), template))
    if len(addresses.tensors) < 2:  # no kernel of ours has so few
        return None
    return DirectLaunches(found, addresses.tensors)


def _template_in_c(launch: Launch, compiled: Any, addresses: Addresses) -> Template | None:
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
    return Template.of(_arguments_in_c(launch, compiled), address_binder(addresses, iter(maps)))


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


def address_binder(
    addresses: Addresses, maps: Iterator[tuple[IndexAndOffset, Encode]]
) -> ArgumentBinder:
    """For the arguments of the function in C: the stream, addresses and tensor maps, and sequences
    of them.
    """

    def binder(argument: Any) -> Bind | None:
        if argument is _STREAM:
            return itemgetter(0)
        if isinstance(argument, Tensor):  # Triton need not ask the driver about an address
            index, offset = addresses.index_and_offset(argument)
            return itemgetter(index) if offset == 0 else lambda call: call[index] + offset
        if isinstance(argument, nvidia.PyCUtensorMap):
            (index, offset), encode = next(maps)
            return lambda call: _tensor_map(call[index] + offset, encode)
        if isinstance(argument, (tuple, list)):
            return sequence_binder(argument, binder, tuple)
        return None

    return binder


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
