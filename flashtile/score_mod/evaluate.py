"""Run a program on tiles of scores, in PyTorch.

Every number of a program becomes a tensor of four dimensions that broadcasts to (batch, heads,
rows, keys): an operation computes what does not depend on the key once for all keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..lru import memoised
from .program import CONSTANT, INTEGERS, VALUES, Line, Name, Program

_ONE = (1, 1, 1, 1)


def evaluate(
    program: Program,
    inputs: dict[str, Tensor],
    values: Tensor | None = None,
    integers: Tensor | None = None,
    shape: tuple[int, ...] = _ONE,
) -> dict[str, Tensor]:
    """All numbers of a program, by name.

    Args:
        inputs: ``s``, the indices and, for a derivative, ``g``; perhaps numbers of lines, too.
        values, integers: the buffers of captured numbers, (n,); None if the program reads none.
            Of several rows, (rows, n), the numbers read have these as their first dimension.
        shape: of constants.

    Raises:
        IndexError: an index is outside of a captured tensor.
    """
    found = dict(inputs)
    for line in program.lines:
        if line.name in found:
            continue
        if line.op == CONSTANT:
            found[line.name] = torch.full(
                shape, line.arguments[0], dtype=line.dtype, device=found["s"].device
            )
        elif line.op in (VALUES, INTEGERS):
            buffer = values if line.op == VALUES else integers
            assert buffer is not None
            found[line.name] = _read(line, buffer, found)
        else:
            arguments = (found[x] if isinstance(x, Name) else x for x in line.arguments)
            options = {n: found[x] if isinstance(x, Name) else x for n, x in line.options}
            found[line.name] = operation(line.op)(*arguments, **options)
    return found


@memoised(1024)
def operation(name: str) -> Callable[..., Any]:
    """The operation of ``torch.ops.aten`` with this name and overload."""
    packet, overload = name.split(".")
    found: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), overload)
    return found


def add_to_captured(total: Tensor, line: Line, gradient: Tensor, found: dict[str, Tensor]) -> None:
    """Add the gradients (batch, heads, rows, keys) of the numbers that `line` reads to `total`, a
    buffer like `values`, in an order that is always the same.
    """
    offset, sizes, *indices = line.arguments
    where = torch.full(_ONE, offset, dtype=torch.int64, device=total.device)
    stride = 1
    pairs = zip(sizes, _tensors(indices, found), strict=True)
    for size, index in reversed(list(pairs)):
        where = where + torch.where(index < 0, index + size, index) * stride
        stride *= size
    added = gradient.sum_to_size(where.shape).to(total.dtype)
    total.index_add_(0, where.reshape(-1), added.reshape(-1))


def _read(line: Line, buffer: Tensor, found: dict[str, Tensor]) -> Tensor:
    """The captured numbers of a line."""
    offset, sizes, *indices = line.arguments
    if not sizes:
        return buffer[offset].to(line.dtype, copy=True).view(_ONE)  # which may be written to
    count = torch.Size(sizes).numel()
    captured = buffer[..., offset : offset + count].unflatten(-1, sizes)
    each = [None] * (buffer.dim() - 1)
    try:
        read: Tensor = torch.ops.aten.index(captured, [*each, *_tensors(indices, found)])
    except IndexError as error:
        raise IndexError(f"score_mod: in a captured tensor of shape {sizes}, {error}") from error
    return read.to(line.dtype)


def _tensors(indices: list[Any], found: dict[str, Tensor]) -> list[Tensor]:
    device = found["s"].device
    return [
        found[n] if isinstance(n, Name) else torch.full(_ONE, n, device=device) for n in indices
    ]
