"""Pack the real tokens of a batch, without its padding and document by document."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.attn_mask import additive


class Packing(NamedTuple):
    """The indices of the real tokens of a padded batch, and their sequences."""

    query_index: Tensor  # (total_q,) into the flattened (batch * q_length)
    key_index: Tensor  # (total_k,) into the flattened (batch * keys)
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def packing(mask: Tensor, q_length: int, pack_queries: bool) -> Packing:
    """The packing of a (batch, keys) mask.

    Args:
        mask: bool, where each row is a sequence; or integers that number the sequences from 1.
            False and 0 are padding.
        q_length: the queries are the last `q_length` tokens.
        pack_queries: also leave out the queries at padding; if False, every query is kept.
    """
    key_index, cu_k, max_k = _sequences(mask)
    if pack_queries and q_length == mask.shape[1]:
        return Packing(key_index, key_index, cu_k, cu_k, max_k, max_k)
    queries = (
        mask[:, mask.shape[1] - q_length :]
        if pack_queries
        else mask.new_ones(mask.shape[0], q_length)
    )
    query_index, cu_q, max_q = _sequences(queries)
    return Packing(query_index, key_index, cu_q, cu_k, max_q, max_k)


def _sequences(mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Flat indices of the real tokens, cumulative lengths of their sequences, and the longest
    length.
    """
    index = mask.flatten().nonzero().flatten()
    if mask.dtype == torch.bool:
        lengths = mask.sum(1)
    else:
        row = torch.arange(mask.shape[0], device=mask.device)[:, None] * (mask.max() + 1)
        lengths = (mask + row).flatten()[index].unique_consecutive(return_counts=True)[1]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return index, cu_seqlens, int(lengths.max()) if lengths.numel() else 0


def left_padding(mask: Tensor) -> Tensor | None:
    """The number of padding tokens at the start of each row of a (batch, keys) bool mask, (batch,)
    int32; None if there is padding elsewhere.
    """
    # As one number, because the host waits for a GPU to read one.
    is_left = (mask[:, 1:] >= mask[:, :-1]).all() & mask[:, -1:].all()
    if not bool(is_left):
        return None
    return (~mask).sum(1).int()


# Hidden scores that take a CPU about as long as a kernel call for one more sequence.
HIDDEN_SCORES = 8192


def cheap_bias(
    mask: Tensor, q_length: int, heads: int, pack_queries: bool, causal: bool
) -> Tensor | None:
    """A bias (batch, 1, 1, keys) that hides the padding of a (batch, keys) bool mask, if a CPU
    computes all scores faster than it serves each sequence by itself; else None.

    Args:
        q_length, pack_queries: as in `packing`. With `pack_queries` the result of a query at
            padding is 0, so there is no bias if such a query sees a key (`causal`: no later one).
    """
    hidden = int((~mask).sum()) * q_length * heads
    if hidden > HIDDEN_SCORES * mask.shape[0]:
        return None
    has_padding = bool((~mask[:, mask.shape[1] - q_length :]).any())
    if pack_queries and has_padding and not (causal and left_padding(mask) is not None):
        return None
    return additive(mask[:, None, None])


def documents_of_positions(position_ids: Tensor) -> Tensor | None:
    """Number the documents that are packed into rows from 1, (batch, tokens) int32; None if every
    row is known to be one document.

    A document starts at every smallest position of a row that begins with it: the rule of
    transformers' own flash attention. Any other row is one document.
    """
    starts = position_ids == position_ids.amin(1, keepdim=True)
    numbers = (starts & starts[:, :1]).cumsum(1).clamp(min=1).int()
    if not torch.compiler.is_compiling() and not bool((numbers > 1).any()):
        return None
    return numbers


def documents_of_lengths(cu_seqlens: Tensor, batch: int, tokens: int) -> Tensor:
    """Number the documents of packed rows from 1, (batch, tokens) int32; 0 is after the last."""
    index = torch.arange(batch * tokens, device=cu_seqlens.device)
    numbers = torch.bucketize(index, cu_seqlens, right=True)
    return (numbers % cu_seqlens.numel()).int().view(batch, tokens)
