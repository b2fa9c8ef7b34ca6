"""Append new tokens to a key-value cache in place, with or without rotary embedding, in plain
PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...autocast import without_autocast
from ...problem import FLOAT8
from ..rotary import formula as rotary


def _token_coordinates(x: Tensor, cu_seqlens: Tensor | None, batch: int) -> tuple[Tensor, Tensor]:
    """The sequence of every token of `x`, dense or packed, and the token's index in it.

    Both are (tokens,) int64. For tokens after the last sequence of a packed tensor, the sequence is
    `batch`.
    """
    if cu_seqlens is None:
        rows, seq = x.shape[:2]
        sequence = torch.arange(rows, device=x.device).repeat_interleave(seq)
        return sequence, torch.arange(seq, device=x.device).repeat(rows)
    tokens = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), tokens, right=True)
    return sequence, tokens - cu_seqlens.long()[sequence]


def positions(x: Tensor, base: Tensor, cu_seqlens: Tensor | None, own: bool) -> Tensor:
    """Rotary position of every token: its sequence's `base`, plus its own index if `own`."""
    sequence, index = _token_coordinates(x, cu_seqlens, base.shape[0])
    start = base.long()[sequence.clamp(max=base.shape[0] - 1)]
    return start + index if own else start


def rotate(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, interleaved: bool) -> Tensor:
    """The tokens of `x` at the positions `at`, in the dtype of `x`."""
    tokens = x.reshape(-1, 1, *x.shape[-2:])  # each token is a sequence with its own offset
    if x.dtype in FLOAT8:
        tokens = tokens.float()
    rotated = rotary.rotate(tokens, rotary.Angles(cos, sin, at, None), interleaved)
    return _rounded(rotated, x.dtype).reshape(x.shape)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; float8 saturates at its largest number."""
    if dtype in FLOAT8:
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)


def append(
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
    """Write `k` and `v` after the first `lengths` tokens of each sequence; drop tokens that do not
    fit.

    Args:
        k_descale, v_descale: (batch, kv_heads) scales by which 16-bit tokens are divided before
            they are stored in float8, which saturates.

    Returns:
        int32 (batch,), the lengths including the new tokens.
    """
    spans = tuple(_spans(k_cache, k, lengths, cu_seqlens_k_new, page_table, cache_batch_idx))
    for store, tokens, descale in ((k_cache, k, k_descale), (v_cache, v, v_descale)):
        tokens = tokens.reshape(-1, *tokens.shape[-2:])
        for span in spans:
            new = tokens[span.first : span.first + span.length]
            scale = None if descale is None else descale[span.sequence, :, None]
            slots = store[span.row, span.slot : span.slot + span.length]
            slots.copy_(_stored(new, store.dtype, scale))
    added = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
    return (lengths + added).int()


class _Span(NamedTuple):
    """Adjacent new tokens that go to adjacent slots of one row of the cache, or of one page."""

    sequence: int
    first: int  # among all new tokens
    length: int
    row: int
    slot: int


def _spans(
    k_cache: Tensor,
    k: Tensor,
    lengths: Tensor,
    cu_seqlens: Tensor | None,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> Iterator[_Span]:
    """Where the new tokens go, without those that do not fit."""
    positions = lengths.tolist()
    if cu_seqlens is None:
        ends = [k.shape[1] * sequence for sequence in range(len(positions) + 1)]
    else:
        ends = [min(end, k.shape[0]) for end in cu_seqlens.tolist()]
    rows = list(range(len(positions))) if cache_batch_idx is None else cache_batch_idx.tolist()
    size, columns = k_cache.shape[1], 1 if page_table is None else page_table.shape[1]
    for sequence, (position, (first, stop)) in enumerate(
        zip(positions, pairwise(ends), strict=True)
    ):
        if position < 0:
            first, position = first - position, 0
        while first < stop and position < columns * size:
            column, slot = divmod(position, size)
            row = rows[sequence] if page_table is None else int(page_table[sequence, column])
            length = min(stop - first, size - slot)
            if 0 <= row < k_cache.shape[0]:
                yield _Span(sequence, first, length, row, slot)
            first, position = first + length, position + length


def _stored(x: Tensor, dtype: torch.dtype, descale: Tensor | None) -> Tensor:
    """Convert the tokens (tokens, kv_heads, head_dim) of one sequence to the `dtype` of a cache."""
    if dtype not in FLOAT8 or x.dtype in FLOAT8:
        return x
    if descale is not None:
        x = x.float() / descale
    return _rounded(x, dtype)


@without_autocast
def rotate_and_append(
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
    """Rotate the queries and the new keys, and `append` the keys and values.

    Args:
        base: (batch,), the position of each sequence's first new token.
        own_positions: whether each query has its own position; if not, all queries have their
            sequence's `base`.

    Returns:
        The rotated queries, and the result of `append`.
    """
    k = rotate(k, cos, sin, positions(k, base, cu_seqlens_k_new, own=True), interleaved)
    where = (cu_seqlens_k_new, page_table, cache_batch_idx, k_descale, v_descale)
    used = append(k_cache, v_cache, k, v, lengths, *where)
    rotated = rotate(q, cos, sin, positions(q, base, cu_seqlens_q, own_positions), interleaved)
    return rotated, used
