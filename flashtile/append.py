"""New tokens into a cache, in place: keys and values behind those that are there, rotated on their
way if asked, and with them the queries.

Two registered ops, in PyTorch for a CPU and by one kernel for a GPU (`ops/append/kernel.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .autocast import without_autocast
from .layers.rotary import apply_rotary_emb
from .problem import FLOAT8

_library = torch.library.Library("flashtile", "FRAGMENT")


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
    if x.dtype in FLOAT8:
        tokens = tokens.float()
    rotated = apply_rotary_emb(tokens, cos, sin, interleaved=interleaved, seqlen_offsets=positions)
    return _rounded(rotated, x.dtype).reshape(x.shape)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; in float8 as large as can be at most."""
    if dtype in FLOAT8:
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)


_library.define(
    "kvcache_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor lengths, "
    "Tensor? cu_seqlens_k_new, Tensor? page_table, Tensor? cache_batch_idx, Tensor? k_descale, "
    "Tensor? v_descale) -> Tensor"
)
_library.define(
    "kvcache_rotate_append(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, "
    "Tensor cos, Tensor sin, Tensor lengths, Tensor base, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k_new, Tensor? page_table, Tensor? cache_batch_idx, Tensor? k_descale, "
    "Tensor? v_descale, bool interleaved, bool own_positions) -> (Tensor, Tensor)"
)


@without_autocast
def _append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    cu_seqlens_k_new: Tensor | None,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> Tensor:
    """Write `k` and `v` behind each sequence's `lengths` tokens; what does not fit is dropped.

    Args:
        k_descale, v_descale: (batch, kv_heads), what tokens of 16 bits are divided by before they
            become float8; what is too large then becomes the largest number.

    Returns:
        int32 (batch,), the lengths with the new tokens.
    """
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
    for store, tokens, descale in ((k_cache, k, k_descale), (v_cache, v, v_descale)):
        rows = tokens.reshape(-1, *tokens.shape[-2:])[inside]
        store[where] = _stored(rows, store.dtype, descale, sequence[inside])
    added = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
    return (lengths + added).int()


def _stored(x: Tensor, dtype: torch.dtype, descale: Tensor | None, sequence: Tensor) -> Tensor:
    """Tokens (tokens, kv_heads, head_dim) of the sequences (tokens,), as a cache of `dtype` has
    them."""
    if dtype not in FLOAT8 or x.dtype in FLOAT8:
        return x
    if descale is not None:
        x = x.float() / descale[sequence][..., None]
    return _rounded(x, dtype)


@without_autocast
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
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    interleaved: bool,
    own_positions: bool,
) -> tuple[Tensor, Tensor]:
    """Rotated queries, and `_append` of rotated keys and values.

    Args:
        base: (batch,), the position of each sequence's first new token.
        own_positions: each query has a position of its own; else all have their sequence's `base`.
    """
    k = _rotate(k, cos, sin, _positions(k, base, cu_seqlens_k_new, own=True), interleaved)
    places = (cu_seqlens_k_new, page_table, cache_batch_idx, k_descale, v_descale)
    used = _append(k_cache, v_cache, k, v, lengths, *places)
    turned = _rotate(q, cos, sin, _positions(q, base, cu_seqlens_q, own_positions), interleaved)
    return turned, used


@without_autocast
def append_on_gpu(k_cache: Tensor, v_cache: Tensor, *rest: Any) -> Tensor:
    """The same by a Triton kernel, which waits for nothing."""
    from .ops.append.kernel import append_to_cache

    used = append_to_cache(k_cache, v_cache, *rest)
    _note_writing(k_cache, v_cache)
    return used


@without_autocast
def rotate_and_append_on_gpu(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Both by one launch of that kernel."""
    from .ops.append.kernel import rotate_and_append

    turned, used = rotate_and_append(q, k_cache, v_cache, *rest)
    _note_writing(k_cache, v_cache)
    return turned, used


def _note_writing(*caches: Tensor) -> None:
    """A backward that saved a cache must notice, as of any write in place; PyTorch sees neither
    what a kernel writes nor, from its schema alone, what an op does."""
    torch.autograd.graph.increment_version([x for x in caches if not x.is_inference()])


def _fake_append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *args: Any
) -> Tensor:
    return lengths.new_empty(lengths.shape, dtype=torch.int32)


def _fake_rotate_and_append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    *args: Any,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), lengths.new_empty(lengths.shape, dtype=torch.int32)


_library.impl("kvcache_append", _append, "CPU")
_library.impl("kvcache_append", append_on_gpu, "CUDA")
_library.impl("kvcache_rotate_append", _rotate_and_append, "CPU")
_library.impl("kvcache_rotate_append", rotate_and_append_on_gpu, "CUDA")
torch.library.register_fake("flashtile::kvcache_append", _fake_append, lib=_library)
torch.library.register_fake(
    "flashtile::kvcache_rotate_append", _fake_rotate_and_append, lib=_library
)
