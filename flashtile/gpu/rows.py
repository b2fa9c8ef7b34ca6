"""Tensors of head rows as kernel arguments, in named tuples, which Triton accepts.

All strides count elements.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

ALIGNMENT = 16  # bytes; TMA and vector loads need rows that start at multiples of it


class Rows(NamedTuple):
    """A tensor of head rows and its strides; for pages `batch` is the stride of a page."""

    ptr: Tensor
    batch: int
    row: int
    head: int
    dim: int


def rows_of(x: Tensor) -> Rows:
    """`x` (batch, row, head, dim), or packed (row, head, dim)."""
    stride = x.stride()
    if len(stride) == 4:
        return Rows(x, *stride)
    return Rows(x, 0, *stride)


def is_aligned(*tensors: Tensor) -> bool:
    """Whether every row starts at a multiple of `ALIGNMENT` and its elements are contiguous."""
    for x in tensors:
        *outer, dim = x.stride()
        units = ALIGNMENT // x.element_size()
        if dim != 1 or x.data_ptr() % ALIGNMENT or any(s % units or s == 0 for s in outer):
            return False
    return True


def contiguous(x: Tensor | None) -> Tensor | None:
    """`x.contiguous()`, or None."""
    return None if x is None else x.contiguous()
