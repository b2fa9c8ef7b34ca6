"""Calls that are described, not run, so that their kernels can be compiled: those for a GPU that is
not here, and the pass that will probably follow.

A call is described with tensors on the CPU or without memory. While a thread has an `AbsentGpu`,
they represent tensors on it: the call is planned as it would be there, and its launches are not
made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

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


class _Target(threading.local):
    gpu: AbsentGpu | None = None


current_target = _Target()


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


# The kernels of the pass that will probably follow are compiled at the same time as those of this
# pass.


class _NextPass(threading.local):
    next_pass: Callable[[], Any] | None = None
    launches: list[Any] | None = None


_this_thread = _NextPass()


@contextmanager
def followed_by(next_pass: Callable[[], Any]) -> Iterator[None]:
    """Inside the block, this thread compiles the kernels of `next_pass`, a call with tensors that
    have no memory, together with the first new ones that it needs.
    """
    _this_thread.next_pass = next_pass
    try:
        yield
    finally:
        _this_thread.next_pass = None


def described_launches() -> list[Any] | None:
    """Where launches are written down, while the next pass is described instead of run."""
    return _this_thread.launches


def launches_of_next_pass() -> list[Any]:
    """What the next pass would launch; nothing if it raises an error, as it will do later."""
    next_pass, _this_thread.next_pass = _this_thread.next_pass, None
    found: list[Any] = []
    if next_pass is not None:
        _this_thread.launches = found
        try:
            with suppress(Exception):
                next_pass()
        finally:  # also after KeyboardInterrupt: later passes would be described, not run
            _this_thread.launches = None
    return found
