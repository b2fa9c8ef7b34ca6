"""The layouts of queries, keys and values: `Dense`, `Packed` or `Cached`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache_formats import CacheFormat
from ..problem import Operands


class Dense(NamedTuple):
    """q (batch, seq_q, heads, head_dim); k and v (batch, seq_k, kv_heads, head_dim)."""

    def sizes(self, q: Tensor, k: Tensor) -> tuple[int, int, int]:
        """The number of sequences, the longest query and the longest key."""
        return q.shape[0], q.shape[1], k.shape[1]

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        """The tensors of a checked call, without its options."""
        return Operands(q, k, v)


DENSE = Dense()


class Packed(NamedTuple):
    """q (total_q, heads, head_dim); k and v (total_k, kv_heads, head_dim), or pages of tokens
    (num_pages, page_size, kv_heads, head_dim).
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    page_table: Tensor | None = None
    leftpad_k: Tensor | None = None  # (batch,), number of keys to skip; not with pages

    def sizes(self, q: Tensor, k: Tensor) -> tuple[int, int, int]:
        """The number of sequences, the longest query and the longest key."""
        longest_k = self.max_seqlen_k
        if self.page_table is not None:
            longest_k = min(longest_k, capacity_of(self.page_table, k))
        return self.cu_seqlens_q.shape[0] - 1, self.max_seqlen_q, longest_k

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        """The tensors of a checked call, without its options."""
        starts_q, starts_k = self.cu_seqlens_q, self.cu_seqlens_k
        if self.page_table is None:
            pads = self.leftpad_k
            return Operands(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, leftpad_k=pads)
        # The page table locates the keys; cu_seqlens_k only gives their numbers.
        used, table = starts_k.diff(), self.page_table
        return Operands(q, k, v, cu_seqlens_q=starts_q, seqused_k=used, page_table=table)


class Cached(NamedTuple):
    """Queries, dense or packed, and a cache to which new keys and values are appended.

    A cache row holds one sequence. The token at position ``p`` is ``cache[row, p]`` or, in a paged
    cache, ``cache[page_table[b, p // page_size], p % page_size]``. Lengths stay on the device.
    """

    cache_seqlens: int | Tensor | None = None  # tokens before the append
    page_table: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    cu_seqlens_q: Tensor | None = None  # for packed queries
    max_seqlen_q: int | Tensor | None = None
    k_new: Tensor | None = None
    v_new: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None  # for packed new keys
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = True
    rotary_seqlens: Tensor | None = None
    # The formats of the keys and the values of a cache of packed rows
    formats: tuple[CacheFormat, CacheFormat] | None = None

    def capacity(self, k_cache: Tensor) -> int:
        """Largest number of tokens of a sequence."""
        if self.page_table is not None:
            return capacity_of(self.page_table, k_cache)
        return k_cache.shape[1]

    def batch(self, q: Tensor) -> int:
        """Number of sequences."""
        return q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def added(self) -> int | Tensor:
        """Number of new tokens of each sequence."""
        if self.k_new is None:
            return 0
        if self.cu_seqlens_k_new is None:
            return self.k_new.shape[1]
        return self.cu_seqlens_k_new.diff()

    def sizes(self, q: Tensor, k: Tensor) -> tuple[int, Any, int]:
        """The number of sequences, the longest query and the longest key."""
        M = q.shape[1] if self.cu_seqlens_q is None else self.max_seqlen_q
        return self.batch(q), M, self.capacity(k)

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        """The tensors of a checked call before the append, without its options."""
        page_table, cache_batch_idx = self.page_table, self.cache_batch_idx
        if page_table is not None and cache_batch_idx is not None:  # select the batch's rows
            rows = cache_batch_idx.long().clamp(0, max(page_table.shape[0] - 1, 0))
            page_table, cache_batch_idx = page_table.index_select(0, rows), None
        # Tokens in the cache, int32 (batch,); None if all of it is used and nothing needs them.
        lengths, batch = self.cache_seqlens, self.batch(q)
        if lengths is None and (self.page_table is not None or self.cache_leftpad is not None):
            lengths = self.capacity(k)
        if isinstance(lengths, Tensor):
            lengths = lengths.int() if lengths.dim() > 0 else lengths.int().expand(batch)
        elif lengths is not None:
            lengths = torch.full((batch,), lengths, dtype=torch.int32, device=k.device)
        return Operands(
            q,
            k,
            v,
            cu_seqlens_q=self.cu_seqlens_q,
            seqused_k=lengths,
            page_table=page_table,
            cache_batch_idx=cache_batch_idx,
            leftpad_k=self.cache_leftpad,
        )


Layout = Dense | Packed | Cached


def capacity_of(page_table: Tensor, pages: Tensor) -> int:
    """Number of tokens that a row of the page table can hold; 0 if there are no pages."""
    return page_table.shape[1] * pages.shape[1] if pages.shape[0] > 0 else 0
