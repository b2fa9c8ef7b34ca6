"""One kernel launch, described before it is made, so that the same code can also compile ahead of
time for an absent device.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

from ..lru import memoised
from .described import current_target


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
    """Launch on the device of `x` and return the compiled kernels."""
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
