"""``flash_attn.cute`` of FlashAttention-4: its names, positional order, defaults and results.

The functions always return (out, lse). lse is None if it is neither requested nor needed for a
gradient; with `qv` its heads are last, as in FlashAttention-4. A window side is unbounded when it
is None, and -1 is an offset like any other. Queries and keys may each be padded, (batch, seq, ...),
or packed. Functions in FlashAttention-4's domain-specific language (`score_mod`, `mask_mod`), its
block-sparse tensors and `gather_kv_indices` raise a NotImplementedError that names the argument.

Source: FlashAttention commit 0251105a, ``flash_attn/cute/interface.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import flash_attn_2_cuda
from .api import attention, attention_varlen
from .call import checks
from .combine import flash_attn_combine
from .masks import Window

__all__ = [
    "SchedulerMetadataTensorsTorch",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
]

WindowSize = tuple[int | None, int | None]
Result = tuple[Tensor, Tensor | None]

# At this head dim, FlashAttention-4 treats a tensor that is both keys and values as latent keys.
SHARED_HEAD_DIM = 512


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> Result:
    """(out, lse) of `flashtile.attention`; `learnable_sink` is its `sink`."""
    _refuse(block_sparse_tensors_bwd=block_sparse_tensors_bwd)
    return flash_attn_varlen_func(  # which takes padded batches, too
        q,
        k,
        v,
        qv,
        gather_kv_indices=gather_kv_indices,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        learnable_sink=learnable_sink,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        return_lse=return_lse,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> Result:
    """(out, lse) of `flashtile.attention_varlen`; `learnable_sink` is its `sink`.

    Args:
        q, qv: (total_q, heads, head dim) with `cu_seqlens_q`, else (batch, seq_q, heads, head dim).
        k, v: likewise; with `page_table` (num_pages, page_size, kv_heads, head dim).
        max_seqlen_q, max_seqlen_k: longest lengths; by default the number of all tokens, an upper
            bound for which the host reads nothing from the GPU.
        page_table: (batch, pages per sequence) int32; `seqused_k` is then the number of tokens in
            each sequence's pages, which are full by default.
        min_seqlen_k, scheduler_metadata, disable_scheduler_metadata: hints; they are ignored.
    """
    _refuse(
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        seqlen_k_per_split=seqlen_k_per_split,
    )
    _check_metadata(scheduler_metadata)
    out, lse = _attend(
        (q, k, v),
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, page_table),
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        qv=qv,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=Window(*window_size),
        sink=learnable_sink,
        softcap=softcap,
        num_splits=max(num_splits, 0),
        pack_gqa=pack_gqa,
        deterministic=deterministic,
    )
    if qv is not None or (k is v and v.shape[-1] == SHARED_HEAD_DIM):
        lse = lse.transpose(-1, -2).contiguous()
    if return_lse:
        return out, lse
    has_gradient = any(x is not None and x.requires_grad for x in (q, k, v, qv, learnable_sink))
    return out, lse.detach() if has_gradient else None


class SchedulerMetadataTensorsTorch(NamedTuple):
    """The result of `get_scheduler_metadata`: FlashAttention-4's fields, all None."""

    num_m_blocks_ptr: Tensor | None = None
    num_splits_dynamic_ptr: Tensor | None = None
    virtual_batch_idx_ptr: Tensor | None = None
    num_nheads_in_l2_ptr: Tensor | None = None
    tile_count_semaphore: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_total_splits_m_blocks: Tensor | None = None
    blocks_to_batch_idx: Tensor | None = None


def _validate_head_dims(
    head_dim: int, head_dim_v: int, compute_capability: int, alignment: int
) -> None:
    """Accept all: a call with head dims that no backend takes raises an error that says so."""


def get_scheduler_metadata(
    max_seqlen_q: int,
    max_seqlen_k: int,
    nheads: int,
    nheads_kv: int,
    headdim: int,
    num_splits: int,
    headdim_v: int | None = None,
    pack_gqa: bool | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqlen_k_new: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqlen_k_per_split: int | None = None,
    _arch: int | None = None,
) -> SchedulerMetadataTensorsTorch:
    """Return empty metadata for `scheduler_metadata`; flashtile plans from sizes only."""
    _refuse(seqlen_k_per_split=seqlen_k_per_split)
    if all(x is None for x in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)):
        raise ValueError("cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: want one of them")
    return SchedulerMetadataTensorsTorch()


def _flash_attn_fwd(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: Tensor | None = None,
    tile_mn: tuple[int, int] | None = None,
    mma_pv_is_rs: bool | None = None,
    intra_wg_overlap: bool | None = None,
    num_threads: int = 384,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    _arch: int | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor | None, None, None]:
    """(out, lse, None, None) of the functions above, without recording gradients.

    q and k may both be None; the queries are then `qv`, and the values serve as keys. `tile_mn`,
    `mma_pv_is_rs`, `intra_wg_overlap`, `num_threads` and `_arch` tune FlashAttention-4's kernels
    and are ignored.
    """
    _refuse(
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        seqlen_k_per_split=seqlen_k_per_split,
    )
    wants_lse = return_lse or any(
        x is not None and x.requires_grad for x in (q, k, v, qv, learnable_sink)
    )
    heads_last = qv is not None
    if q is None or k is None:
        if qv is None or k is not q:
            raise ValueError("q, k: got one of them, want both or, with qv, neither")
        q, k, qv = qv, v, None
    _check_metadata(scheduler_metadata)
    with torch.no_grad():
        found, found_lse = _attend(
            (q, k, v),
            (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, page_table),
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            qv=qv,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=Window(window_size_left, window_size_right),
            sink=learnable_sink,
            softcap=softcap,
            num_splits=max(num_splits, 0),
            pack_gqa=pack_gqa,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
        )
        if heads_last:
            found_lse = found_lse.transpose(-1, -2).contiguous()
        if out is not None:
            checks.tensor(
                "out", out, shape=tuple(found.shape), meaning="q's shape with v's head dim"
            )
            found = out.copy_(found)
        if lse is not None:
            checks.tensor(
                "lse",
                lse,
                shape=tuple(found_lse.shape),
                meaning="one number for each query and head",
            )
            found_lse, wants_lse = lse.copy_(found_lse), True
    return found, found_lse if wants_lse else None, None, None


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    m_block_size: int = 64,
    n_block_size: int = 128,
    num_threads: int = 256,
    pack_gqa: bool = False,
    num_stages_Q: int = 2,
    num_stages_dO: int = 2,
    SdP_swapAB: bool = False,
    dKV_swapAB: bool = False,
    dQ_swapAB: bool = False,
    AtomLayoutMSdP: int = 2,
    AtomLayoutNdKV: int = 2,
    AtomLayoutMdQ: int = 2,
    V_in_regs: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    dlse: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv), and the gradient of `learnable_sink` if given. Queries and keys must be either
    both padded or both packed.

    The block sizes, stages, swaps and layouts tune FlashAttention-4's kernels and are ignored.
    """
    _refuse(
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
    )
    options = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": Window(window_size_left, window_size_right),
        "softcap": softcap,
        "sink": learnable_sink,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "deterministic": deterministic,
        "pack_gqa": pack_gqa,
    }
    layout = flash_attn_2_cuda.layout_of(
        q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    )
    _, found = flash_attn_2_cuda.gradients(
        (q, k, v), layout, options, (dout, out, lse), (dq, dk, dv), dlse=dlse
    )
    return tuple(found[:3]) if learnable_sink is None else (*found[:3], found[4])


def _check_metadata(given: Any) -> None:
    if given is not None and not isinstance(given, SchedulerMetadataTensorsTorch):
        got = type(given).__name__
        raise TypeError(f"scheduler_metadata: got {got}, want a result of get_scheduler_metadata")


_WHY = {
    "gather_kv_indices": "not supported here; pass them as key_index to flashtile.attention",
    "score_mod": "functions written for CuTe are not supported; flashtile.attention takes a "
    "score_mod written in PyTorch, as FlexAttention does",
    "mask_mod": "functions written for CuTe are not supported; flashtile.attention takes a "
    "block_mask made by BlockMask.from_function",
    "block_sparse_tensors": "not supported; flashtile.attention takes a block_mask",
    "seqlen_k_per_split": "splits of a given size are not supported; with num_splits=1 the result "
    "of a sequence does not depend on the batch",
}


def _refuse(**given: Any) -> None:
    """Raise if any of these unsupported arguments is given."""
    for name, value in given.items():
        if value is not None:
            why = _WHY.get(name.removesuffix("_bwd"), "belongs to score_mod and mask_mod")
            raise NotImplementedError(f"{name}: {why}")


def _attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[Tensor | None, Tensor | None, int | None, int | None, Tensor | None],
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) with the heads of lse first. Queries and keys without cumulative lengths are
    padded, independently.
    """
    q, k, v = qkv
    cu_seqlens_q, cu_seqlens_k, M, N, page_table = lengths
    options["return_lse"] = True
    result: Any
    if cu_seqlens_q is None and cu_seqlens_k is None and page_table is None:
        result = attention(q, k, v, **options)
        return result
    if page_table is not None and cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k: cannot be combined with page_table; pass seqused_k")
    # The number of all tokens is an upper bound that the host knows without waiting for the GPU.
    if cu_seqlens_q is not None and M is None:
        M = q.shape[0]
    if cu_seqlens_k is not None and N is None:
        N = k.shape[0]
    ends = cu_seqlens_q, cu_seqlens_k
    result = attention_varlen(q, k, v, *ends, M, N, page_table=page_table, **options)
    return result
