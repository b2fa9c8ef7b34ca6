"""One kernel launch, described before it is made, so that the same code can also compile ahead of
time for an absent device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..absent_gpu import current_target
from .kernel_keys import precompute_key
from .kernels_folder import read_kernels_folder


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

    def compile(self) -> None:
        """Compile for the current device without launching."""
        read_kernels_folder()
        precompute_key(self.kernel)
        self.kernel.warmup(grid=self.grid, **self.arguments, **self._options())

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
