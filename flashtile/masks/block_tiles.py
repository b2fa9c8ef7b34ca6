"""Tiles of a block mask: evaluate them in small groups, classify them, and draw them.

The tiles of a mask are numbered (batch, head, tile row, tile column). No function here holds more
than `CPU_ELEMENTS` or `GPU_ELEMENTS` elements of the mask at once, apart from the partial tiles
that it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..autocast import autocast_off

EMPTY, FULL, PARTIAL = 0, 1, 2
# Marks after those of a mask's keys: a kernel's block that starts before the last key reads no
# others.
SPARE_MARKS = 128

# Elements that are evaluated at once. A function's temporaries may be int64: 8 MiB and 128 MiB.
CPU_ELEMENTS, GPU_ELEMENTS = 2**20, 2**24

Where = tuple[Tensor, ...]  # four int64 tensors (P,): the numbers of P tiles
Evaluate = Callable[[Where], Tensor]  # bool (P, BM, BN), True where visible

LARGEST_DRAWING = 32  # rows and columns


def classified(
    kinds: Tensor, undecided: Tensor, evaluate: Evaluate, tile_size: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluate the tiles of a mask of which the kind is not known, and keep the partial ones.

    Args:
        kinds: uint8 (batch, heads, nM, nN), EMPTY or FULL where the kind is known.
        undecided: bool, same shape: the tiles to evaluate.
        evaluate: computes the elements of given tiles. Past the last row and key of the mask it
            repeats them, so that they do not change the kind of a tile.
        tile_size: (BM, BN).

    Returns:
        The attributes `kinds`, `partial_index` and `partial_tiles` of `masks.BlockMask`. The host
        waits for the device, because the number of partial tiles depends on the elements.
    """
    kinds, partial_index = kinds.clone(), torch.full_like(kinds, -1, dtype=torch.int32)
    kept = [torch.zeros(0, *tile_size, dtype=torch.bool, device=kinds.device)]
    count = 0
    for where in groups(undecided, tile_size):
        elements = evaluate(where)
        is_full, is_seen = elements.flatten(1).all(-1), elements.flatten(1).any(-1)
        is_partial = is_seen & ~is_full
        found = elements[is_partial]
        kinds[where] = is_full.to(torch.uint8) * FULL + is_partial.to(torch.uint8) * PARTIAL
        partial_index[tuple(x[is_partial] for x in where)] = torch.arange(
            count, count + len(found), dtype=torch.int32, device=kinds.device
        )
        kept.append(found)
        count += len(found)
    return kinds, partial_index, torch.cat(kept)


def groups(chosen: Tensor, tile_size: tuple[int, int]) -> list[Where]:
    """The numbers of the tiles where `chosen`, bool (batch, heads, nM, nN), is True, in groups that
    are small enough to be evaluated at once.
    """
    limit = CPU_ELEMENTS if chosen.device.type == "cpu" else GPU_ELEMENTS
    size = max(1, limit // (tile_size[0] * tile_size[1]))
    where = chosen.nonzero(as_tuple=True)
    return list(zip(*(x.split(size) for x in where), strict=True)) if len(where[0]) else []


def rows_and_keys(
    where: Where, lengths: tuple[int, int], tile_size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The rows (P, BM) and the keys (P, BN) of tiles; past `lengths`, the last row and key."""
    (M, N), (BM, BN) = lengths, tile_size
    _, _, m, n = where
    rows = m[:, None] * BM + torch.arange(BM, device=m.device)
    keys = n[:, None] * BN + torch.arange(BN, device=n.device)
    return rows.clamp(max=M - 1), keys.clamp(max=N - 1)


def function_of_tiles(
    function: Callable[..., Any], lengths: tuple[int, int], tile_size: tuple[int, int]
) -> Evaluate:
    """Evaluate a function of four scalars (batch, head, query, key) on whole tiles. It may use them
    as an index into a captured tensor.
    """
    over_keys = torch.vmap(function, in_dims=(None, None, None, 0))
    over_rows = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    over_tiles = torch.vmap(over_rows, in_dims=(0, 0, 0, 0))

    def evaluate(where: Where) -> Tensor:
        b, h, _, _ = where
        with autocast_off(b), _OfScalars():
            elements: Tensor = over_tiles(b, h, *rows_and_keys(where, lengths, tile_size))
        return elements

    return evaluate


# Methods that read the numbers of a tensor. Arguments of mask and score functions have none yet.
READ_NUMBERS = frozenset(
    getattr(Tensor, name)
    for name in (
        "item", "tolist", "numpy", "data_ptr", "__array__", "__bool__", "__int__", "__float__",
        "__index__", "__complex__", "untyped_storage",
    )
)  # fmt: skip


class _OfScalars(TorchFunctionMode):
    """``x[i]`` by the operation `index`: PyTorch 2.9 reads the number `i` of a subscript, which
    `torch.vmap` refuses. A function that reads a number itself is refused by our own error.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in READ_NUMBERS and torch._C._functorch.is_batchedtensor(args[0]):
            raise NotImplementedError(
                f"mask_mod: {function.__name__} reads the value of a tensor, which is many at once "
                "here; use torch.where instead of if, and & and | instead of and and or"
            )
        if function is Tensor.__getitem__:
            x, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if all(isinstance(n, Tensor) for n in indices):
                return torch.ops.aten.index(x, list(indices))
        return function(*args, **(kwargs or {}))


def drawing(kinds: Tensor) -> str:
    """Tiles (nM, nN) as text, one line for each row: full blocks, shaded where partial, blank where
    empty. A cell of a large mask stands for several tiles.
    """
    step_m, step_n = (-(-size // LARGEST_DRAWING) for size in kinds.shape)
    lines = []
    for rows in kinds.cpu().split(step_m):
        line = ""
        for cell in rows.split(step_n, dim=1):
            is_empty, is_full = bool((cell == EMPTY).all()), bool((cell == FULL).all())
            line += "  " if is_empty else "██" if is_full else "░░"
        lines.append(line)
    return "\n".join(lines)
