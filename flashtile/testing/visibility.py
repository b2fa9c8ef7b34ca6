"""Which keys a query sees by position and by a block mask, for the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..masks import Spans, Window

WindowSize = Window | tuple[int | None, int | None]


def visible_keys(
    m_used: Tensor,
    n_used: Tensor,
    M: int,
    N: int,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
) -> Tensor:
    """Which keys each query sees by position: bool (B, M, N).

    `m_used`, `n_used`: (B,) int64, the used lengths. Query i has the position
    `p = i + n_used - m_used` (bottom-right alignment).
    """
    i = torch.arange(M)[None, :, None]
    j = torch.arange(N)[None, None, :]
    p = i + (n_used - m_used)[:, None, None]
    left, right = window_sides(causal, window_size)
    visible = (i < m_used[:, None, None]) & (j < n_used[:, None, None])
    if left is not None:
        visible = visible & (j >= p - left)
    if right is not None:
        visible = visible & (j <= p + right)
    if attention_chunk > 0:
        visible = visible & (p.div(attention_chunk, rounding_mode="floor") == j // attention_chunk)
    return visible


def window_sides(causal: bool, window_size: WindowSize) -> tuple[int | None, int | None]:
    """(left, right) with None for an unbounded side.

    In `window_size` -1 is also unbounded, but not in a `Window`; other negative sides move the
    window past the query. Causal sets the right side to 0. A window without any key is ignored.
    """
    left, right = window_size
    if not isinstance(window_size, Window):
        left, right = (None if side == -1 else side for side in window_size)
    if causal:
        right = 0
    if left is not None and right is not None and left + right < 0:
        return None, 0 if causal else None
    return left, right


def dense_spans(mask: Spans, N: int) -> Tensor:
    """A mask of spans as bool (B | 1, Hq | 1, M, N): True where some interval has the key."""
    keys = torch.arange(N)
    visible = (keys >= mask.starts[..., None]) & (keys < mask.stops[..., None])
    return visible.any(-2)


def dense_block_mask(block_mask: Any, M: int, N: int) -> Tensor:
    """A block mask as bool (B | 1, Hq | 1, M, N).

    Takes a bool tensor, a flashtile `BlockMask` or a FlexAttention `BlockMask`.
    """
    if isinstance(block_mask, Tensor):
        return block_mask.reshape((1,) * (4 - block_mask.ndim) + block_mask.shape)
    if not hasattr(block_mask, "mask_mod"):
        return block_mask.to_dense(M, N)
    bm, bn = block_mask.BLOCK_SIZE
    b, h = block_mask.kv_num_blocks.shape[:2]
    dense = torch.zeros(b, h, M, N, dtype=torch.bool)
    for ib in range(b):
        for ih in range(h):
            _fill_flex(dense[ib, ih], block_mask, ib, ih, bm, bn)
    return dense


def _fill_flex(dense: Tensor, mask: Any, b: int, h: int, bm: int, bn: int) -> None:
    M, N = dense.shape
    b_index, h_index = torch.tensor(b), torch.tensor(h)
    for row in range(-(-M // bm)):
        rows = torch.arange(row * bm, min(M, row * bm + bm))
        for col in mask.kv_indices[b, h, row, : int(mask.kv_num_blocks[b, h, row])].tolist():
            cols = torch.arange(col * bn, min(N, col * bn + bn))
            tile = mask.mask_mod(b_index, h_index, rows[:, None], cols[None, :])
            dense[rows[:, None], cols[None, :]] = tile.expand(len(rows), len(cols))
        if mask.full_kv_num_blocks is None:
            continue
        for col in mask.full_kv_indices[
            b, h, row, : int(mask.full_kv_num_blocks[b, h, row])
        ].tolist():
            dense[row * bm : row * bm + bm, col * bn : col * bn + bn] = True
