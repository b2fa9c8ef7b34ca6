"""Call flashtile for a layer of a transformers model in the cheapest way that applies its mask."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..api import attention, attention_varlen, attention_with_kvcache
from ..call.attn_mask import options_of
from ..spans import Spans
from .transformers_masks import (
    Pattern,
    attached_pattern,
    is_made_here,
    is_whole,
    key_padding,
    once,
    scores_mask,
    short_form,
)
from .transformers_packing import (
    Packing,
    cheap_bias,
    documents_of_lengths,
    documents_of_positions,
    left_padding,
    packing,
)


class Call(NamedTuple):
    """One call of an attention layer, without its mask."""

    q: Tensor  # (batch, seq_q, heads, head_dim)
    k: Tensor  # (batch, seq_k, kv_heads, head_dim)
    v: Tensor  # (batch, seq_k, kv_heads, value_head_dim)
    pattern: Pattern
    bias: Tensor | None
    chosen: Tensor | None  # bool, broadcasts to (batch, heads, seq_q, seq_k): allowed keys
    sinks: Tensor | None  # (batch, heads, seq_q, 1)
    numbers: dict[str, Any]  # the other arguments of `flashtile.attention`
    made: Any = None  # the mask, which remembers what concerns all layers: see `once`
    documents: Spans | None = None  # every token sees only its own document

    def within(self, numbers: Tensor) -> Call:
        """The call, with the documents that are numbered from 1; 0 is padding."""
        return self._replace(documents=Spans.documents(numbers - 1, causal=False))

    @property
    def is_plain(self) -> bool:
        """Whether tokens may be packed, because no argument refers to single queries and keys."""
        kinds = self.bias, self.chosen, self.sinks, self.documents
        return all(x is None for x in kinds)


def attend(call: Call, mask: Any, lengths: tuple[Any, ...] | None, position_ids: Any) -> Tensor:
    """Call flashtile in the cheapest way that applies `mask`, which may have any form.

    Args:
        lengths: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k of packed sequences, or
            None.
    """
    B, M = call.q.shape[:2]
    padding = None
    if isinstance(mask, Tensor):
        mask = short_form(mask)
        call = call._replace(made=mask)
        padding = key_padding(mask, B, M, call.k.shape[1])
    is_exact = mask is not None and padding is None
    if padding is not None:
        N = padding.shape[1]
        pattern = attached_pattern(mask) or call.pattern
        call = call._replace(k=call.k[:, :N], v=call.v[:, :N], pattern=pattern)
        if pattern.segments is not None:
            return _with_sequences(call, padding)
        padding = None if is_whole(padding) else padding.bool()
    if lengths is not None:
        if not is_exact and padding is None:
            return _with_lengths(call, *lengths)
        if call.k.shape[1] != M:
            raise NotImplementedError(
                "cu_seq_lens_q: cannot be combined with an attention_mask, except in self-attention"
            )
        call = call.within(documents_of_lengths(lengths[1], B, M))
    elif _may_restart(call, position_ids) and (not is_exact or is_made_here(mask)):
        numbers = once(mask, documents_of_positions, position_ids)
        if numbers is not None and is_exact:
            call = call.within(numbers)
        elif numbers is not None:
            return _with_sequences(call, numbers, padding)
    if is_exact:
        return _with_exact_mask(call, mask)
    return _dense(call) if padding is None else _with_padding(call, padding)


def _may_restart(call: Call, position_ids: Any) -> bool:
    """Whether position ids that start over separate documents.

    Transformers separates them in its masks, except where the model has a cache. There this is the
    rule of its own flash attention: in a batch of one row.
    """
    tokens = call.k.shape[1]
    return (
        isinstance(position_ids, Tensor)
        and tokens > 1
        and call.q.shape[:2] == (1, tokens) == position_ids.shape
    )


def _dense(call: Call, block_mask: Any = None, bias: Tensor | None = None) -> Tensor:
    """Attention without packing; `block_mask` and `bias` apply in addition to the pattern."""
    M, N = call.q.shape[1], call.k.shape[1]
    position_bias = None if call.bias is None else call.bias[..., :N]
    if bias is None or position_bias is None:
        bias = position_bias if bias is None else bias
    else:
        bias = position_bias + bias
    if call.chosen is not None:
        chosen = call.chosen[..., :N]
        if bias is not None:
            bias = bias.masked_fill(~chosen, float("-inf"))
        elif block_mask is None:
            mask = options_of(chosen, M, N)
            block_mask, bias = mask.get("block_mask"), mask.get("bias")
        else:
            bias = torch.zeros(chosen.shape, device=chosen.device)
            bias = bias.masked_fill(~chosen, float("-inf"))
    options = call.pattern.options | call.numbers
    options |= {"block_mask": block_mask, "bias": bias, "mask": call.documents}
    if call.sinks is None:
        return cast(Tensor, attention(call.q, call.k, call.v, **options))
    with_lse = attention(call.q, call.k, call.v, return_lse=True, **options)
    out, lse = cast(tuple[Tensor, Tensor], with_lse)
    # A sink adds exp(sink) to the softmax's denominator, exp(lse).
    share = torch.sigmoid(lse.unsqueeze(-1) - call.sinks).transpose(1, 2)
    return (out * share).to(out.dtype)


def _with_exact_mask(call: Call, mask: Any) -> Tensor:
    """Attention with a mask for single queries and keys (bool, additive or FlexAttention's), which
    already includes causality.
    """
    call = call._replace(pattern=Pattern())
    if not isinstance(mask, Tensor):
        return _dense(call, block_mask=mask)
    M, N = call.q.shape[1], call.k.shape[1]
    mask = scores_mask(mask, (call.q.shape[0], call.q.shape[2], M, N))
    if mask.dtype != torch.bool:
        return _dense(call, bias=mask)
    if call.chosen is not None:
        return _dense(call._replace(chosen=call.chosen[..., :N] & mask))
    return _dense(call, **once(call.made, options_of, mask, M, N))


def _with_lengths(
    call: Call,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int | Tensor,
    max_k: int | Tensor,
) -> Tensor:
    """Attention over packed sequences whose lengths the caller passes."""
    if not call.is_plain:
        raise NotImplementedError(
            "cu_seq_lens_q: cannot be combined with position_bias, sinks, indices or "
            "block_indices, which do not refer to sequences"
        )
    q, k, v = (x.flatten(0, 1) for x in (call.q, call.k, call.v))
    max_q, max_k = (cast(int, x.item()) if isinstance(x, Tensor) else x for x in (max_q, max_k))
    options = call.pattern.options | call.numbers
    out = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, **options)
    return cast(Tensor, out).unflatten(0, call.q.shape[:2])


def _with_padding(call: Call, mask: Tensor) -> Tensor:
    """Attention with a (batch, keys) bool mask, False at padding."""
    M, N = call.q.shape[1], call.k.shape[1]
    # A mask without positions may be cross attention. The keys are then not the queries' tokens,
    # so their padding does not apply to queries, and all queries are kept.
    pack_queries = call.pattern.causal or call.pattern.has_positions
    is_plain = call.is_plain and not torch.compiler.is_compiling()
    if not is_plain or (pack_queries and M > N):  # some queries are not tokens of the mask
        return _where_visible(call, mask[:, None, None, :])
    # A chunk starts at the first real token.
    if call.q.device.type == "cpu" and not call.pattern.attention_chunk:
        bias = once(
            call.made, cheap_bias, mask, M, call.q.shape[2], pack_queries, call.pattern.causal
        )
        if bias is not None:
            return _dense(call, bias=bias)
    leftpad = once(call.made, left_padding, mask) if M < N and not _trains(call) else None
    if leftpad is not None:
        return _against_cache(call, leftpad)
    return _packed(call, once(call.made, packing, mask, M, pack_queries))


def _with_sequences(call: Call, numbers: Tensor, padding: Tensor | None = None) -> Tensor:
    """Attention over packed sequences, numbered from 1 in a (batch, seq) tensor; 0 is padding."""
    if not call.is_plain or torch.compiler.is_compiling():
        call = call.within(numbers)
        return _dense(call) if padding is None else _with_padding(call, padding)
    if padding is not None:
        numbers = once(call.made, torch.mul, numbers, padding)
    return _packed(call, once(call.made, packing, numbers, call.q.shape[1], True))


def _where_visible(call: Call, visible: Tensor) -> Tensor:
    """Attention without packing, with a 4-D bool mask."""
    M, N = call.q.shape[1], call.k.shape[1]
    if call.chosen is not None:
        return _dense(call._replace(chosen=call.chosen[..., :N] & visible))
    return _dense(call, **options_of(visible, M, N))


def _packed(call: Call, packing: Packing) -> Tensor:
    """Attention within each sequence over the packed real tokens; queries at padding get 0."""
    batch, M = call.q.shape[:2]
    k, v = (x.flatten(0, 1).index_select(0, packing.key_index) for x in (call.k, call.v))
    out = attention_varlen(
        call.q.flatten(0, 1).index_select(0, packing.query_index),
        k,
        v,
        packing.cu_seqlens_q,
        packing.cu_seqlens_k,
        packing.max_seqlen_q,
        packing.max_seqlen_k,
        **call.pattern.options,
        **call.numbers,
    )
    out = cast(Tensor, out)
    padded = out.new_zeros(batch * M, *out.shape[1:]).index_copy(0, packing.query_index, out)
    return padded.unflatten(0, (batch, M))


def _trains(call: Call) -> bool:
    """Whether the call needs gradients or dropout, which attention over a cache lacks."""
    inputs = (call.q, call.k, call.v, call.numbers["sink"])
    records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return records or call.numbers["dropout_p"] > 0


def _against_cache(call: Call, leftpad: Tensor) -> Tensor:
    """Attention of a few new queries over padded keys, without copying the keys."""
    numbers = {
        name: x for name, x in call.numbers.items() if name not in ("dropout_p", "deterministic")
    }
    options = call.pattern.options | numbers
    return cast(
        Tensor, attention_with_kvcache(call.q, call.k, call.v, cache_leftpad=leftpad, **options)
    )
