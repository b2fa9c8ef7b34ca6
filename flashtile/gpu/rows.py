"""Tensors of head rows as kernel arguments.

All strides count elements.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; TMA and vector loads need rows that start at multiples of it
ROW_STEP = 8  # rows of multiples of so many elements, 16 or 32 bits each, are aligned if contiguous


class Rows(NamedTuple):
    """A tensor of head rows and its strides; for pages `batch` is the stride of a page.

    Triton accepts named tuples as arguments, and compiles a kernel anew for numbers in them that
    are 1 or multiples of 16, and for tensors that start at multiples of `ALIGNMENT`.
    """

    ptr: Tensor
    batch: int
    row: int
    head: int
    dim: int


class HeadRows(NamedTuple):
    """Head rows in a kernel, built from separate arguments (`row_arguments`), which Triton does not
    specialise. The elements of a row are adjacent.
    """

    ptr: Any
    batch: Any
    row: Any
    head: Any


def rows_of(x: Tensor) -> Rows:
    """`x` (batch, row, head, dim), or packed (row, head, dim)."""
    stride = x.stride()
    if len(stride) == 4:
        return Rows(x, *stride)
    return Rows(x, 0, *stride)


def fields_of(**tuples: Any) -> dict[str, Any]:
    """The arguments ``x_field`` of a kernel for each named tuple `x`: see `kernel.kernel`."""
    return {
        f"{name}_{field}": value
        for name, x in tuples.items()
        for field, value in zip(x._fields, x, strict=True)
    }


def row_arguments(**tensors: Tensor | None) -> dict[str, Any]:
    """The arguments ``q_ptr``, ``q_batch``, ``q_row`` and ``q_head`` for a tensor `q`, shaped as in
    `rows_of`, with adjacent elements; for None, a pointer that is None.
    """
    return fields_of(
        **{
            name: HeadRows(x, *((0, 0, 0) if x is None else _row_strides(x)))
            for name, x in tensors.items()
        }
    )


def with_adjacent_elements(x: Tensor) -> Tensor:
    """`x`, or a copy whose rows have adjacent elements: others would be loaded one by one."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def with_aligned_rows(x: Tensor) -> Tensor:
    """`x`, or a contiguous copy, if `is_in_place` does not hold."""
    return x if is_in_place(x) else x.clone(memory_format=torch.contiguous_format)


def is_in_place(x: Tensor) -> bool:
    """Whether kernels can read or write the rows where they are: elements are adjacent, and rows
    are aligned if they have multiples of `ROW_STEP` elements.
    """
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return False
    return x.shape[-1] % ROW_STEP > 0 or has_aligned_rows(x)


def has_aligned_rows(*tensors: Tensor) -> bool:
    """Whether every row starts at a multiple of `ALIGNMENT`. Sequences and heads may be
    broadcast.
    """
    for x in tensors:
        unit = ALIGNMENT // x.element_size()
        batch, row, head = _row_strides(x)
        if x.data_ptr() % ALIGNMENT or batch % unit or row % unit or head % unit or row == 0:
            return False
    return True


def common_alignment(x: Tensor) -> int:
    """The largest power of two, up to `ALIGNMENT`, at whose multiples all rows start, in bytes."""
    steps = (x.data_ptr(), *(step * x.element_size() for step in _row_strides(x)))
    return math.gcd(ALIGNMENT, *steps)


def _row_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of (batch, row, head). A dimension of size 1 may have any stride; here it has one
    that keeps rows aligned.
    """
    unit = ALIGNMENT // x.element_size()
    outer = [unit if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)][:-1]
    batch, row, head = (0, *outer) if len(outer) == 2 else outer
    return batch, row, head


def is_aligned(*tensors: Tensor) -> bool:
    """Whether every row starts at a multiple of `ALIGNMENT` and its elements are contiguous, as
    TMA reads them: no dimension is broadcast."""
    for x in tensors:
        *outer, dim = x.stride()
        units = ALIGNMENT // x.element_size()
        if dim != 1 or x.data_ptr() % ALIGNMENT or any(s % units or s == 0 for s in outer):
            return False
    return True


def at_boundary(x: Tensor | None) -> Tensor | None:
    """`x`, or a copy that is contiguous and starts at a multiple of `ALIGNMENT`; or None."""
    if x is None:
        return None
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
