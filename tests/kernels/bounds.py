"""Reads and writes of interpreted kernels outside of the tensors of their launch.

On a GPU they are illegal accesses of memory or numbers of others; under Triton's interpreter they
go unnoticed, because most memory of a process can be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from triton.runtime import interpreter

_starts = _stops = np.zeros(0, np.uint64)  # of the memory of the launch, ascending and apart


def watch() -> None:
    """From now on such an access raises an IndexError in the kernel."""
    grid, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    prepare, load, store = (
        grid._init_args_hst,
        builder.create_masked_load,
        builder.create_masked_store,
    )

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        global _starts, _stops
        found = prepare(self, args, kwargs)
        memory = sorted(set(_memory_of((*found[0], *found[1].values()))))
        apart: list[list[int]] = []
        for start, stop in memory:
            if apart and start <= apart[-1][1]:
                apart[-1][1] = max(apart[-1][1], stop)
            else:
                apart.append([start, stop])
        _starts, _stops = np.array(apart, np.uint64).reshape(-1, 2).T
        return found

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        _check("reads", pointers, mask)
        return load(self, pointers, mask, *rest, **named)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check("writes", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    grid._init_args_hst = init_args
    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


def _memory_of(arguments: Any) -> Iterator[tuple[int, int]]:
    """The bounds of the storages of all tensors, also of those in tuples and descriptors."""
    for x in arguments:
        if isinstance(x, tuple):
            yield from _memory_of(x)
        elif hasattr(x, "block_shape"):
            yield from _memory_of((x.base,))
        elif hasattr(x, "data_ptr"):
            storage = interpreter._unwrap_tensor(x).untyped_storage()
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _check(what: str, pointers: Any, mask: Any) -> None:
    asked = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
    size = np.uint64(interpreter._get_np_dtype(pointers.get_element_ty()).itemsize)
    index = np.searchsorted(_starts, asked, side="right")
    inside = index > 0
    inside[inside] = asked[inside] + size <= _stops[index[inside] - 1]
    if not inside.all():
        raise IndexError(
            f"{what} {(~inside).sum()} of {asked.size} elements outside of all tensors"
        )
