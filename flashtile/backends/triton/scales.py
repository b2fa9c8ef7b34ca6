"""Load the scales of float8 queries, keys and values in the forward.

A per-head scale is the same for all tiles of a KV loop. A per-block scale belongs to
`FLOAT8_QUERY_BLOCK` queries of a head, (B, Hq, blocks of M), or to `FLOAT8_KEY_BLOCK` keys of a
key head, (B, Hk, blocks of N). Blocks are counted from the start of each sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...problem import FLOAT8_KEY_BLOCK, FLOAT8_QUERY_BLOCK

QUERY_BLOCK = tl.constexpr(FLOAT8_QUERY_BLOCK)
KEY_BLOCK = tl.constexpr(FLOAT8_KEY_BLOCK)


@triton.jit
def head_scale(descale, b, kv_head, heads, cfg: tl.constexpr):
    """The per-head scale, from (B, Hk); 1 without scales."""
    scale = 1.0
    if descale is not None:
        scale = tl.load(descale + b * (heads // cfg.GROUP) + kv_head).to(tl.float32)
    return scale


@triton.jit
def query_scales(score, b, h, kv_head, rows, count, heads, lengths, cfg: tl.constexpr):
    """The factor of every row's products: the product of the scales of q and k, a scalar; or, with
    per-block scales, only that of q, (BLOCK_M, 1), and `key_block_scale` is another factor.
    """
    if score.data.q_block_descale is not None:
        block = (b * heads + h) * tl.cdiv(lengths.M, QUERY_BLOCK) + rows // QUERY_BLOCK
        scales = tl.load(score.data.q_block_descale + block, mask=rows < count, other=1.0)
        scales = scales.to(tl.float32)
    else:
        scales = head_scale(score.data.q_descale, b, kv_head, heads, cfg)
        scales *= head_scale(score.data.k_descale, b, kv_head, heads, cfg)
    return scales


@triton.jit
def first_key_block(b, kv_head, heads, lengths, cfg: tl.constexpr):
    """Index of the first per-block scale of a sequence's keys and values."""
    return (b * (heads // cfg.GROUP) + kv_head) * tl.cdiv(lengths.N, KEY_BLOCK)


@triton.jit
def key_block_scale(descale, first, n0, BLOCK_N: tl.constexpr):
    """The scale of the keys or values [n0, n0 + BLOCK_N), which are in one block; None without
    per-block scales.
    """
    tl.static_assert(KEY_BLOCK % BLOCK_N == 0)
    scale = None
    if descale is not None:
        scale = tl.load(descale + first + n0 // KEY_BLOCK).to(tl.float32)
    return scale
