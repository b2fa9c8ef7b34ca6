"""The keyword-only options beyond FlashAttention-2."""

from __future__ import annotations

from torch import Tensor

from ..call.dispatch import BackendName
from ..call.options import NewerOptions, NewerTrainingOptions, PaddedMaskOptions, ServingOptions


class Extras(NewerTrainingOptions, total=False):
    """Keyword-only options beyond FlashAttention-2 of the functions for training."""

    return_lse: bool
    out: Tensor | None
    backend: BackendName | None


class PaddedExtras(Extras, PaddedMaskOptions, total=False):
    """`Extras` of the functions for padded batches."""


class CacheExtras(NewerOptions, ServingOptions, total=False):
    """Keyword-only options beyond FlashAttention-2 of `flash_attn_with_kvcache`."""

    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | Tensor | None
    cu_seqlens_k_new: Tensor | None
    rotary_seqlens: Tensor | None
    out: Tensor | None
    backend: BackendName | None
