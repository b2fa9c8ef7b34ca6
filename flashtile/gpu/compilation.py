"""Compiles the kernels of a call at the same time, before the first of them is launched.

Every kernel is compiled on its own thread. Triton's compiler is used through its public interface,
as if several threads of the program made first calls: MLIR and LLVM release the interpreter's lock,
and ptxas is another process. `triton.AsyncCompileMode` is not used. In Triton 3.6 it stays active
after an error, and in 3.9 other threads find its unfinished kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from triton import AsyncCompileMode, JITFunction, knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ..lru import Memo
from .described import AbsentGpu, current_target, launches_of_next_pass, representing
from .launch import Launch, precompute_key

# The variants that have been compiled by this process. Later calls do not start threads for them.
_known: Memo[Any, bool] = Memo(4096)

PARSER_TRIES = 5


def compile_together(launches: Sequence[Launch]) -> None:
    """Compile the kernels of `launches`, and of the pass that follows, which Triton then finds.

    Returns when all are compiled or have failed, and raises the error of the first launch that
    failed. Does nothing if at most one kernel is new, or if kernels are interpreted, or for a GPU
    that is not here.
    """
    if current_target.gpu is not None:
        return
    new = _new(launches)
    later = _new(launches_of_next_pass()) if new else {}
    together = new | {variant: x for variant, x in later.items() if variant not in new}
    if len(together) > 1:
        with ThreadPoolExecutor(
            len(together), "flashtile-compile", _enter, (_device(),)
        ) as threads:
            started = [threads.submit(_compile, x) for x in together.values()]
        for one in started[: len(new)]:  # the passes that follow raise their own errors
            one.result()
    for variant in together:
        _known[variant] = True


def _new(launches: Sequence[Launch]) -> dict[Any, Launch]:
    """The launches of kernels that this process has not compiled, by their variants."""
    found = {}
    for launch in launches:
        if isinstance(launch.kernel, JITFunction) and 0 not in launch.grid:
            precompute_key(launch.kernel)  # here, because its result depends on the order
            variant = _variant(launch)
            if not _known.get(variant):
                found[variant] = launch
    return found


class _Chosen(AsyncCompileMode):
    """Compiles only kernels that a function of their keys in Triton's cache chooses."""

    def __init__(self, wants: Callable[[str], Any]) -> None:
        super().__init__(None)
        self._wants = wants

    def submit(self, key: str, compile_one: Callable[[], Any], *_: Any) -> None:
        """Called where a kernel would be compiled."""
        if self._wants(key):
            compile_one()


@contextmanager
def compiling_for(gpu: AbsentGpu, wants: Callable[[str], Any]) -> Iterator[None]:
    """Inside the block, calls of this thread with tensors on the CPU launch nothing: they compile
    kernels for `gpu`, those that `wants` chooses by their keys in Triton's cache, which keeps only
    the machine code. The process can then launch no kernel on a GPU of its own.
    """
    from triton.backends.nvidia.driver import CudaDriver  # which builds for ROCm may lack

    class AbsentDriver(CudaDriver):
        def __init__(self) -> None:
            self.get_current_device = lambda: -1
            self.get_current_stream = lambda device: 0

        def get_current_target(self) -> GPUTarget:
            major, minor = gpu.capability
            return GPUTarget("cuda", 10 * major + minor, 32)

    driver.set_active(AbsentDriver())
    knobs.compilation.store_binary_only = True
    with representing(gpu), _Chosen(wants):
        yield


def _compile(launch: Launch) -> None:
    """Compile and load a kernel, and make its launcher, for which Triton 3.6 runs a C compiler."""
    # Two threads that parse Python at the same time may get this error, though rarely, in Python
    # before 3.13 (github.com/python/cpython/issues/106905). The launch itself is the last try.
    for _ in range(PARSER_TRIES):
        with suppress(SystemError):
            launch.launcher(launch.compile())
            return


def _variant(launch: Launch) -> Any:
    """What determines a compiled kernel, except for the types and the divisibility of arguments. A
    kernel that differs only in these is compiled by its launch.
    """
    kernel = launch.kernel
    constants = [launch.arguments[kernel.arg_names[index]] for index in kernel.constexprs]
    options = launch.warps, launch.stages, launch.is_early, launch.registers
    return kernel, *options, *constants


def _device() -> int | None:
    """The current GPU, if CUDA has started."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _enter(device: int | None) -> None:
    """Make `device` the current one of this thread, because Triton compiles for that one."""
    if device is not None:
        torch.cuda.set_device(device)
