"""Convert masks that callers give in other forms. `attn_mask` and `key_padding_mask` become a
`BlockMask` or a bias, whichever is cheaper; lists of keys of blocks of queries become a
`BlockMask` on their device; of lists the host reads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..masks import BlockMask
from ..masks.block_mask import checked_pair, with_every_tile
from . import checks
from .layouts import Cached, Dense, Layout

# On a CPU each tile costs several library calls, so tiles are larger than those that fit a GPU's
# shared memory.
CPU_TILE, GPU_TILE = (256, 256), (128, 128)

BLOCKS, INDEX = "batch, kv_heads, blocks of queries, top", "batch, seq_q, kv_heads, top"


def with_masks(q: Any, k: Any, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of a call, with the two other masks combined into `bias` or `block_mask`.

    Raises:
        ValueError, TypeError: a mask does not fit q (batch, seq_q, heads, head_dim) and k (batch,
            seq_k, kv_heads, head_dim).
    """
    options = dict(keywords)
    attn_mask, key_padding_mask = (options.pop(n, None) for n in ("attn_mask", "key_padding_mask"))
    if attn_mask is None and key_padding_mask is None:
        return options
    checks.tensor("q", q, dims="batch, seq_q, heads, head_dim")
    checks.tensor("k", k, dims="batch, seq_k, kv_heads, head_dim")
    (B, M, Hq), N = q.shape[:3], k.shape[1]
    sizes, bias = (B, Hq, M, N), options.get("bias")
    visible, bias = _visible(q, sizes, attn_mask, key_padding_mask, bias)
    if visible is None:
        return {**options, "bias": bias}
    if options.get("block_mask") is not None:  # a call can have only one block mask
        return {**options, "bias": _sum(bias, additive(visible), q, sizes)}
    masked = options_of(visible, M, N)
    if "bias" in masked:
        return {**options, "bias": _sum(bias, masked["bias"], q, sizes)}
    return {**options, "bias": bias, **masked}


def as_bias(
    q: Tensor,
    sizes: tuple[int, int, int, int],
    attn_mask: Any = None,
    key_padding_mask: Any = None,
    bias: Any = None,
) -> Tensor:
    """A bias of four dimensions that applies at least one mask.

    Args:
        sizes: (batch, heads, seq_q, seq_k), to which the bias broadcasts.

    Raises:
        ValueError, TypeError: a mask does not fit.
    """
    if bias is not None:
        checks.broadcastable("bias", bias, q, sizes)
    visible, bias = _visible(q, sizes, attn_mask, key_padding_mask, bias)
    if visible is not None:
        bias = _sum(bias, additive(visible), q, sizes)
    return bias[(None,) * (4 - bias.dim())]


def _visible(
    q: Any, sizes: tuple[int, int, int, int], attn_mask: Any, key_padding_mask: Any, bias: Any
) -> tuple[Tensor | None, Any]:
    """Where a bool mask shows a key, None if everywhere; and the bias with a floating mask."""
    visible = None
    if attn_mask is not None:
        attn_mask = checks.attn_mask(attn_mask, q, sizes)
        if attn_mask.dtype == torch.bool:
            visible = attn_mask
        else:
            bias = _sum(bias, attn_mask, q, sizes)
    if key_padding_mask is not None:
        checks.key_padding_mask(key_padding_mask, q, (sizes[0], sizes[3]))
        kept = key_padding_mask[:, None, None]
        visible = kept if visible is None else visible & kept
    return visible, bias


def _sum(bias: Any, other: Tensor, q: Tensor, sizes: tuple[int, ...]) -> Tensor:
    if bias is None:
        return other
    checks.broadcastable("bias", bias, q, sizes)
    dtype = torch.promote_types(torch.promote_types(bias.dtype, other.dtype), torch.float32)
    return bias.to(dtype) + other.to(dtype)


def options_of(mask: Tensor, M: int, N: int) -> dict[str, Any]:
    """The keyword argument of `flashtile.attention` that applies a bool mask exactly.

    Args:
        mask: bool, broadcasts to (batch, heads, M, N); True where visible.
        M, N: number of queries and of keys.

    Returns:
        ``{"block_mask": ...}``, which skips empty tiles and does not mask full ones; or ``{"bias":
        ...}`` with 0 and -inf where there is little to skip: a single query or, on a CPU, a single
        tile.
    """
    fits = (size <= limit for size, limit in zip((M, N), CPU_TILE, strict=True))
    is_one_tile = mask.device.type == "cpu" and all(fits)
    if M == 1 or is_one_tile:
        return {"bias": additive(mask)}
    return {"block_mask": block_mask(mask, M, N)}


def additive(mask: Tensor) -> Tensor:
    """0 where a bool mask is True, -inf elsewhere."""
    zeros = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return zeros.masked_fill(~mask, float("-inf"))


def block_mask(mask: Tensor, M: int, N: int) -> BlockMask:
    """Cut `mask` into tiles.

    A broadcast dimension of `mask` is stored once, so a mask of keys takes linear memory. While
    tracing, the number of partial tiles cannot be read, and the mask stores every tile.
    """
    BM, BN = CPU_TILE if mask.device.type == "cpu" else GPU_TILE
    if not torch.compiler.is_compiling():  # which would compile a graph for each tile
        BM, BN = min(BM, _power_of_two(M)), min(BN, _power_of_two(N))
    batch, heads, rows, _ = mask.shape
    is_known = checks.is_readable(mask) and not torch._C._are_functorch_transforms_active()
    cut = BlockMask.from_dense if is_known else with_every_tile
    if rows == M:
        return cut(mask.expand(batch, heads, M, N), (BM, BN))
    one_row = cut(mask.expand(batch, heads, BM, N), (BM, BN))
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


def with_key_lists(
    q: Tensor, k: Tensor, layout: Layout, keywords: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The options of a call whose tensors are checked, with `key_blocks` as a `block_mask` or, if
    each query has a list of its own, as a `key_index` of runs of keys.

    Raises:
        ValueError, TypeError: the lists do not fit the call, or, where values are checked, an index
            is out of range or twice in a list.
    """
    options = dict(keywords)
    key_blocks, block_size = (options.pop(name, None) for name in ("key_blocks", "block_size"))
    index = options.get("key_index")
    if (key_blocks is None) != (block_size is None):
        raise ValueError(f"block_size: got {block_size}, want it with key_blocks, and only there")
    for name in ("key_index", "block_mask"):
        if key_blocks is not None and options.get(name) is not None:
            raise ValueError(f"{name}: got it and key_blocks, want only one of them")
    B, M, N = layout.sizes(q, k)
    cu_seqlens = None if isinstance(layout, Dense) else layout.cu_seqlens_q
    batch, heads = (1, B if cu_seqlens is None else 1), (1, k.shape[-2])
    if index is not None:
        checks.key_list("key_index", index, q, INDEX, (batch, (q.shape[-3],), heads))
        return {**options, "key_index": _distinct("key_index", index, q, N)}
    if key_blocks is None:
        return options
    rows, keys = checked_pair("block_size", block_size, "(queries, keys)")
    lists = (-(-M // rows),) if cu_seqlens is None else None
    checks.key_list("key_blocks", key_blocks, q, BLOCKS, (batch, heads, lists))
    if cu_seqlens is not None and checks.checking_values((q, key_blocks)):
        checks.number_of_lists("key_blocks", key_blocks, int(_blocks(cu_seqlens, rows).sum()))
    key_blocks = _distinct("key_blocks", key_blocks, q, -(-N // keys))
    is_cached = isinstance(layout, Cached) or getattr(layout, "page_table", None) is not None
    if rows == 1 and not is_cached:
        index = pad(key_blocks, (0, 0, 0, q.shape[-3] - key_blocks.shape[2]), value=-1)
        return {**options, "key_index": index.transpose(1, 2), "key_run": keys}
    if cu_seqlens is not None:
        key_blocks = _of_sequences(key_blocks, cu_seqlens, rows, M)
    if key_blocks.shape[1] > 1:
        key_blocks = key_blocks.repeat_interleave(q.shape[-2] // k.shape[-2], 1)
    return {**options, "block_mask": BlockMask.from_key_blocks(key_blocks, N, (rows, keys))}


def packed_lists(keywords: Any, batch: int) -> Any:
    """The options of a call with padded queries, for the same queries packed."""
    packed = dict(keywords)
    for name, dims, dim in (("key_blocks", BLOCKS, 2), ("key_index", INDEX, 1)):
        x = keywords.get(name)
        if x is not None:
            checks.key_list(name, x, x, dims, ((1, batch), None, None))
            packed[name] = x.expand(batch, -1, -1, -1).movedim(dim, 1).flatten(0, 1)
            packed[name] = packed[name][None].movedim(1, dim)
    return packed


def _distinct(name: str, lists: Tensor, q: Tensor, size: int) -> Tensor:
    """Lists without an index twice: checked where values are, elsewhere sorted and -1 instead."""
    if checks.checking_values((q, lists)):
        checks.key_list_values(name, lists, size)
        return lists
    if lists.shape[-1] < 2:
        return lists
    lists = lists.sort(-1).values
    return lists.masked_fill(pad(lists.diff(dim=-1) == 0, (1, 0)), -1)


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
    padded = pad(key_blocks[0], (0, 0, 0, 1), value=-1)
    found = padded.index_select(1, index.clamp(0, last).flatten())
    return found.unflatten(1, index.shape).transpose(0, 1)
