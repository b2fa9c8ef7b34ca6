"""A GPU that is not here, for which `flashtile warmup --target` compiles kernels, or on which a
call is described with tensors that have no memory.

While a thread has one, its tensors represent tensors on it: calls are described and planned as they
would be there, and their launches are not made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class AbsentGpu(NamedTuple):
    """What plans depend on."""

    capability: tuple[int, int]
    multiprocessors: int


# With the multiprocessors of a usual card: A100, A40, L40S, H100 or H200 (SXM), B200, RTX 5090.
TARGETS = {
    "sm_80": AbsentGpu((8, 0), 108),
    "sm_86": AbsentGpu((8, 6), 84),
    "sm_89": AbsentGpu((8, 9), 142),
    "sm_90": AbsentGpu((9, 0), 132),
    "sm_100": AbsentGpu((10, 0), 148),
    "sm_120": AbsentGpu((12, 0), 170),
}


class _ThisThread(threading.local):
    gpu: AbsentGpu | None = None


current_target = _ThisThread()


@contextmanager
def representing(gpu: AbsentGpu) -> Iterator[None]:
    """Inside the block, tensors of this thread represent tensors on `gpu`."""
    current_target.gpu = gpu
    try:
        yield
    finally:
        current_target.gpu = None


def capability_of(x: Tensor) -> tuple[int, int] | None:
    """The compute capability of the GPU that has a tensor, or whose tensor it represents; None on a
    CPU."""
    if current_target.gpu is not None:
        return current_target.gpu.capability
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else None
