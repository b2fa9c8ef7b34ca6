"""Facts about the installed software and the GPU. Nothing here imports Triton."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch

from ..lru import memoised
from .described import current_target

# Whether `import triton` would work, without importing it. Evaluated once at import, because
# torch.compile cannot trace the search.
TRITON_IS_INSTALLED = find_spec("triton") is not None

OLDEST_CAPABILITY = (8, 0)  # of the GPUs that run the Triton kernels


def is_rocm() -> bool:
    """Whether this PyTorch is built for AMD GPUs."""
    return torch.version.hip is not None


def has_tma(capability: tuple[int, int] | None) -> bool:
    """Whether the GPU has the Tensor Memory Accelerator, which tensor descriptors need."""
    return capability is not None and capability >= (9, 0) and not is_rocm()


@memoised(64)
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU with an index; PyTorch takes microseconds to return it."""
    return torch.cuda.get_device_capability(device)


def gpus() -> list[tuple[str, tuple[int, int]]]:
    """(name, compute capability) of the GPUs that this process sees."""
    indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    named, capability_of = torch.cuda.get_device_name, torch.cuda.get_device_capability
    return [(named(index), capability_of(index)) for index in indices]


class Gpu(NamedTuple):
    """The properties of a GPU that the cost models use."""

    multiprocessors: int  # SMs
    cache_bytes: int  # of the L2 cache
    bytes_per_us: float  # of the memory


H100 = Gpu(132, 50 * 2**20, 3.35e6)


def gpu_of(device: torch.device) -> Gpu:
    """The properties of a GPU; without an index, of the current one."""
    if device.type == "cpu" or not torch.cuda.is_available():  # the interpreter: as on an H100
        absent = current_target.gpu
        return H100 if absent is None else H100._replace(multiprocessors=absent.multiprocessors)
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; without an index, of the current one."""
    return gpu_of(device).multiprocessors


@memoised(64)
def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    # In kHz and bits, with two transfers per clock. Some PyTorch versions lack some of these.
    rate = getattr(found, "memory_clock_rate", 0) * getattr(found, "memory_bus_width", 0) / 4e3
    cache = getattr(found, "L2_cache_size", 0)
    return Gpu(found.multi_processor_count, cache or H100.cache_bytes, rate or H100.bytes_per_us)
