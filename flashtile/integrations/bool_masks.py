"""A bool mask, True where a query sees a key, in the form that costs flashtile least."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..masks import BlockMask

# On a CPU a tile is a handful of library calls, whose overhead wants larger tiles than a GPU's
# shared memory.
CPU_TILE, GPU_TILE = (256, 256), (128, 128)


def options_of(mask: Tensor, M: int, N: int) -> dict[str, Any]:
    """The keyword argument of `flashtile.attention` that applies a bool mask exactly.

    Args:
        mask: bool, broadcasts to (batch, heads, M, N); True where visible.
        M, N: number of queries and of keys.

    Returns:
        ``{"block_mask": ...}``, which skips the tiles that the mask empties and does not mask those
        it leaves full; while tracing, when the number of such tiles cannot be read, ``{"bias":
        ...}`` with 0 and -inf.
    """
    if torch.compiler.is_compiling() or M == 1:  # a single row has no tiles worth finding
        bias = torch.zeros(mask.shape, device=mask.device)
        return {"bias": bias.masked_fill(~mask, float("-inf"))}
    return {"block_mask": block_mask(mask, M, N)}


def block_mask(mask: Tensor, M: int, N: int) -> BlockMask:
    """Cut `mask` into tiles.

    A dimension that `mask` broadcasts is stored once: a mask of keys takes linear memory.
    """
    BM, BN = CPU_TILE if mask.device.type == "cpu" else GPU_TILE
    BM, BN = min(BM, _power_of_two(M)), min(BN, _power_of_two(N))
    batch, heads, rows, _ = mask.shape
    if rows == M:
        return BlockMask.from_dense(mask.expand(batch, heads, M, N), (BM, BN))
    one_row = BlockMask.from_dense(mask.expand(batch, heads, BM, N), (BM, BN))
    repeats = (batch, heads, -(-M // BM), one_row.kinds.shape[3])
    return BlockMask(
        one_row.kinds.expand(repeats).contiguous(),
        one_row.partial_index.expand(repeats).contiguous(),
        one_row.partial_tiles,
        (M, N),
    )


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`, and at least 16."""
    return max(16, 1 << (n - 1).bit_length())
