"""Key-value caches, contiguous or paged: describing them, rotating new tokens, appending in place.

A cache row holds one sequence: the token at position ``p`` stands at ``cache[row, p]``, or, when
    the cache is cut into
pages, at ``cache[page_table[b, p // page_size], p % page_size]``. Lengths stay on the device
throughout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import validate
from .layers.rotary import apply_rotary_emb
from .problem import Operands, Options

_library = torch.library.Library("flashtile", "FRAGMENT")


class Cache(NamedTuple):
    """The cache as the caller gave it."""

    k: Tensor
    v: Tensor
    page_table: Tensor | None
    batch_idx: Tensor | None
    leftpad: Tensor | None
    seqlens: int | Tensor | None

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can have."""
        if self.page_table is not None:
            return self.page_table.shape[1] * self.k.shape[1]
        return self.k.shape[1]


class NewTokens(NamedTuple):
    """Keys and values to append, dense or packed."""

    k: Tensor | None
    v: Tensor | None
    cu_seqlens: Tensor | None


class Queries(NamedTuple):
    """Queries, dense or packed."""

    q: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int | None


class Rotary(NamedTuple):
    """The rotary embedding of the new tokens."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    seqlens: Tensor | None


def describe(
    queries: Queries, cache: Cache, new: NewTokens
) -> tuple[Operands, Tensor | None, int, int]:
    """Check how queries, cache and new tokens fit.

    Returns:
        The operands; the lengths before the append, int32 (batch,), None for the whole cache; the
        longest query; the longest key.
    """
    if (new.k is None) != (new.v is None):
        missing, given = ("k", "v") if new.k is None else ("v", "k")
        raise ValueError(f"{missing}: got None with {given} given, want both or neither")
    batch, max_seqlen_q = _check_queries(queries, cache)
    _check_cache(queries.q, cache, batch)
    lengths = _lengths(cache, new, batch)
    used = lengths
    if lengths is not None and new.k is not None:
        _check_new(queries.q, cache, new, batch)
        used = (lengths + _added(new)).int()
    operands = Operands(
        q=queries.q,
        k=cache.k,
        v=cache.v,
        cu_seqlens_q=queries.cu_seqlens,
        seqused_k=used,
        page_table=cache.page_table,
        cache_batch_idx=cache.batch_idx,
        leftpad_k=cache.leftpad,
    )
    if used is None and (cache.page_table is not None or cache.leftpad is not None):
        whole = torch.full((batch,), cache.capacity, dtype=torch.int32, device=cache.k.device)
        operands = operands._replace(seqused_k=whole)
    return operands, lengths, max_seqlen_q, cache.capacity


def _check_queries(queries: Queries, cache: Cache) -> tuple[int, int]:
    """Batch and longest query."""
    names = "q k_cache v_cache"
    keys = (
        "cache_rows, capacity, kv_heads, head_dim" if cache.page_table is None else validate.PAGES
    )
    if queries.cu_seqlens is None:
        layout = "batch, seq_q, heads, head_dim"
        validate.qkv(queries.q, cache.k, cache.v, layout, keys, names)
        return queries.q.shape[0], queries.q.shape[1]
    validate.qkv(queries.q, cache.k, cache.v, "total_q, heads, head_dim", keys, names)
    validate.cumulative("cu_seqlens_q", queries.cu_seqlens, queries.q)
    if queries.max_seqlen is None:
        raise ValueError(
            "max_seqlen_q: got None, want the longest query's length with cu_seqlens_q"
        )
    batch = queries.cu_seqlens.shape[0] - 1
    return batch, validate.length("max_seqlen_q", queries.max_seqlen)


def _check_cache(q: Tensor, cache: Cache, batch: int) -> None:
    validate.per_sequence("cache_batch_idx", cache.batch_idx, q, batch)
    validate.per_sequence("cache_leftpad", cache.leftpad, q, batch)
    if cache.page_table is not None:
        validate.paged(cache.page_table, cache.k, batch)
        if cache.batch_idx is not None:
            raise ValueError(
                "cache_batch_idx: does not go with page_table, whose rows already say where each "
                "sequence lies"
            )
    elif cache.batch_idx is None and cache.k.shape[0] != batch:
        raise ValueError(
            f"k_cache: got {cache.k.shape[0]} rows for a batch of {batch}; pass cache_batch_idx "
            "to choose rows"
        )


def _lengths(cache: Cache, new: NewTokens, batch: int) -> Tensor | None:
    """Tokens in the cache before the append, int32 (batch,)."""
    seqlens, q_device = cache.seqlens, cache.k.device
    if seqlens is None:
        if new.k is not None:
            raise ValueError(
                "cache_seqlens: got None, want where to append k and v, an int or (batch,) int32"
            )
        return None
    if isinstance(seqlens, Tensor) and seqlens.dim() > 0:
        validate.per_sequence("cache_seqlens", seqlens, cache.k, batch)
        return seqlens.int()
    if isinstance(seqlens, Tensor):
        validate.index_tensor("cache_seqlens", seqlens, cache.k)
        return seqlens.int().expand(batch)
    count = validate.length("cache_seqlens", seqlens)
    added = (
        new.k.shape[1] if new.k is not None and new.cu_seqlens is None and new.k.dim() == 4 else 0
    )
    if count + added > cache.capacity:
        raise ValueError(
            f"cache_seqlens: got {count} with {added} new tokens, but the cache holds "
            f"{cache.capacity}"
        )
    return torch.full((batch,), count, dtype=torch.int32, device=q_device)


def _check_new(q: Tensor, cache: Cache, new: NewTokens, batch: int) -> None:
    packed = new.cu_seqlens is not None
    layout = "total_new, kv_heads, head_dim" if packed else "batch, seq_new, kv_heads, head_dim"
    for name, x, row in (("k", new.k, cache.k), ("v", new.v, cache.v)):
        validate.rank(name, x, layout)
        assert x is not None
        if x.shape[-2:] != row.shape[-2:]:
            raise ValueError(
                f"{name}: got (heads, head_dim) {tuple(x.shape[-2:])}, want "
                f"{tuple(row.shape[-2:])}, as {name}_cache"
            )
        if x.dtype != row.dtype:
            raise TypeError(
                f"{name}: got dtype {x.dtype}, want {row.dtype}, the dtype of {name}_cache"
            )
        validate.same_device(name, x, q)
    assert new.k is not None and new.v is not None
    if new.k.shape[:-1] != new.v.shape[:-1]:
        raise ValueError(
            f"v: got shape {validate.shape_of(new.v)}, want as many tokens as k, "
            f"{validate.shape_of(new.k)}"
        )
    if packed:
        validate.cumulative("cu_seqlens_k_new", new.cu_seqlens, q)
        assert new.cu_seqlens is not None
        validate.shape(
            "cu_seqlens_k_new", new.cu_seqlens, (batch + 1,), "one longer than the batch"
        )
    elif new.k.shape[0] != batch:
        raise ValueError(f"k: got batch {new.k.shape[0]}, want {batch}, the batch of q")


def check_rotary(rotary: Rotary, operands: Operands, new: NewTokens) -> None:
    """The rotary tables fit the queries, and there are new tokens to rotate."""
    if rotary.cos is None and rotary.sin is None:
        if rotary.seqlens is not None:
            raise ValueError("rotary_seqlens: needs rotary_cos and rotary_sin")
        return
    if new.k is None:
        raise ValueError(
            "rotary_cos: rotates new tokens, but k and v are None; pass the new keys and values"
        )
    for name, x in (("rotary_cos", rotary.cos), ("rotary_sin", rotary.sin)):
        validate.rank(name, x, "positions, rotary_dim / 2")
        assert x is not None
        if not x.is_floating_point():
            raise TypeError(f"{name}: got dtype {x.dtype}, want a floating dtype")
        validate.same_device(name, x, operands.q)
    assert rotary.cos is not None and rotary.sin is not None
    validate.shape("rotary_sin", rotary.sin, tuple(rotary.cos.shape), "the shape of rotary_cos")
    if rotary.cos.shape[0] < 1 or 2 * rotary.cos.shape[1] > operands.q.shape[-1]:
        raise ValueError(
            f"rotary_cos: got shape {validate.shape_of(rotary.cos)}, want at least one position "
            "and at most "
            f"head_dim / 2 = {operands.q.shape[-1] // 2} columns"
        )
    if rotary.seqlens is not None:
        batch = operands.seqused_k.shape[0] if operands.seqused_k is not None else 0
        validate.per_sequence("rotary_seqlens", rotary.seqlens, operands.q, batch)


def check_values(options: Options, lengths: Tensor | None, new: NewTokens, rotary: Rotary) -> None:
    """Checks that read lengths on the host; only with ``FLASHTILE_CHECK=1`` in the environment."""
    if not validate.checking_values() or lengths is None:
        return
    if new.k is not None and new.cu_seqlens is not None:
        total = new.k.shape[0]
        validate.cumulative_values("cu_seqlens_k_new", new.cu_seqlens, total, total, "k")
    added, capacity = _added(new), options.max_seqlen_k
    if bool((lengths < 0).any()) or bool((lengths + added > capacity).any()):
        count = added if isinstance(added, int) else added.tolist()
        raise ValueError(
            f"cache_seqlens: got {lengths.tolist()} with {count} new tokens, want at least 0 and, "
            f"with them, at most {capacity}, what the cache holds"
        )
    if rotary.cos is not None and lengths.numel():
        base = lengths if rotary.seqlens is None else rotary.seqlens
        needed = int((base + added).max())
        if needed > rotary.cos.shape[0]:
            raise ValueError(
                f"rotary_cos: got {rotary.cos.shape[0]} positions, want at least {needed}, where "
                "the last new token stands"
            )


def _added(new: NewTokens) -> int | Tensor:
    """New tokens of each sequence."""
    if new.k is None:
        return 0
    return new.k.shape[1] if new.cu_seqlens is None else new.cu_seqlens.diff()


def rotate_and_append(
    operands: Operands,
    options: Options,
    lengths: Tensor | None,
    cache: Cache,
    new: NewTokens,
    rotary: Rotary,
) -> Operands:
    """Rotate queries and new keys, write keys and values into the cache.

    Args:
        options: under a causal mask, a window or a chunk every query has a position of its own;
            else all are rotated as the first, as FlashAttention-2 does.
        lengths: int32 (batch,), where each sequence's new tokens go.
    """
    k, v = new.k, new.v
    if k is None or v is None or lengths is None:
        return operands
    cos, sin = rotary.cos, rotary.sin
    places = (new.cu_seqlens, cache.page_table, cache.batch_idx)
    if cos is None or sin is None:
        torch.ops.flashtile.kvcache_append(cache.k, cache.v, k, v, lengths, *places)
        return operands
    base = lengths if rotary.seqlens is None else rotary.seqlens
    sides = (options.window_left, options.window_right)
    local = max(sides) >= 0 or options.attention_chunk > 0
    q = torch.ops.flashtile.kvcache_rotate_append(
        operands.q, cache.k, cache.v, k, v, cos, sin, lengths, base, operands.cu_seqlens_q,
        *places, rotary.interleaved, local,
    )  # fmt: skip
    return operands._replace(q=q)


def _token_coordinates(x: Tensor, cu_seqlens: Tensor | None, batch: int) -> tuple[Tensor, Tensor]:
    """Sequence and place within it of every token of `x`, dense or packed; both (tokens,) int64.

    Tokens after the last sequence of a packed tensor get the sequence number `batch`.
    """
    if cu_seqlens is None:
        rows, seq = x.shape[:2]
        sequence = torch.arange(rows, device=x.device).repeat_interleave(seq)
        return sequence, torch.arange(seq, device=x.device).repeat(rows)
    tokens = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), tokens, right=True)
    return sequence, tokens - cu_seqlens.long()[sequence]


def _positions(x: Tensor, base: Tensor, cu_seqlens: Tensor | None, own: bool) -> Tensor:
    """Rotary position of every token: its sequence's `base`, plus its own place if `own`."""
    sequence, place = _token_coordinates(x, cu_seqlens, base.shape[0])
    start = base.long()[sequence.clamp(max=base.shape[0] - 1)]
    return start + place if own else start


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    tokens = x.reshape(-1, 1, *x.shape[-2:])  # each token a sequence of one, at its own offset
    rotated = apply_rotary_emb(tokens, cos, sin, interleaved=interleaved, seqlen_offsets=positions)
    return rotated.reshape(x.shape)


_library.define(
    "kvcache_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor lengths, "
    "Tensor? cu_seqlens_k_new, Tensor? page_table, Tensor? cache_batch_idx) -> ()"
)
_library.define(
    "kvcache_rotate_append(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, "
    "Tensor cos, Tensor sin, Tensor lengths, Tensor base, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k_new, Tensor? page_table, Tensor? cache_batch_idx, bool interleaved, "
    "bool own_positions) -> Tensor"
)


def _append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    cu_seqlens_k_new: Tensor | None,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> None:
    """Write `k` and `v` behind each sequence's `lengths` tokens; what does not fit is dropped."""
    batch = lengths.shape[0]
    sequence, place = _token_coordinates(k, cu_seqlens_k_new, batch)
    inside = sequence < batch
    sequence = sequence.clamp(max=batch - 1)
    position = lengths.long()[sequence] + place
    if page_table is None:
        row = sequence if cache_batch_idx is None else cache_batch_idx.long()[sequence]
        slot = position
        inside &= (position >= 0) & (position < k_cache.shape[1])
    else:
        page_size = k_cache.shape[1]
        inside &= (position >= 0) & (position < page_table.shape[1] * page_size)
        column = (position // page_size).clamp(0, page_table.shape[1] - 1)
        row, slot = page_table.long()[sequence, column], position % page_size
    inside &= (row >= 0) & (row < k_cache.shape[0])
    where = (row[inside], slot[inside])
    for store, tokens in ((k_cache, k), (v_cache, v)):
        store[where] = tokens.reshape(-1, *tokens.shape[-2:])[inside]


def _rotate_and_append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    base: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    interleaved: bool,
    own_positions: bool,
) -> Tensor:
    """Rotated queries; rotated keys, and values, go where `_append` writes them.

    Args:
        base: (batch,), the position of each sequence's first new token.
        own_positions: each query has a position of its own; else all have their sequence's `base`.
    """
    k = _rotate(k, cos, sin, _positions(k, base, cu_seqlens_k_new, own=True), interleaved)
    places = (cu_seqlens_k_new, page_table, cache_batch_idx)
    _append(k_cache, v_cache, k, v, lengths, *places)
    return _rotate(q, cos, sin, _positions(q, base, cu_seqlens_q, own_positions), interleaved)


def _append_on_gpu(*args: Any) -> None:
    """The same by a Triton kernel, which waits for nothing."""
    from .backends.triton.append import append_to_cache

    append_to_cache(*args)


def _rotate_and_append_on_gpu(*args: Any) -> Tensor:
    """Both by one launch of that kernel."""
    from .backends.triton.append import rotate_and_append

    return rotate_and_append(*args)


def _fake_append(*args: Any) -> None:
    return None


def _fake_rotate_and_append(q: Tensor, *args: Any) -> Tensor:
    return q.new_empty(q.shape)


_library.impl("kvcache_append", _append, "CPU")
_library.impl("kvcache_append", _append_on_gpu, "CUDA")
_library.impl("kvcache_rotate_append", _rotate_and_append, "CPU")
_library.impl("kvcache_rotate_append", _rotate_and_append_on_gpu, "CUDA")
torch.library.register_fake("flashtile::kvcache_append", _fake_append, lib=_library)
torch.library.register_fake(
    "flashtile::kvcache_rotate_append", _fake_rotate_and_append, lib=_library
)
