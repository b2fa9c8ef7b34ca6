"""The keyword-only options beyond FlashAttention-2."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from ..call.dispatch import BackendName


class Extras(TypedDict, total=False):
    """Keyword-only options of the functions for training beyond FlashAttention-2."""

    qv: Tensor | None
    attention_chunk: int
    bias: Tensor | None
    sink: Tensor | None
    block_mask: Any
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    num_splits: int
    pack_gqa: bool | None
    sm_margin: int
    return_lse: bool
    out: Tensor | None
    backend: BackendName | None


class PaddedExtras(Extras, total=False):
    """Those of the functions for padded batches."""

    attn_mask: Tensor | None
    key_padding_mask: Tensor | None


class CacheExtras(TypedDict, total=False):
    """Keyword-only options of `flash_attn_with_kvcache` beyond FlashAttention-2."""

    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | Tensor | None
    cu_seqlens_k_new: Tensor | None
    rotary_seqlens: Tensor | None
    qv: Tensor | None
    attention_chunk: int
    bias: Tensor | None
    sink: Tensor | None
    block_mask: Any
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    pack_gqa: bool | None
    sm_margin: int
    scheduler_metadata: Tensor | None
    out: Tensor | None
    workspace: Tensor | None
    backend: BackendName | None
