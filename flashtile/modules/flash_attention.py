"""The layers of FlashAttention 1, ``flash_attn.flash_attention``; `MHA` is the newer one.

Source: FlashAttention 1.0.9, ``flash_attn/flash_attention.py``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import bert_padding
from .mha import FlashSelfAttention


class FlashAttention(FlashSelfAttention):
    """`FlashSelfAttention` that drops the padding and returns (out, None)."""

    def __init__(self, softmax_scale: float | None = None, attention_dropout: float = 0.0) -> None:
        super().__init__(False, softmax_scale, attention_dropout)

    def forward(  # type: ignore[override]  # FlashAttention 1's order and results
        self,
        qkv: Tensor,
        key_padding_mask: Tensor | None = None,
        causal: bool = False,
        cu_seqlens: Tensor | None = None,
        max_s: int | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, None]:
        """As `FlashSelfAttention.forward`. `key_padding_mask` (batch, seq) is True for tokens; the
        others see nothing, and get 0. NotImplementedError with `need_weights`.
        """
        if need_weights:
            raise NotImplementedError("need_weights: got True, want False")
        if key_padding_mask is None or cu_seqlens is not None:
            return super().forward(qkv, causal, cu_seqlens, max_s), None
        tokens, indices, cu_seqlens, max_s, _ = bert_padding.unpad_input(qkv, key_padding_mask)
        out = super().forward(tokens, causal, cu_seqlens, max_s)
        return bert_padding.pad_input(out, indices, *qkv.shape[:2]), None


class FlashMHA(nn.Module):
    """Projection, `FlashAttention` and output projection of (batch, seq, embed_dim); ValueError if
    `num_heads` does not divide `embed_dim`, or without `batch_first`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        batch_first: bool = True,
        attention_dropout: float = 0.0,
        causal: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if not batch_first or embed_dim % num_heads:
            raise ValueError(
                f"batch_first, num_heads: got {batch_first} and {num_heads}, want True and a "
                f"divisor of embed_dim {embed_dim}"
            )
        self.embed_dim, self.num_heads, self.causal = embed_dim, num_heads, causal
        self.head_dim = embed_dim // num_heads
        self.Wqkv = nn.Linear(embed_dim, 3 * embed_dim, bias, device, dtype)
        self.inner_attn = FlashAttention(attention_dropout=attention_dropout)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, None]:
        """(out, None), out of the shape of x; the mask as in `FlashAttention`."""
        qkv = self.Wqkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        out, weights = self.inner_attn(qkv, key_padding_mask, self.causal, None, None, need_weights)
        return self.out_proj(out.flatten(-2)), weights
