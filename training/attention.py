"""The attention of a run, by name: flashtile's, or one of PyTorch's three to compare it with.

PyTorch's are called as a user without flashtile would call them. They know causal attention and
documents; `ValueError` says so when the model asks for more. In a packed batch every `max_seqlen`
tokens are one window (training/batches.py): windows become rows, and a mask hides other documents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from flashtile.modules.mha import flash_attend

Attend = Callable[..., Tensor]


def attention_named(name: str) -> Attend:
    """The callable for `attn=name`, to be given to `GPTLMHeadModel(attend=...)`."""
    return {
        "flashtile": flash_attend,
        "sdpa": _on_windows(sdpa),
        "eager": _on_windows(eager),
        "flex": _on_windows(flex),
    }[name]


# q, k, v below are (windows, heads, context, head_dim); cu_seqlens is None where a window is one
# document, else (documents + 1,) over the flattened windows.


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, dropout_p: float
) -> Tensor:
    """PyTorch's `scaled_dot_product_attention`, whichever of its backends PyTorch picks."""
    return F.scaled_dot_product_attention(
        *(q, k, v),
        attn_mask=None if cu_seqlens is None else document_mask(cu_seqlens, len(q), q.shape[2]),
        dropout_p=dropout_p,
        is_causal=cu_seqlens is None,
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


# The layers of a model ask for the same mask with the same tensor one after another.
@functools.lru_cache(maxsize=1)
def document_mask(cu_seqlens: Tensor, windows: int, context: int) -> Tensor:
    """True where a token sees another: (windows, 1, context, context), causal inside documents."""
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


def _on_windows(attention: Attend) -> Attend:
    """`attention` with the keywords that the model uses, for dense and for packed batches."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        softmax_scale: float | None,
        dropout_p: float,
        alibi_slopes: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> Tensor:
        if not causal or tuple(window_size) != (-1, -1) or softcap or alibi_slopes is not None:
            raise ValueError(
                "the model has a window, a softcap or ALiBi, which attn=flashtile alone computes"
            )
        context = q.shape[1] if max_seqlen is None else max_seqlen
        rows = (x.reshape(-1, context, *x.shape[-2:]).transpose(1, 2) for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return attention(*rows, cu_seqlens, scale, dropout_p).transpose(1, 2).reshape(q.shape)

    return attend
