"""Attention over jagged nested tensors, whose values and offsets are packed sequences for
`flashtile.attention_varlen`; and `nn.MultiheadAttention` on nested tensors.

PyTorch accepts nested tensors only in the fast path of `nn.MultiheadAttention`, which does not call
`scaled_dot_product_attention`, so `sdpa.install` switches that path off. `accepting_nested` pads
the sequences for the module, masks the padding and removes it from the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..api import attention_varlen


class _Jagged(NamedTuple):
    """A nested tensor (batch, heads, seq, head_dim), packed."""

    values: Tensor  # (total, heads, head_dim)
    offsets: Tensor  # (batch + 1,) int32
    lengths: Tensor | None  # (batch,) int32, if sequences do not fill their part of the values
    max_seqlen: int

    def sizes(self) -> Tensor:
        """(batch,): the length of each sequence."""
        return self.offsets.diff() if self.lengths is None else self.lengths


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """`sdpa.scaled_dot_product_attention` for jagged nested tensors.

    Args:
        query: jagged, (batch, heads, seq_q, head_dim): the result of ``transpose(1, 2)`` on a
            nested tensor (batch, seq, heads, head_dim).
        key, value: jagged, (batch, kv_heads, seq_k, head_dim), with the same lengths.
        attn_mask: must be None; the only mask for nested tensors is `is_causal`.
        dropout_p, is_causal, scale, enable_gqa: as in `sdpa.scaled_dot_product_attention`.

    Returns:
        jagged, (batch, heads, seq_q, value_head_dim), with the query's lengths.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        NotImplementedError: `attn_mask` is given, or `is_causal` is True and a sequence has more
            queries than keys.
    """
    if attn_mask is not None:
        raise NotImplementedError(
            "attn_mask: got a mask with nested tensors, want None; flashtile.attention_varlen "
            "takes bias and block_mask"
        )
    q, k, v = _jagged("query", query), _jagged("key", key), _jagged("value", value)
    _check_sizes(q, k, v)
    heads = q.values.shape[1], k.values.shape[1], v.values.shape[1]
    if not enable_gqa and len(set(heads)) > 1:
        raise ValueError(
            f"query, key, value: got {heads} heads, want equal numbers or enable_gqa=True"
        )
    seqused_k = _causal_keys(q, k) if is_causal else k.lengths
    drop_all = dropout_p == 1.0
    out = attention_varlen(
        q.values,
        k.values,
        v.values,
        q.offsets,
        k.offsets,
        q.max_seqlen,
        k.max_seqlen,
        softmax_scale=scale,
        causal=is_causal,
        dropout_p=0.0 if drop_all else dropout_p,
        seqused_q=q.lengths,
        seqused_k=seqused_k,
    )
    out = torch.dropout(cast(Tensor, out), 1.0, True) if drop_all else cast(Tensor, out)
    jagged: Any = query  # the methods of jagged tensors are not Tensor's
    return torch.nested.nested_tensor_from_jagged(
        out, jagged.offsets(), jagged.lengths(), min_seqlen=0, max_seqlen=q.max_seqlen
    ).transpose(1, 2)


def _jagged(name: str, x: Any) -> _Jagged:
    if not x.is_nested:
        raise TypeError(
            f"{name}: got a dense tensor, want a jagged one like the other two of query, key, value"
        )
    if x.layout != torch.jagged:
        raise TypeError(
            f"{name}: got a nested tensor of layout {x.layout}, want torch.jagged; for example "
            "torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged)"
        )
    if x.dim() != 4 or x._ragged_idx != 2:
        raise ValueError(
            f"{name}: got a jagged tensor of shape {tuple(x.shape)}, want (batch, heads, seq, "
            "head_dim) with a ragged seq"
        )
    lengths = x.lengths()
    return _Jagged(
        x.values().transpose(0, 1),
        x.offsets().int(),
        None if lengths is None else lengths.int(),
        int(x._get_max_seqlen()),
    )


def _check_sizes(q: _Jagged, k: _Jagged, v: _Jagged) -> None:
    batch = [x.offsets.shape[0] - 1 for x in (q, k, v)]
    if len(set(batch)) > 1:
        raise ValueError(f"query, key, value: got batches of {batch} sequences, want equal numbers")
    same = k.offsets is v.offsets or torch.equal(k.offsets, v.offsets)
    if not same or not torch.equal(k.sizes(), v.sizes()):
        raise ValueError("value: got other sequence lengths than the key's, want the same")


def _causal_keys(q: _Jagged, k: _Jagged) -> Tensor | None:
    """The number of keys to use of each sequence: as many as it has queries.

    No query sees a later key, and with equal lengths top-left and bottom-right causal masks agree.
    """
    M, N = q.sizes(), k.sizes()
    if bool((M > N).any()):
        raise NotImplementedError(
            "is_causal: got True with a sequence of more queries than keys, want at least as many "
            "keys in nested tensors"
        )
    return k.lengths if torch.equal(M, N) else M


def accepting_nested(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `nn.MultiheadAttention.forward` to take nested tensors, too."""

    @wraps(forward)
    def run(
        self: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        options = need_weights, attn_mask, average_attn_weights, is_causal
        if not (query.is_nested or key.is_nested or value.is_nested):
            result: Any = forward(self, query, key, value, key_padding_mask, *options)
            return result
        _check(self, (query, key, value), key_padding_mask, attn_mask)
        lengths_q, lengths_k = _lengths(query), _lengths(key)
        padded = (pad_sequence(list(x.unbind()), batch_first=True) for x in (query, key, value))
        out, weights = forward(self, *padded, _padding(lengths_k, key.device), *options)
        rows = [x[:length] for x, length in zip(out, lengths_q, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=query.layout), weights

    return run


def _check(
    module: nn.MultiheadAttention,
    tensors: tuple[Tensor, Tensor, Tensor],
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> None:
    query, key, value = tensors
    if not all(x.is_nested for x in tensors):
        raise TypeError("query, key, value: got nested and dense tensors, want only one kind")
    if not module.batch_first:
        raise ValueError("query: got a nested tensor, want a module with batch_first=True")
    for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if mask is not None:
            raise ValueError(f"{name}: got a mask with nested tensors, want None")
    if _lengths(key) != _lengths(value) or query.size(0) != key.size(0):
        raise ValueError(
            "query, key, value: got nested tensors of different sequences, want equal batches, and "
            "equal lengths of key and value"
        )


def _lengths(x: Tensor) -> list[int]:
    return [len(sequence) for sequence in x.unbind()]


def _padding(lengths: list[int], device: torch.device) -> Tensor | None:
    """(batch, longest) bool, True at padding, the module's convention; None without padding."""
    longest = max(lengths)
    if min(lengths) == longest:
        return None
    return torch.arange(longest, device=device) >= torch.tensor(lengths, device=device)[:, None]
