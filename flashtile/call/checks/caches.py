"""Checks of calls with a key-value cache: queries, cache, new tokens and rotary tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...problem import Operands, Options
from ..layouts import Cached
from .layouts import PAGES, cumulative, paged, qkv
from .on_host import cumulative_values, lengths_in_pages, within
from .scalars import flag, length
from .tensors import (
    index_tensor,
    no_shared_elements,
    per_sequence,
    rank,
    same_device,
    shape,
    shape_of,
    tensor,
)


def cached(q: Any, k_cache: Any, v_cache: Any, layout: Cached) -> None:
    """Check that queries, cache, new tokens and rotary tables fit together."""
    for name, x in (("k", layout.k_new), ("v", layout.v_new)):
        if x is not None:
            tensor(name, x)
    if (layout.k_new is None) != (layout.v_new is None):
        missing, given = ("k", "v") if layout.k_new is None else ("v", "k")
        raise ValueError(f"{missing}: got None with {given} given, want both or neither")
    _queries(q, k_cache, v_cache, layout)
    batch = layout.batch(q)
    _rows(q, k_cache, layout, batch)
    _lengths(k_cache, layout, batch)
    if layout.k_new is not None:
        _new_tokens(q, k_cache, v_cache, layout, batch)
    _rotary(q, layout, batch)


def _queries(q: Any, k_cache: Any, v_cache: Any, layout: Cached) -> None:
    packed = layout.cu_seqlens_q is not None
    of_queries = "total_q, heads, head_dim" if packed else "batch, seq_q, heads, head_dim"
    of_keys = "cache_rows, capacity, kv_heads, head_dim" if layout.page_table is None else PAGES
    names = "q k_cache v_cache"
    qkv(q, k_cache, v_cache, of_queries, of_keys, names, takes_float8_keys=True)
    if packed:
        cumulative("cu_seqlens_q", layout.cu_seqlens_q, q)
        length("max_seqlen_q", layout.max_seqlen_q)


def _rows(q: Tensor, k_cache: Tensor, layout: Cached, batch: int) -> None:
    rows = layout.cache_batch_idx
    per_sequence("cache_batch_idx", rows, q, batch)
    per_sequence("cache_leftpad", layout.cache_leftpad, q, batch)
    if layout.page_table is not None:
        paged(layout.page_table, k_cache, batch, has_rows=rows is not None)
    elif rows is not None and k_cache.shape[0] == 0 < batch:
        raise ValueError("k_cache: got no rows, want the rows in cache_batch_idx")
    elif rows is None and k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache: got {k_cache.shape[0]} rows, want {batch}, the batch of q; or pass "
            "cache_batch_idx to choose rows"
        )


def _lengths(k_cache: Tensor, layout: Cached, batch: int) -> None:
    lengths, new = layout.cache_seqlens, layout.k_new
    if lengths is None:
        if new is not None:
            raise ValueError(
                "cache_seqlens: got None, want the position to append k and v at, an int or "
                "(batch,) int32"
            )
    elif isinstance(lengths, Tensor) and lengths.dim() > 0:
        per_sequence("cache_seqlens", lengths, k_cache, batch)
    elif isinstance(lengths, Tensor):
        index_tensor("cache_seqlens", lengths, k_cache)
    else:
        length_on_host(k_cache, layout)


def length_on_host(k_cache: Tensor, layout: Cached) -> None:
    """Check `cache_seqlens` if it is a number: it must leave room for the new tokens."""
    lengths, new = layout.cache_seqlens, layout.k_new
    if lengths is None or isinstance(lengths, Tensor):
        return
    count, capacity = length("cache_seqlens", lengths), layout.capacity(k_cache)
    is_dense = new is not None and layout.cu_seqlens_k_new is None and new.dim() == 4
    added = new.shape[1] if new is not None and is_dense else 0
    if count + added > capacity:
        raise ValueError(
            f"cache_seqlens: got {count} and {added} new tokens, want at most {capacity} "
            "together, the capacity of the cache"
        )


def _new_tokens(q: Tensor, k_cache: Tensor, v_cache: Tensor, layout: Cached, batch: int) -> None:
    k, v, cu_seqlens = layout.k_new, layout.v_new, layout.cu_seqlens_k_new
    packed = cu_seqlens is not None
    dimensions = "total_new, kv_heads, head_dim" if packed else "batch, seq_new, kv_heads, head_dim"
    for name, x, row in (("k", k, k_cache), ("v", v, v_cache)):
        rank(name, x, dimensions)
        assert x is not None
        if x.shape[-2:] != row.shape[-2:]:
            raise ValueError(
                f"{name}: got (heads, head_dim) {tuple(x.shape[-2:])}, want "
                f"{tuple(row.shape[-2:])}, as in {name}_cache"
            )
        if x.dtype != q.dtype:  # also the dtype of the cache, unless that is float8
            raise TypeError(f"{name}: got dtype {x.dtype}, want {q.dtype}, the dtype of q")
        same_device(name, x, q)
        no_shared_elements(f"{name}_cache", row)
    assert k is not None and v is not None
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"v: got shape {shape_of(v)}, want as many tokens as k, which has shape {shape_of(k)}"
        )
    if cu_seqlens is not None:
        cumulative("cu_seqlens_k_new", cu_seqlens, q)
        shape("cu_seqlens_k_new", cu_seqlens, (batch + 1,), "one longer than the batch")
    elif k.shape[0] != batch:
        raise ValueError(f"k: got batch {k.shape[0]}, want {batch}, the batch of q")


def _rotary(q: Tensor, layout: Cached, batch: int) -> None:
    """Check that the rotary tables fit the queries, and that there are new tokens to rotate."""
    flag("rotary_interleaved", layout.rotary_interleaved)
    cos, sin = layout.rotary_cos, layout.rotary_sin
    if cos is None and sin is None:
        return
    if layout.k_new is None:
        raise ValueError(
            "rotary_cos: got a table without new tokens to rotate, want k and v, the new keys and "
            "values"
        )
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        rank(name, x, "positions, rotary_dim / 2")
        assert x is not None
        if not x.is_floating_point():
            raise TypeError(f"{name}: got dtype {x.dtype}, want a floating dtype")
        same_device(name, x, q)
    assert cos is not None and sin is not None
    shape("rotary_sin", sin, tuple(cos.shape), "the shape of rotary_cos")
    if cos.shape[0] < 1 or 2 * cos.shape[1] > q.shape[-1]:
        raise ValueError(
            f"rotary_cos: got shape {shape_of(cos)}, want at least one position and at most "
            f"head_dim / 2 = {q.shape[-1] // 2} columns"
        )
    per_sequence("rotary_seqlens", layout.rotary_seqlens, q, batch)


def cache_values(layout: Cached, operands: Operands, options: Options) -> None:
    """Check the values of rows, lengths and positions; see `checks.checking_values`.

    Args:
        operands: the operands with the lengths before the append.
    """
    k_cache, lengths = operands.k, operands.seqused_k
    table, capacity = layout.page_table, layout.capacity(k_cache)
    if layout.cache_batch_idx is not None:
        rows = k_cache if table is None else table
        within("cache_batch_idx", layout.cache_batch_idx, rows.shape[0])
    if layout.cache_seqlens is None or lengths is None:
        return
    if layout.k_new is not None and layout.cu_seqlens_k_new is not None:
        total = layout.k_new.shape[0]
        cumulative_values("cu_seqlens_k_new", layout.cu_seqlens_k_new, total, "k")
    before, added = lengths.tolist(), layout.added
    new = [added] * len(before) if isinstance(added, int) else added.tolist()
    after = [length + count for length, count in zip(before, new, strict=True)]
    if table is not None:
        page_size = k_cache.shape[1] if k_cache.shape[0] > 0 else 0
        with_new = "cache_seqlens" + (" with the new tokens" if layout.k_new is not None else "")
        lengths_in_pages(with_new, after, table, page_size)
    if min(before, default=0) < 0 or max(after, default=0) > capacity:
        raise ValueError(
            f"cache_seqlens: got {before}, {after} with the new tokens, want at least 0 and at "
            f"most {capacity}, the capacity of the cache"
        )
    if layout.k_new is not None:
        _distinct_slots(before, new, operands)
        _distinct_caches(operands, layout)
    if layout.rotary_cos is not None and before:
        _positions(lengths, layout, layout.rotary_cos, _rotated_queries(operands, options))


def _distinct_slots(before: list[int], added: list[int], operands: Operands) -> None:
    """Check that no two new tokens go to one slot of the cache."""
    table, rows = operands.page_table, operands.cache_batch_idx
    if table is None and rows is None:
        return
    counts = torch.tensor(added, dtype=torch.int64)
    sequence = torch.arange(len(before)).repeat_interleave(counts)
    index = torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]
    position = torch.tensor(before, dtype=torch.int64)[sequence] + index
    row = sequence
    if rows is not None:
        row = rows.cpu()[sequence]
    elif table is not None:
        page_size = operands.k.shape[1]
        row, position = table.cpu()[sequence, position // page_size], position % page_size
    slots = torch.stack((row, position), 1)
    if len(slots.unique(dim=0)) < len(slots):
        name = "page_table (block_table)" if rows is None else "cache_batch_idx"
        given = table if rows is None else rows
        shown = None if given is None else given.tolist()
        raise ValueError(
            f"{name}: got {shown}, by which new tokens of two sequences go to one slot of the "
            "cache; want a slot for each"
        )


def _distinct_caches(operands: Operands, layout: Cached) -> None:
    """Check that new keys and new values do not go to the same memory, unless both are the same."""
    k_cache, v_cache, k, v = operands.k, operands.v, layout.k_new, layout.v_new
    if k_cache.data_ptr() != v_cache.data_ptr() or k is None or v is None or not k.numel():
        return
    columns = min(k.shape[-1], v.shape[-1])
    same = torch.equal(k[..., :columns], v[..., :columns])
    if layout.rotary_cos is not None or k_cache.stride() != v_cache.stride() or not same:
        raise ValueError(
            "v_cache: got the memory of k_cache, want memory of its own where new keys and new "
            "values differ"
        )


def _rotated_queries(operands: Operands, options: Options) -> int | Tensor:
    """Number of positions of each sequence's queries: one without a causal mask, a window or a
    chunk.
    """
    starts = operands.cu_seqlens_q
    count = operands.q.shape[1] if starts is None else starts.diff()
    return count if options.facts else count > 0


def _positions(lengths: Tensor, layout: Cached, cos: Tensor, queries: int | Tensor) -> None:
    """Check that the rotary tables cover all positions of the new tokens and of the `queries`."""
    base = lengths if layout.rotary_seqlens is None else layout.rotary_seqlens
    if int(base.min()) < 0:
        raise ValueError(f"rotary_seqlens: got {base.tolist()}, want positions of at least 0")
    needed = max(int((base + count).max()) for count in (layout.added, queries))
    if needed > cos.shape[0]:
        raise ValueError(
            f"rotary_cos: got {cos.shape[0]} positions, want at least {needed} for the last new "
            "token and the last query"
        )
