"""Memoised launches: a call like an earlier one is launched without preparing its arguments again.

For a first call, the backend describes its launches (tensors with strides, numbers), and Triton
inspects every argument (type, alignment, specialised values) to find the compiled kernel. Both take
longer than the launch. A later call that differs only in the contents and addresses of its tensors
is prepared: it reuses the earlier launches with its own tensors and goes straight to the compiled
kernel, without Triton's Python code (`direct_launch.py`) or else through Triton's public interface
``compiled[grid](*arguments)``. Other calls are described again; a backend may declare that they
share compiled kernels, such as packed batches, whose total length always differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..lru import Memo
from .compilation import compile_together
from .direct_launch import DirectLaunches, are_launches_hooked, direct_launches
from .launch import Launch, ordered
from .memory import NewTensor
from .next_pass import described
from .repeat import Repeat, TensorIndex, Tensors, public_binder, repeat_of
from .rows import ALIGNMENT  # Triton specialises kernels for tensors that start at multiples of it

# Faster than `torch.cuda.current_device`, which starts CUDA. A tensor on a GPU shows that it runs.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)

Describe = Callable[[Tensors, Tensors], Sequence[Launch]]
Allocators = Sequence[NewTensor]


class PreparedCall(NamedTuple):
    """The launches of a call that has been made before, and how to allocate what they write to."""

    public: list[Repeat]  # through Triton's public interface
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
        for repeat in self.public:
            repeat.run(tensors)


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
    if (
        known is LaunchState.LAUNCHED_ONCE
    ):  # a tensor that this call passes twice may be two tensors in the next call
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
    found = described()
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
            repeat_of(launch.launcher(kernel), ordered(launch), binder)
            for launch, kernel in zip(launches, compiled, strict=True)
        ]
        direct = direct_launches(launches, compiled, tensor_index)
        return PreparedCall(public, direct, allocators, _device(tensors))
    except LookupError:
        return LaunchState.NOT_REPEATABLE
