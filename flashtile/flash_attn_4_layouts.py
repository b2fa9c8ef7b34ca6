"""FlashAttention-4's layouts: queries and keys are padded or packed, each side as it likes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks
from .api import attention, attention_varlen


class Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    qv: Tensor | None


class Layout(NamedTuple):
    """How the tokens lie; a side without cumulative lengths is padded."""

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
    options |= {"return_lse": True}
    result: Any
    if layout.is_padded:
        options |= {"seqused_q": layout.seqused_q, "seqused_k": layout.seqused_k}
        result = attention(q, k, v, qv=qv, **options)
        return result
    is_batch = layout.cu_seqlens_q is None
    cu_seqlens_q, M = layout.cu_seqlens_q, layout.max_seqlen_q
    if cu_seqlens_q is None:
        checks.rank("q", q, "batch, seq_q, heads, head_dim")
        batch, M = q.shape[:2]
        cu_seqlens_q = _starts(batch, M, q)
        q, qv = q.flatten(0, 1), None if qv is None else qv.flatten(0, 1)
    batch = cu_seqlens_q.shape[0] - 1
    k, v, packing = _packed_keys(k, v, layout, batch)
    result = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        max_seqlen_q=q.shape[0] if M is None else M,
        qv=qv,
        seqused_q=layout.seqused_q,
        **packing,
        **options,
    )
    out, lse = result
    if is_batch:
        out, lse = out.unflatten(0, (batch, M)), lse.unflatten(1, (batch, M)).transpose(0, 1)
    return out, lse


def _packed_keys(
    k: Tensor, v: Tensor, layout: Layout, batch: int
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys and values as `attention_varlen` takes them, with its arguments about them."""
    table, used, N = layout.page_table, layout.seqused_k, layout.max_seqlen_k
    if table is not None:
        if layout.cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k: does not go with page_table; pass seqused_k")
        checks.rank("page_table", table, "batch, pages per sequence")
        capacity = table.shape[1] * k.shape[1]
        starts = _starts(batch, capacity, k)
        if used is not None:
            checks.per_sequence("seqused_k", used, k, batch)
            starts[1:] = used.cumsum(0)
        N = capacity if N is None else N
        return k, v, {"cu_seqlens_k": starts, "max_seqlen_k": N, "page_table": table}
    starts_k = layout.cu_seqlens_k
    if starts_k is None:
        checks.rank("k", k, "batch, seq_k, kv_heads, head_dim")
        checks.rank("v", v, "batch, seq_k, kv_heads, head_dim")
        starts_k, N = _starts(batch, k.shape[1], k), k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    N = k.shape[0] if N is None else N
    return k, v, {"cu_seqlens_k": starts_k, "max_seqlen_k": N, "seqused_k": used}


def _starts(batch: int, length: int, like: Tensor) -> Tensor:
    """Where sequences of one length start."""
    return torch.arange(batch + 1, dtype=torch.int32, device=like.device) * length
