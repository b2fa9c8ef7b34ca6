"""FlashAttention-4's layouts: queries and keys are padded or packed, independently."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .api import attention, attention_varlen


class Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    qv: Tensor | None


class Layout(NamedTuple):
    """The layout of queries and keys; those without cumulative lengths are padded."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    page_table: Tensor | None = None

    @property
    def is_padded(self) -> bool:
        return all(x is None for x in (self.cu_seqlens_q, self.cu_seqlens_k, self.page_table))


def attend(tensors: Tensors, layout: Layout, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) with the heads of lse first."""
    q, k, v, qv = tensors
    cu_seqlens_q, cu_seqlens_k, M, N, seqused_q, seqused_k, page_table = layout
    options |= {"qv": qv, "seqused_q": seqused_q, "seqused_k": seqused_k, "return_lse": True}
    result: Any
    if layout.is_padded:
        result = attention(q, k, v, **options)
        return result
    if page_table is not None and cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k: cannot be combined with page_table; pass seqused_k")
    # The number of all tokens is an upper bound that the host knows without waiting for the GPU.
    if cu_seqlens_q is not None and M is None:
        M = q.shape[0]
    if cu_seqlens_k is not None and N is None:
        N = k.shape[0]
    lengths = (cu_seqlens_q, cu_seqlens_k, M, N)
    result = attention_varlen(q, k, v, *lengths, page_table=page_table, **options)
    return result
