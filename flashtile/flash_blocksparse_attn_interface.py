"""Block-sparse attention with the function and the tile size of FlashAttention 1.

FlashAttention-2 still ships this import path, but not the extension behind it. Here it runs on
every backend; for other tile sizes, masks per head or FlexAttention's masks pass ``block_mask=`` to
any attention function.
"""

from __future__ import annotations

from torch import Tensor

from . import validate
from .api import Result, attention_varlen
from .masks import BlockMask

TILE_SIZE = (16, 256)  # queries, keys: FlashAttention 1's


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
    """Packed self-attention that visits the tiles of `blockmask` alone.

    Args:
        qkv: (total, 3, heads, head_dim).
        cu_seqlens: (batch + 1,) int32, cumulative lengths, 0 first.
        blockmask: (ceil(max_s / 16), ceil(max_s / 256)), non-zero where a tile of 16 queries and
            256 keys is visible; one mask for every sequence and head.
        dropout_p: probability in [0, 1) with which a probability is dropped.
        max_s: longest sequence.
        softmax_scale, causal, return_attn_probs: as in `flashtile.attention_varlen`.
        convert_mask: must be True; FlashAttention 1's preconverted index lists are an internal of
            its kernel.

    Returns:
        out (total, heads, head_dim), and with `return_attn_probs` (out, lse, probs).

    Raises:
        ValueError, TypeError, NotImplementedError: as `flashtile.attention_varlen`.

    Source: FlashAttention (Dao et al. 2022), section 3.3 and algorithm 5.
    """
    if not convert_mask:
        raise ValueError("convert_mask: got False, want True with blockmask as 0-1 tiles")
    q, k, v = validate.unpacked("qkv", qkv, 3, "total, 3, heads, head_dim")
    validate.rank("blockmask", blockmask, "query tiles, key tiles")
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
