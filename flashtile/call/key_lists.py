"""Convert lists of keys to a mask on their device: the host reads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..masks import BlockMask
from ..masks.block_mask import checked_pair
from . import checks
from .layouts import Dense, Layout


def with_key_lists(
    q: Tensor, k: Tensor, layout: Layout, keywords: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The options of a call whose tensors are checked, with `key_blocks` as a `block_mask`.

    Raises:
        ValueError, TypeError: the lists do not fit the call, or, where values are checked, an index
            is out of range or twice in a list.
    """
    options = dict(keywords)
    key_blocks, block_size = (options.pop(name, None) for name in ("key_blocks", "block_size"))
    if key_blocks is None:
        if block_size is not None:
            raise ValueError(f"block_size: got {block_size} without key_blocks, want both")
        return options
    if options.get("block_mask") is not None:
        raise ValueError("key_blocks: got lists and a block_mask, want only one of them")
    B, M, N = layout.sizes(q, k)
    rows, keys = checked_pair("block_size", block_size, "(queries, keys)")
    cu_seqlens = None if isinstance(layout, Dense) else layout.cu_seqlens_q
    tiles = -(-M // rows) if cu_seqlens is None else None
    batch = B if cu_seqlens is None else 1
    checks.key_list("key_blocks", key_blocks, q, (batch, k.shape[-2], tiles))
    if checks.checking_values((q, key_blocks)):
        total = None if cu_seqlens is None else int(_blocks(cu_seqlens, rows).sum())
        checks.key_list_values("key_blocks", key_blocks, -(-N // keys), total)
    if cu_seqlens is not None:
        key_blocks = _of_sequences(key_blocks, cu_seqlens, rows, M)
    if key_blocks.shape[1] > 1:
        key_blocks = key_blocks.repeat_interleave(q.shape[-2] // k.shape[-2], 1)
    return {**options, "block_mask": BlockMask.from_key_blocks(key_blocks, N, (rows, keys))}


def packed_lists(key_blocks: Any, batch: int) -> Tensor:
    """The lists of padded queries (batch or 1, ...) for the same queries packed, (1, ...)."""
    checks.tensor("key_blocks", key_blocks, dims="batch, kv_heads, blocks of queries, top")
    if key_blocks.shape[0] != batch:
        checks.tensor("key_blocks", key_blocks, shape=(1, *key_blocks.shape[1:]))
    return key_blocks.expand(batch, -1, -1, -1).transpose(0, 1).flatten(1, 2)[None]


def _blocks(cu_seqlens: Tensor, rows: int) -> Tensor:
    """(batch,): the blocks of queries of each sequence."""
    return (cu_seqlens.diff() + (rows - 1)) // rows


def _of_sequences(key_blocks: Tensor, cu_seqlens: Tensor, rows: int, M: int) -> Tensor:
    """Lists (batch, kv_heads or 1, ceil(M / rows), top) from those of all sequences, which follow
    each other; what comes after a sequence's last list is not read.
    """
    last = key_blocks.shape[2]
    counts = _blocks(cu_seqlens, rows)
    index = (counts.cumsum(0) - counts)[:, None] + torch.arange(-(-M // rows), device=counts.device)
    # A list of nothing follows the last one.
    padded = torch.nn.functional.pad(key_blocks[0], (0, 0, 0, 1), value=-1)
    found = padded.index_select(1, index.clamp(0, last).flatten())
    return found.unflatten(1, index.shape).transpose(0, 1)
