"""Functions that allocate tensors of one kind again and again."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .hardware import multiprocessors

NewTensor = Callable[[], Tensor]


def uninitialised(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> NewTensor:
    """A function that allocates a contiguous tensor on `device`, which is then the current one."""
    kind, sizes = device.type, tuple(shape)
    if kind not in _EMPTY_STRIDED:
        return lambda: torch.empty(sizes, dtype=dtype, device=device)
    strides = torch.empty(sizes, device="meta").stride()
    return partial(_EMPTY_STRIDED[kind], sizes, strides, dtype)


def filled(
    shape: tuple[int, ...], dtype: torch.dtype, value: float, device: torch.device
) -> NewTensor:
    """A function that allocates a contiguous tensor of one value."""
    return partial(torch.full, shape, value, dtype=dtype, device=device)


class Scratch:
    """Tensors of 4-byte elements that a call needs only while it runs, as parts of one allocation,
    which takes less time than one for each.
    """

    _STEP = 128  # elements; every part starts at a multiple of 512 bytes, as an allocation does

    def __init__(
        self, kinds: dict[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device
    ) -> None:
        """
        Args:
            kinds: the shape and dtype of each part, by name.
        """
        self._kinds = kinds
        steps = [-(-math.prod(shape) // self._STEP) for shape, _ in kinds.values()]
        self._starts = [self._STEP * sum(steps[:i]) for i in range(len(steps))]
        self.allocate = uninitialised((self._STEP * sum(steps),), torch.float32, device)

    def parts(self, whole: Tensor) -> dict[str, Tensor]:
        """The parts of what `allocate` has returned."""
        return {
            name: whole[start : start + math.prod(shape)].view(dtype).view(shape)
            for start, (name, (shape, dtype)) in zip(self._starts, self._kinds.items(), strict=True)
        }


# What torch.compile's generated code allocates tensors with. These functions take half the time of
# `torch.empty`, because they skip the dispatcher. They are private, so a PyTorch may lack them.
_EMPTY_STRIDED: dict[str, Callable[..., Tensor]] = {
    kind: getattr(torch._C._dynamo.guards, name)
    for kind, name in (("cpu", "_empty_strided_cpu"), ("cuda", "_empty_strided_cuda"))
    if hasattr(torch._C._dynamo.guards, name)
}


# Limits of split-KV partial results, which a caller's workspace must hold.
#
# They depend only on sizes, not on lengths on the GPU, so one workspace serves a captured graph
# whose caches grow.


MAX_SPLITS = 256
# Largest number of rows of partial results per multiprocessor; a row belongs to one query, head and
# part. More rows would take much memory and save little time.
MOST_PART_ROWS = 512


def workspace_size(
    tokens: int, heads: int, value_head_dim: int, num_splits: int, device: torch.device
) -> int:
    """Largest size in bytes of the partial results of calls with up to `tokens` query tokens."""
    rows = tokens * heads
    if device.type == "cpu" or num_splits == 1:
        return 0
    parts = num_splits * rows
    if num_splits == 0:
        parts = min(MAX_SPLITS * rows, MOST_PART_ROWS * multiprocessors(device))
    # A row maximum and a row sum beside the output, which with most options are one number.
    return parts * (value_head_dim + 2) * torch.float32.itemsize
