"""The attention of a run, by name: flashtile's, or one of PyTorch's to compare it with.

PyTorch's are called as a user without flashtile would call them. They support causal attention and
documents; other options of the model raise `ValueError`. Only `varlen` takes packed documents. For
the others the windows of a packed batch (training/batches.py) become rows, and a mask hides other
documents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from flashtile.modules.mha import flash_attend

Attend = Callable[..., Tensor]

ATTENTIONS = (
    "flashtile",
    "sdpa",
    "sdpa-flash",
    "sdpa-cudnn",
    "sdpa-math",
    "varlen",
    "eager",
    "flex",
)
ON_CUDA_ALONE = ("sdpa-cudnn", "varlen", "flex")
WITHOUT_DROPOUT = ("varlen", "flex")


def attention_named(name: str, context: int) -> Attend:
    """What `attn=name` gives to `GPTLMHeadModel(attend=...)`, for windows of `context` tokens."""
    if name == "flashtile":
        return flash_attend
    if name == "varlen":
        return varlen
    on_windows: dict[str, Attend] = {
        "sdpa": sdpa,
        "sdpa-flash": functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
        "sdpa-cudnn": functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
        "sdpa-math": functools.partial(sdpa, backend=SDPBackend.MATH),
        "eager": eager,
        "flex": flex,
    }
    return _on_windows(on_windows[name], context)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    softmax_scale: float | None,
    dropout_p: float,
    **options: Any,
) -> Tensor:
    """PyTorch's `varlen_attn`: FlashAttention-2, which reads where documents begin."""
    # It came with PyTorch 2.10; every other attention runs without it.
    from torch.nn.attention import varlen as pytorch

    _refuse_more_than_causal(options)
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p}: attn=varlen has no dropout")
    shape = q.shape
    if cu_seqlens is None or max_seqlen is None:  # every row is a document
        rows, max_seqlen = shape[:2]
        ends = torch.arange(rows + 1, device=q.device, dtype=torch.int32)
        cu_seqlens = ends * max_seqlen
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    # Grouped heads always worked; PyTorch 2.13 needs this argument, 2.11 does not have it.
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    varlen_attn: Any = pytorch.varlen_attn
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    causal = (-1, 0)
    out = varlen_attn(q, k, v, *lengths, scale=softmax_scale, window_size=causal, **grouped)
    return out.reshape(shape)


# q, k, v below are (windows, heads, context, head_dim); cu_seqlens is None where a window is one
# document, else (documents + 1,) over the flattened windows.


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    dropout_p: float,
    backend: SDPBackend | None = None,
) -> Tensor:
    """PyTorch's `scaled_dot_product_attention`, with one of its backends or its own choice."""
    mask = None if cu_seqlens is None else document_mask(cu_seqlens, len(q), q.shape[2])
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )


def eager(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, dropout_p: float
) -> Tensor:
    """Every score in memory: softmax(QKᵀ)V as it stands."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if cu_seqlens is None:
        mask = q.new_ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    else:
        mask = document_mask(cu_seqlens, len(q), q.shape[2])
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    return F.dropout(scores.softmax(-1, dtype=torch.float32).to(v.dtype), dropout_p) @ v


def flex(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, dropout_p: float
) -> Tensor:
    """PyTorch's `flex_attention`, compiled. It has no dropout, and no backward on a CPU."""
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p}: attn=flex has no dropout")
    block_mask = _block_mask(cu_seqlens, len(q), q.shape[2], q.device)
    grouped = q.shape[1] != k.shape[1]
    return _compiled_flex()(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=grouped)


@functools.lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


# All layers of a model need the same mask of the same tensor, one after another.
@functools.lru_cache(maxsize=1)
def document_mask(cu_seqlens: Tensor, windows: int, context: int) -> Tensor:
    """True where a token sees another, (windows, 1, context, context): causal inside documents."""
    document = _document_numbers(cu_seqlens, windows, context)
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


@functools.lru_cache(maxsize=1)
def _block_mask(
    cu_seqlens: Tensor | None, windows: int, context: int, device: torch.device
) -> BlockMask:
    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def inside_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (document[b, i] == document[b, j])

    if cu_seqlens is None:
        return create_block_mask(causal, None, None, context, context, str(device))
    document = _document_numbers(cu_seqlens, windows, context)
    return create_block_mask(inside_document, windows, None, context, context, str(device))


def _document_numbers(cu_seqlens: Tensor, windows: int, context: int) -> Tensor:
    """The number of the document that each token belongs to, (windows, context)."""
    positions = torch.arange(windows * context, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, positions, right=True).view(windows, context)


def _on_windows(attention: Attend, context: int) -> Attend:
    """`attention` with the keywords that the model uses, for dense and for packed batches."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        softmax_scale: float | None,
        dropout_p: float,
        **options: Any,
    ) -> Tensor:
        _refuse_more_than_causal(options)
        length = q.shape[1] if cu_seqlens is None else context
        rows = (x.reshape(-1, length, *x.shape[-2:]).transpose(1, 2) for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return attention(*rows, cu_seqlens, scale, dropout_p).transpose(1, 2).reshape(q.shape)

    return attend


def _refuse_more_than_causal(options: dict[str, Any]) -> None:
    """Reject the `options` of `flashtile.modules.attend.Attend` that PyTorch's attention lacks."""
    whole_window = tuple(options["window_size"]) == (-1, -1)
    has_alibi = options["alibi_slopes"] is not None
    if not options["causal"] or not whole_window or options["softcap"] or has_alibi:
        raise ValueError(
            "the model has a window, a softcap or ALiBi, which only attn=flashtile supports"
        )
