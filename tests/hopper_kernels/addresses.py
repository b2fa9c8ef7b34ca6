"""Addresses in the emulated shared memory, and products that read a tile by its address
(`product_of_columns`)."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from . import emulator

BETWEEN = 2**20  # bytes from one allocation to the next

allocations: dict[Any, list[emulator.Shared]] = {}  # of a program


def reset() -> None:
    allocations.clear()


def placed(x: Any) -> Any:
    """A new allocation of the running program."""
    if isinstance(x, emulator.Shared):
        allocations.setdefault(emulator.context.program, []).append(x)
    return x


def write_addresses() -> int:
    """Every allocation begins with its address."""
    for n, x in enumerate(allocations[emulator.context.program]):
        x.data.view(torch.int32).flatten()[0] = n * BETWEEN
    return 0


def recast(x: emulator.Shared, dtype: Any, shape: list[int], layout: Any) -> emulator.Shared:
    if dtype == torch.int32:
        return emulator.Shared(x.data.view(torch.int32).view(shape))
    return x.recast(shape, layout)


def product_of_columns(asm: str, args: list[Any]) -> emulator.Product:
    """The product changes the first columns of its accumulator when it is waited for."""
    acc, p, place = args
    found = re.search(r"m64n(\d+)k16", asm)
    assert found is not None
    columns, (rows, _) = int(found[1]), acc.shape
    where, offset = divmod(int(place.flatten()[0]), BETWEEN)
    tiles = allocations[emulator.context.program][where]
    size = tiles.data[0].nbytes
    assert offset % size == 0
    tile = tiles.index(offset // size).reshape([p.shape[1], acc.shape[1]])
    assert rows == 64
    last = emulator.warpgroup_mma(p, tile.slice(0, columns, 1), acc[:, :columns], True, True)
    compute = last.compute

    def keep_others() -> Tensor:
        return torch.cat([compute(), acc[:, columns:]], 1)

    last.compute = keep_others
    return last
