"""Call flashtile for a layer of a transformers model in the cheapest way that applies its mask."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..api import attention, attention_varlen, attention_with_kvcache
from ..call.converted_masks import additive, options_of
from ..call.dispatch import MOST_NEW_TOKENS
from ..masks import Folded, Spans
from .transformers_masks import (
    Pattern,
    attached_pattern,
    is_made_here,
    is_whole,
    key_padding,
    once,
    renew_in_later_steps,
    scores_mask,
    short_form,
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
    numbers: dict[str, Any]  # the other arguments of `flashtile.attention`, without defaults
    made: Any = None  # the mask, which remembers what concerns all layers: see `once`
    documents: Spans | None = None  # every token sees only its own document

    def within(self, numbers: Tensor) -> Call:
        """The call, with the documents that are numbered from 1; 0 is padding."""
        return self._replace(documents=Spans.documents(numbers - 1, causal=False))

    @property
    def is_plain(self) -> bool:
        """Whether tokens may be packed, because no argument refers to single queries and keys."""
        return (
            self.bias is None
            and self.chosen is None
            and self.sinks is None
            and self.documents is None
        )

    @property
    def trains(self) -> bool:
        """Whether the call needs gradients or dropout, which attention over a cache lacks."""
        if "dropout_p" in self.numbers:
            return True
        if not torch.is_grad_enabled():
            return False
        inputs = (self.q, self.k, self.v, self.numbers.get("sink"))
        return any(x is not None and x.requires_grad for x in inputs)


class Route(NamedTuple):
    """A single call of flashtile that applies a mask."""

    keys: int  # how many slots of a cache the call gets
    options: dict[str, Any]  # the pattern, and what else applies the mask
    is_cached: bool = False  # `attention_with_kvcache` instead of `attention`


def attend(call: Call, mask: Any, lengths: tuple[Any, ...] | None, position_ids: Any) -> Tensor:
    """Call flashtile in the cheapest way that applies `mask`, which may have any form.

    Args:
        lengths: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k of packed sequences, or
            None.
    """
    (B, M, H), N = call.q.shape[:3], call.k.shape[1]
    if isinstance(mask, Tensor):
        mask = short_form(mask)
        renew_in_later_steps(mask)
        call = call._replace(made=mask)
    numbers = _restarts(call, mask, position_ids) if lengths is None else None
    if lengths is None and numbers is None and call.is_plain:
        route = once(mask, _route, mask, call.pattern, (B, M, H, N), call.trains)
        if route is not None:
            return _along(call, route)
    padding = key_padding(mask, B, M, N) if isinstance(mask, Tensor) else None
    is_exact = mask is not None and padding is None
    if padding is not None:
        width = padding.shape[1]
        pattern = attached_pattern(mask) or call.pattern
        call = call._replace(k=call.k[:, :width], v=call.v[:, :width], pattern=pattern)
        if pattern.segments is not None:
            return _with_sequences(call, padding)
        padding = None if is_whole(mask) else padding.bool()
    if lengths is not None:
        if not is_exact and padding is None:
            return _with_lengths(call, *lengths)
        if call.k.shape[1] != M:
            raise NotImplementedError(
                "cu_seq_lens_q: cannot be combined with an attention_mask, except in self-attention"
            )
        call = call.within(documents_of_lengths(lengths[1], B, M))
    elif numbers is not None and is_exact:
        call = call.within(numbers)
    elif numbers is not None:
        return _with_sequences(call, numbers, padding)
    if is_exact:
        return _with_exact_mask(call, mask)
    return _dense(call) if padding is None else _with_padding(call, padding)


def attend_folded(
    call: Call, mask: Any, lengths: tuple[Any, ...] | None, position_ids: Any, rollouts: Folded
) -> Tensor:
    """Attention of rollouts that `flashtile.fold` folded into the model's only row. Of the model's
    mask only the window counts: it was made for one sequence.

    Raises:
        NotImplementedError: an argument refers to the row as one sequence.
        ValueError: the model has other tokens or positions.
    """
    if isinstance(mask, Tensor):
        mask = short_form(mask)
    hides_nothing = mask is None or (
        isinstance(mask, Tensor) and mask.dim() == 2 and is_whole(mask)
    )
    pattern = attached_pattern(mask) or call.pattern
    refused = {
        "an attention_mask that hides tokens": None if hides_nothing else mask,
        "cu_seq_lens_q": lengths,
        "position_bias": call.bias,
        "indices or block_indices": call.chosen,
        "attention_chunk": pattern.attention_chunk or None,
    }
    for name, x in refused.items():
        if x is not None:
            raise NotImplementedError(f"rollouts: cannot be combined with {name}")
    tokens = len(rollouts.tokens)
    if call.q.shape[:2] != (1, tokens) or call.k.shape[1] != tokens:
        raise ValueError(
            f"rollouts: got {tuple(call.q.shape[:2])} queries and {call.k.shape[1]} keys, want "
            f"input_ids of shape (1, {tokens}), the folded tokens, and no cached ones"
        )
    is_known = isinstance(position_ids, Tensor) and not torch.compiler.is_compiling()
    if is_known and not once(mask, _are_positions, position_ids, rollouts.positions):
        raise ValueError(
            "position_ids: got others than those of the rollouts, want rollouts.positions[None]"
        )
    window = once(mask, rollouts.spans, pattern.window_size)
    return _dense(call._replace(pattern=Pattern(), documents=window))


def _are_positions(position_ids: Tensor, positions: Tensor) -> bool:
    return torch.equal(position_ids.reshape(-1), positions.to(position_ids.dtype))


def _restarts(call: Call, mask: Any, position_ids: Any) -> Tensor | None:
    """The numbers of the documents that position ids separate by starting over; None for one.

    Transformers separates them in its masks, except where the model has a cache. There this is the
    rule of its own flash attention: in a batch of one row. A user's mask for single scores already
    separates what it should.
    """
    (B, M), N = call.q.shape[:2], call.k.shape[1]
    if B != 1 or M == 1 or not isinstance(position_ids, Tensor) or position_ids.shape != (B, M):
        return None
    padding = key_padding(mask, B, M, N) if isinstance(mask, Tensor) else None
    tokens = N if padding is None else padding.shape[1]
    is_exact = mask is not None and padding is None
    if tokens != M or (is_exact and not is_made_here(mask)):
        return None
    return once(mask, documents_of_positions, position_ids)


def _route(
    mask: Any, pattern: Pattern, sizes: tuple[int, int, int, int], trains: bool
) -> Route | None:
    """How a single call applies the mask of a plain call; None if it takes more.

    Args:
        pattern: that of a mask without its own.
        sizes: (batch, seq_q, heads, seq_k).
    """
    B, M, H, N = sizes
    if mask is None:
        return Route(N, pattern.options)
    padding = key_padding(mask, B, M, N) if isinstance(mask, Tensor) else None
    if padding is None:
        is_bool = isinstance(mask, Tensor) and mask.dtype == torch.bool
        return Route(N, once(mask, _visible_options, mask, sizes)) if is_bool else None
    pattern = attached_pattern(mask) or pattern
    used = padding.shape[1]
    compiling, on_cpu = torch.compiler.is_compiling(), is_on_cpu(padding)
    if pattern.segments is not None:
        return None
    if is_whole(mask):
        # The used slots have another shape in every step; with all of them, a call that one step
        # has prepared is also that of the next.
        if used < N and M <= MOST_NEW_TOKENS and not (trains or compiling or on_cpu):
            return _cached(N, pattern, padding)
        return Route(used, pattern.options)
    if compiling or (pattern.is_of_tokens and used < M):
        return None
    padding = padding.bool()
    # A chunk starts at the first real token.
    if on_cpu and not pattern.attention_chunk:
        bias = cheap_bias(padding, M, H, pattern.is_of_tokens, pattern.causal)
        if bias is not None:
            return Route(used, {**pattern.options, "bias": bias})
    leftpad = left_padding(padding) if used > M and not trains else None
    return None if leftpad is None else _cached(N, pattern, padding, leftpad)


def is_on_cpu(x: Tensor) -> bool:
    """Whether a CPU computes: it hides little padding by a bias, and prepares no calls."""
    return x.device.type == "cpu"


def _cached(slots: int, pattern: Pattern, padding: Tensor, leftpad: Tensor | None = None) -> Route:
    """The route over a cache whose first slots hold the tokens of `padding`."""
    batch, used = padding.shape
    lengths = torch.full((batch,), used, dtype=torch.int32, device=padding.device)
    options = {**pattern.options, "cache_seqlens": lengths, "cache_leftpad": leftpad}
    return Route(slots, options, is_cached=True)


def _along(call: Call, route: Route) -> Tensor:
    """The call along a route."""
    k, v, options = call.k, call.v, {**route.options, **call.numbers}
    if route.keys < k.shape[1]:
        k, v = k[:, : route.keys], v[:, : route.keys]
    if not route.is_cached:
        return cast(Tensor, attention(call.q, k, v, **options))
    options.pop("deterministic", None)  # which concerns gradients
    return cast(Tensor, attention_with_kvcache(call.q, k, v, **options))


def _dense(call: Call, block_mask: Any = None, bias: Tensor | None = None) -> Tensor:
    """Attention without packing; `block_mask` and `bias` apply in addition to the pattern."""
    N = call.k.shape[1]
    position_bias = None if call.bias is None else call.bias[..., :N]
    if bias is None or position_bias is None:
        bias = position_bias if bias is None else bias
    else:
        bias = position_bias + bias
    chosen = None if call.chosen is None else call.chosen[..., :N]
    options = call.pattern.options | call.numbers
    options |= {"block_mask": block_mask, "bias": bias, "attn_mask": chosen, "mask": call.documents}
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
    (B, M, H), N = call.q.shape[:3], call.k.shape[1]
    if mask.dtype == torch.bool and call.chosen is None:
        return _dense(call, **once(call.made, _visible_options, mask, (B, M, H, N)))
    mask = scores_mask(mask, (B, H, M, N))
    if mask.dtype != torch.bool:
        return _dense(call, bias=mask)
    assert call.chosen is not None
    return _dense(call._replace(chosen=call.chosen[..., :N] & mask))


def _visible_options(mask: Tensor, sizes: tuple[int, int, int, int]) -> dict[str, Any]:
    """The options that apply a bool mask for single scores; `sizes` as in `_route`."""
    B, M, H, N = sizes
    return options_of(scores_mask(mask, (B, H, M, N)), M, N)


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
    is_of_tokens = call.pattern.is_of_tokens
    is_plain = call.is_plain and not torch.compiler.is_compiling()
    if not is_plain or (is_of_tokens and M > N):  # some queries are not tokens of the mask
        return _where_visible(call, mask[:, None, None, :])
    return _packed(call, once(call.made, packing, mask, M, is_of_tokens))


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


class Packing(NamedTuple):
    """The indices of the real tokens of a padded batch, and their sequences."""

    query_index: Tensor  # (total_q,) into the flattened (batch * q_length)
    key_index: Tensor  # (total_k,) into the flattened (batch * keys)
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def packing(mask: Tensor, q_length: int, pack_queries: bool) -> Packing:
    """The packing of a (batch, keys) mask.

    Args:
        mask: bool, where each row is a sequence; or integers that number the sequences from 1.
            False and 0 are padding.
        q_length: the queries are the last `q_length` tokens.
        pack_queries: also leave out the queries at padding; if False, every query is kept.
    """
    key_index, cu_k, max_k = _sequences(mask)
    if pack_queries and q_length == mask.shape[1]:
        return Packing(key_index, key_index, cu_k, cu_k, max_k, max_k)
    queries = (
        mask[:, mask.shape[1] - q_length :]
        if pack_queries
        else mask.new_ones(mask.shape[0], q_length)
    )
    query_index, cu_q, max_q = _sequences(queries)
    return Packing(query_index, key_index, cu_q, cu_k, max_q, max_k)


def _sequences(mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Flat indices of the real tokens, cumulative lengths of their sequences, and the longest
    length.
    """
    index = mask.flatten().nonzero().flatten()
    if mask.dtype == torch.bool:
        lengths = mask.sum(1)
    else:
        row = torch.arange(mask.shape[0], device=mask.device)[:, None] * (mask.max() + 1)
        lengths = (mask + row).flatten()[index].unique_consecutive(return_counts=True)[1]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return index, cu_seqlens, int(lengths.max()) if lengths.numel() else 0


def left_padding(mask: Tensor) -> Tensor | None:
    """The number of padding tokens at the start of each row of a (batch, keys) bool mask, (batch,)
    int32; None if there is padding elsewhere.
    """
    # As one number, because the host waits for a GPU to read one.
    is_left = (mask[:, 1:] >= mask[:, :-1]).all() & mask[:, -1:].all()
    if not bool(is_left):
        return None
    return (~mask).sum(1).int()


# Hidden scores that take a CPU about as long as a kernel call for one more sequence.
HIDDEN_SCORES = 8192


def cheap_bias(
    mask: Tensor, q_length: int, heads: int, pack_queries: bool, causal: bool
) -> Tensor | None:
    """A bias (batch, 1, 1, keys) that hides the padding of a (batch, keys) bool mask, if a CPU
    computes all scores faster than it serves each sequence by itself; else None.

    Args:
        q_length, pack_queries: as in `packing`. With `pack_queries` the result of a query at
            padding is 0, so there is no bias if such a query sees a key (`causal`: no later one).
    """
    hidden = int((~mask).sum()) * q_length * heads
    if hidden > HIDDEN_SCORES * mask.shape[0]:
        return None
    has_padding = bool((~mask[:, mask.shape[1] - q_length :]).any())
    if pack_queries and has_padding and not (causal and left_padding(mask) is not None):
        return None
    return additive(mask[:, None, None])


def documents_of_positions(position_ids: Tensor) -> Tensor | None:
    """Number the documents that are packed into rows from 1, (batch, tokens) int32; None if every
    row is known to be one document.

    A document starts at every smallest position of a row that begins with it: the rule of
    transformers' own flash attention. Any other row is one document.
    """
    starts = position_ids == position_ids.amin(1, keepdim=True)
    numbers = (starts & starts[:, :1]).cumsum(1).clamp(min=1).int()
    if not torch.compiler.is_compiling() and not bool((numbers > 1).any()):
        return None
    return numbers


def documents_of_lengths(cu_seqlens: Tensor, batch: int, tokens: int) -> Tensor:
    """Number the documents of packed rows from 1, (batch, tokens) int32; 0 is after the last."""
    index = torch.arange(batch * tokens, device=cu_seqlens.device)
    numbers = torch.bucketize(index, cu_seqlens, right=True)
    return (numbers % cu_seqlens.numel()).int().view(batch, tokens)
