"""The reference for packed sequences: unpack them to a padded batch, attend, pack again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks import Spans
from .reference import Reference, attention_reference


def attention_varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    qv: Tensor | None = None,
    page_table: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    mask: Spans | None = None,
    **options: Any,
) -> Reference:
    """Packed attention: unpack to padded batches, attend, pack again.

    q (total_q, Hq, D), k (total_k, Hk, D), v (total_k, Hk, Dv). With `page_table` (B, pages) int32,
    k and v are pages (num_pages, page_size, Hk, D or Dv). Queries or keys without cumulative
    lengths are padded already, (B, length, heads, head_dim).
    """
    if page_table is not None:  # gathered pages are a padded batch
        k, v = (x[page_table.long()].flatten(1, 2) for x in (k, v))
        if seqused_k is None and cu_seqlens_k is not None:
            seqused_k = cu_seqlens_k.diff()
        cu_seqlens_k = None
    lengths_q, lengths_k = _lengths(q, cu_seqlens_q), _lengths(k, cu_seqlens_k)
    result = attention_reference(
        _unpack(q, cu_seqlens_q, max_seqlen_q),
        _unpack(k, cu_seqlens_k, max_seqlen_k),
        _unpack(v, cu_seqlens_k, max_seqlen_k),
        qv=None if qv is None else _unpack(qv, cu_seqlens_q, max_seqlen_q),
        mask=unpacked_spans(mask, cu_seqlens_q, max_seqlen_q),
        seqused_q=lengths_q if seqused_q is None else torch.minimum(lengths_q, seqused_q.long()),
        seqused_k=lengths_k if seqused_k is None else torch.minimum(lengths_k, seqused_k.long()),
        **options,
    )
    if cu_seqlens_q is None:
        return result
    rows = range(len(lengths_q))
    out = torch.cat([result.out[b, : lengths_q[b]] for b in rows])
    lse = torch.cat([result.lse[b, :, : lengths_q[b]] for b in rows], dim=-1)
    return Reference(out, lse, result.probs)


def unpacked_spans(mask: Spans | None, cu_seqlens_q: Tensor | None, longest: int) -> Spans | None:
    """A mask of packed queries for the padded batch that `sequences` and `padded` make of them."""
    if mask is None or cu_seqlens_q is None:
        return mask
    rows = (sequences(x[0].transpose(0, 1), cu_seqlens_q) for x in mask)
    return Spans(*(padded(x, longest).transpose(1, 2) for x in rows))


def sequences(x: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """The sequences (length, heads, head_dim) of a packed or padded `x`."""
    if cu_seqlens is None:
        return list(x.unbind(0))
    return [x[begin:end] for begin, end in pairwise(cu_seqlens.tolist())]


def padded(rows: list[Tensor], length: int) -> Tensor:
    """The sequences (their length, heads, head_dim) as a batch (B, length, heads, head_dim)."""
    return torch.stack([resize(x[None], length)[0] for x in rows])


def resize(x: Tensor, length: int) -> Tensor:
    """x (B, S, heads, head_dim) cut or zero-padded to `length` along S."""
    return F.pad(x[:, :length], (0, 0, 0, 0, 0, max(0, length - x.shape[1])))


def _lengths(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return torch.full((len(x),), x.shape[1]) if cu_seqlens is None else cu_seqlens.diff().long()


def _unpack(x: Tensor, cu_seqlens: Tensor | None, length: int) -> Tensor:
    return padded(sequences(x, cu_seqlens), length)
