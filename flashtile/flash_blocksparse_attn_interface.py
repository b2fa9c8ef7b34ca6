"""Block-sparse attention with FlashAttention 1's function and tile size.

FlashAttention-2 still ships this import path, but not the extension that it needs. Here it runs on
every backend. For other tile sizes, masks per head or FlexAttention's masks, pass ``block_mask=``
to any attention function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .api import Result, attention_varlen
from .call import checks
from .masks import BlockMask

TILE_SIZE = (16, 256)  # queries, keys: FlashAttention 1's


def convert_blockmask(blockmask: Tensor, causal: bool = False) -> Tensor:
    """Convert a mask of tiles to FlashAttention 1's index lists.

    Args:
        blockmask: (query tiles, key tiles), non-zero where visible.
        causal: must be False, as in FlashAttention 1; pass ``causal=True`` to the attention
            instead.

    Returns:
        int32 (key tiles, query tiles). Each row lists the query tiles that see one key tile, padded
        with -1. An entry is four times the query tile's index, plus 1 if this is the first key tile
        that the query tile sees, plus 2 if it is the last.

    Raises:
        ValueError: `blockmask` is not 2-D, or `causal` is True.
    """
    checks.tensor("blockmask", blockmask, dims="query tiles, key tiles")
    if causal:
        raise ValueError("causal: got True, want False; pass causal=True to the attention instead")
    visible = blockmask != 0
    columns = torch.arange(visible.shape[1], device=visible.device)
    first = visible & (visible.cumsum(1) == 1)
    last = visible & (columns == (visible * (columns + 1)).amax(1, keepdim=True) - 1)
    rows = torch.arange(visible.shape[0], device=visible.device)[:, None]
    numbers = (rows * 4 + first.int() + 2 * last.int()).masked_fill(~visible, 4 * visible.shape[0])
    ordered = numbers.sort(0).values
    return ordered.masked_fill(ordered == 4 * visible.shape[0], -1).T.contiguous().int()


def _tiles_of(converted: Tensor) -> Tensor:
    """The inverse of `convert_blockmask`: (query tiles, key tiles) bool."""
    tiles = converted.new_zeros(converted.shape[1] + 1, converted.shape[0], dtype=torch.bool)
    # Padding goes to one extra row, which the last line drops.
    rows = torch.where(converted < 0, converted.shape[1], converted // 4)
    tiles.scatter_(0, rows.T.long(), True)
    return tiles[:-1]


def flash_blocksparse_attn_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    blockmask: Tensor,
    dropout_p: float,
    max_s: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    convert_mask: bool = True,
) -> Result:
    """Packed self-attention that computes only the tiles of `blockmask`.

    Args:
        qkv: (total, 3, heads, head_dim).
        cu_seqlens: (batch + 1,) int32, cumulative lengths, 0 first.
        blockmask: (ceil(max_s / 16), ceil(max_s / 256)), non-zero where a tile of 16 queries and
            256 keys is visible; one mask for every sequence and head.
        dropout_p: rate in [0, 1) at which attention probabilities are dropped.
        max_s: longest sequence.
        softmax_scale, causal, return_attn_probs: as in `flashtile.attention_varlen`.
        convert_mask: pass False if `blockmask` is already a result of `convert_blockmask`.

    Returns:
        out (total, heads, head_dim), and with `return_attn_probs` (out, lse, probs).

    Raises:
        ValueError, TypeError, NotImplementedError: as `flashtile.attention_varlen`.

    Source: FlashAttention (Dao et al. 2022), section 3.3 and algorithm 5.
    """
    q, k, v = checks.unpacked("qkv", qkv, 3, "total, 3, heads, head_dim")
    checks.tensor("blockmask", blockmask, dims="query tiles, key tiles")
    if not convert_mask:
        blockmask = _tiles_of(blockmask)
    return attention_varlen(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_s,
        max_s,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        block_mask=BlockMask.from_tiles(blockmask, TILE_SIZE),
        return_attn_probs=return_attn_probs,
    )
