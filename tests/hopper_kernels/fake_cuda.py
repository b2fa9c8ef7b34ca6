"""Triton's real launchers over a CUDA driver that only writes down the launches, for tests of the
host without a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import local
from typing import Any, NamedTuple

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime import driver

import flashtile
from flashtile.call import checks, memo
from flashtile.problem import AttentionProblem, Operands, Options

BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "float": 4, "double": 8, "ptr": 8}


class Made(NamedTuple):
    """A launch as the driver got it."""

    function: int
    grid: tuple[int, int, int]
    stream: int
    attributes: int
    parameters: tuple[bytes, ...]


class ThisThread(local):
    """What belongs to one thread."""

    def __init__(self) -> None:
        self.stream = 0
        self.made: list[Made] = []
        self.in_python = 0  # launches through Triton's Python code


class Config(ctypes.Structure):
    """The start of CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


# Of a process, as Triton's kernels are: one that a test has compiled may be launched by the next,
# under another driver. Its launcher takes the descriptors of these functions only.
cuda_utils = functools.cache(nvidia.CudaUtils)
sizes: dict[int, list[int]] = {}  # bytes of the parameters of each kernel


class Driver(nvidia.CudaDriver):
    """Triton's driver on one device that is not there. Every thread has its own stream and writes
    down its own launches.
    """

    def __init__(self) -> None:
        self.utils, self.launcher_cls = cuda_utils(), nvidia.CudaLauncher
        self.thread = ThisThread()
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: self.thread.stream

    @contextmanager
    def launches(self) -> Iterator[list[Made]]:
        """The launches of this thread inside the block."""
        outer, self.thread.made = self.thread.made, []
        yield self.thread.made
        self.thread.made = outer

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def parameter_sizes(signature: str) -> list[int]:
    """The bytes of each parameter of a kernel, from the line that defines it for LLVM."""
    found = re.findall(r"[(,] ?(ptr|i\d+|float|double)\b(?:[^,%]*byval\(\[(\d+))?", signature)
    return [int(size or BYTES[kind]) for kind, size in found]


@contextmanager
def compiling_half_way() -> Iterator[None]:
    """Kernels that are launched and do not run need no machine code, which takes most of the time
    of a compilation."""

    def name_alone(self: Any, code: str, metadata: dict[str, Any], *_: Any) -> str:
        metadata["name"] = re.findall(r"define ptx_kernel void @(\w+)", code)[0]
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler.llvm, "optimize_module", lambda *_, **__: None)
        patch.setattr(compiler.CUDABackend, "make_ptx", name_alone)
        patch.setattr(compiler.CUDABackend, "make_cubin", lambda *_: b"")
        yield


@contextmanager
def as_if_on_a_gpu() -> Iterator[None]:
    """Calls of the public functions treat tensors on the CPU as if they were on an H100."""
    describe = AttentionProblem.of

    def of(operands: Operands, options: Options) -> AttentionProblem:
        problem = describe(operands, options)
        return problem._replace(device_type="cuda", capability=(9, 0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionProblem, "of", of)
        patch.setattr(memo, "_has_launches", lambda x: True)
        patch.setattr(checks, "checking_values", lambda tensors: False)
        patch.setattr(torch.cuda, "current_device", lambda: None)  # of a tensor on the CPU
        flashtile.clear_caches()
        yield
        flashtile.clear_caches()


@contextmanager
def fake_driver(folder: Path, records: bool = True) -> Iterator[Driver]:
    """Triton's active driver, replaced.

    Args:
        folder: for the library, and for Triton's cache.
        records: whether launches are written down, which takes longer than to make them.
    """
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_suffix(".c")
    build = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", library, source]
    subprocess.run(build, check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    cuda = ctypes.CDLL("libcuda.so.1")  # the first one that the process loaded, as Triton finds it
    load = CompiledKernel._init_handles

    def load_and_measure(kernel: Any) -> None:
        load(kernel)
        if "llir" in kernel.asm and kernel.function not in sizes:
            signature = re.findall("define ptx_kernel.*", kernel.asm["llir"])[0]
            sizes[kernel.function] = parameter_sizes(signature)

    launch_in_python = nvidia.CudaLauncher.__call__

    def launch_and_count(launcher: Any, *arguments: Any) -> None:
        active.thread.in_python += 1
        launch_in_python(launcher, *arguments)

    @ctypes.CFUNCTYPE(
        None, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
    )
    def on_launch(config: Any, function: int, parameters: Any) -> None:
        c = config.contents
        pairs = zip(sizes[function], parameters, strict=False)
        values = tuple(ctypes.string_at(address, size) for size, address in pairs)
        made = Made(function, (c.x, c.y, c.z), c.stream or 0, c.attribute_count, values)
        active.thread.made.append(made)

    # The library outlives this driver, and so would the function of an earlier one.
    address = ctypes.cast(on_launch, ctypes.c_void_p).value if records else None
    ctypes.c_void_p.in_dll(cuda, "on_launch").value = address
    with compiling_half_way(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.nvidia, "libcuda_path", str(folder))
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        patch.setattr(CompiledKernel, "_init_handles", load_and_measure)
        patch.setattr(nvidia.CudaLauncher, "__call__", launch_and_count)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        active = Driver()
        patch.setattr(driver, "_active", active)
        yield active
