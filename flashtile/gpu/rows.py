"""Tensors of head rows as kernel arguments. Triton takes named tuples.

All strides count elements.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

ALIGNMENT = 16  # bytes, at which TMA and vector loads want rows to start


class Rows(NamedTuple):
    """A tensor of head rows: (batch, row, head, dim) strides; for pages the batch is the page."""

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
    """An optional tensor whose strides follow from its shape."""
    return None if x is None else x.contiguous()
