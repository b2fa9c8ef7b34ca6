"""Facts about the installed software and the GPU. Nothing here imports Triton."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from ..lru import memoised

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


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors (SMs) of a GPU; without an index, of the current one."""
    if device.type == "cpu" or not torch.cuda.is_available():  # the interpreter: as on an H100
        return 132
    return _multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


@memoised(64)
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
