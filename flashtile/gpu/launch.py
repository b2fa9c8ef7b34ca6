"""A kernel launch, described before it is made, so that the same code can also compile ahead of
time for an absent device; and the compilation of all kernels of a call.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import AsyncCompileMode, JITFunction, knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import triton_key

from ..lru import Memo, memoised
from .described import (
    AbsentGpu,
    current_target,
    described_launches,
    launches_of_next_pass,
    representing,
)


class Launch(NamedTuple):
    """One kernel launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4
    stages: int | None = None  # None for Gluon kernels, which pipeline explicitly
    is_early: bool = False  # starts while the previous kernel ends: see `intrinsics.py`
    registers: int | None = None  # the most that a thread may use; NVIDIA only

    @property
    def needs_scratch(self) -> bool:
        """Whether the kernel builds tensor descriptors, for which Triton allocates memory."""
        config = self.arguments.get("cfg")
        return getattr(config, "HAS_DESCRIPTORS", False)

    @property
    def grid_of_three(self) -> tuple[int, int, int]:
        """The grid, with 1 for sizes that are not given."""
        x, y, z, *_ = (*self.grid, 1, 1)
        return x, y, z

    def run(self) -> Any:
        """Launch on the current device; return the compiled kernel, or None for an empty grid and
        for a GPU that is not here, where the kernel is only compiled.
        """
        if 0 in self.grid:
            return None
        if current_target.gpu is not None:
            self.compile()
            return None
        if self.needs_scratch:
            return with_scratch(self._run)
        return self._run()

    def launcher(self, compiled: Any) -> Callable[..., Any]:
        """A function of the arguments, in order, that launches the compiled kernel."""
        launcher = compiled[self.grid_of_three]
        return partial(with_scratch, launcher) if self.needs_scratch else launcher

    def compile(self) -> Any:
        """Compile for the current device without launching; return the compiled kernel."""
        read_kernels_folder()
        precompute_key(self.kernel)
        return self.kernel.warmup(grid=self.grid, **self.arguments, **self._options())

    def _run(self) -> Any:
        read_kernels_folder()
        precompute_key(self.kernel)
        return self.kernel[self.grid](**self.arguments, **self._options())

    def _options(self) -> dict[str, Any]:
        """The options of the compiler and of the launch, by Triton's names."""
        options: dict[str, Any] = {"num_warps": self.warps}
        if self.stages is not None:
            options["num_stages"] = self.stages
        if self.registers is not None and torch.version.hip is None:
            options["maxnreg"] = self.registers
        if self.is_early:
            options["launch_pdl"] = True
        return options


def ordered(launch: Launch) -> list[Any]:
    """The arguments in the order of the kernel's parameters."""
    return [launch.arguments[name] for name in launch.kernel.arg_names]


def run(launches: list[Launch], x: Tensor) -> list[Any]:
    """Launch on the device of `x` and return the compiled kernels; while a pass is described, only
    write the launches down."""
    found = described_launches()
    if found is not None:
        found += launches
        return [None] * len(launches)
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return [launch.run() for launch in launches]
    return [launch.run() for launch in launches]


def with_scratch(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` with our allocator in a copy of the context, which leaves the user's
    allocator set.
    """
    return copy_context().run(_call_with_scratch, function, *arguments)


def _call_with_scratch(function: Callable[..., Any], *arguments: Any) -> Any:
    triton.set_allocator(_scratch)
    return function(*arguments)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for tensor descriptors; PyTorch's allocator reuses it in stream order."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


# Cache keys of kernels that do not depend on what a process compiled earlier.
#
# Triton 3.6 hashes a kernel together with the constants of the functions it calls, but only of
# functions that are already hashed (`DependenciesFinder._update_hash` reads a function's constants
# before it computes its hash; later releases do not). A process that starts with another kernel
# would therefore compute other keys and compile again. `precompute_key` hashes functions before
# their callers.


def precompute_key(kernel: Any) -> None:
    """Compute the cache key of `kernel`, after those of the functions that it calls.

    Interpreted kernels have no key.
    """
    if getattr(kernel, "hash", "") is None:
        for name in _names(kernel.fn.__code__):
            for function in _functions(kernel.fn.__globals__.get(name)):
                precompute_key(function)
        _ = kernel.cache_key


def _names(code: Any) -> set[str]:
    """All names in a function, including those in nested functions."""
    inner = (constant for constant in code.co_consts if hasattr(constant, "co_names"))
    return set(code.co_names).union(*map(_names, inner))


def _functions(x: Any) -> list[Any]:
    """`x` itself, or the methods of an aggregate."""
    return list(vars(x).values()) if getattr(x, "__triton_aggregate__", False) else [x]


# The folder `FLASHTILE_KERNELS`, with kernels that were compiled elsewhere.
#
# `flashtile warmup --target` fills it as Triton's cache. It may then be moved and be read-only,
# which Triton's cache may not: it names its files by their absolute paths, and Triton writes to it.


@memoised(1)
def read_kernels_folder() -> None:
    """Copy the kernels that Triton's cache lacks into it, once in a process.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    named = os.environ.get("FLASHTILE_KERNELS")
    if not named:
        return
    if not Path(named).is_dir():
        raise FileNotFoundError(f"FLASHTILE_KERNELS: got {named!r}, want a folder")
    cache = Path(knobs.cache.dir)
    cache.mkdir(parents=True, exist_ok=True)
    for kernel in Path(named).iterdir():
        place = cache / kernel.name
        if kernel.is_dir() and not place.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                made = shutil.copytree(kernel, Path(folder, kernel.name))
                for group in made.glob("__grp__*"):
                    names = json.loads(group.read_text())["child_paths"]
                    moved = {name: str(place / name) for name in names}
                    group.write_text(json.dumps({"child_paths": moved}))
                with suppress(OSError):  # another process or thread was faster
                    made.rename(place)


# Compile the kernels of a call at the same time, before the first of them is launched.
#
# Every kernel is compiled on its own thread. Triton's compiler is used through its public
# interface, as if several threads of the program made first calls: MLIR and LLVM release the
# interpreter's lock, and ptxas is another process. `triton.AsyncCompileMode` is not used. In Triton
# 3.6 it stays active after an error, and in 3.9 other threads find its unfinished kernels.


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
        _ = driver.active  # here, because each thread would make one
        triton_hash().result()
        with (
            _no_collections(),
            ThreadPoolExecutor(len(together), "flashtile-compile", _enter, (_device(),)) as threads,
        ):
            started = [threads.submit(_compile, x) for x in together.values()]
        for one in started[: len(new)]:  # the passes that follow raise their own errors
            one.result()
    for variant in together:
        _known[variant] = True


@memoised(1)
def triton_hash() -> Future[str]:
    """Triton's hash of its own 415 MB. Otherwise every thread that compiles would compute it, after
    the 0.3 s in which Triton 3.6 runs a C compiler.
    """
    return ThreadPoolExecutor(1, "flashtile-hash").submit(triton_key)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Inside the block, Python does not collect garbage. Otherwise it looks through all objects at
    least once while Triton parses, which takes 0.1 s.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
