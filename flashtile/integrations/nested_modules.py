"""`nn.MultiheadAttention` on nested tensors while `sdpa.install` is active.

PyTorch accepts nested tensors only in the module's fast path, which does not call
`scaled_dot_product_attention`, so `install` switches that path off. This module pads the sequences
for `nn.MultiheadAttention`, masks the padding and removes it from the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence


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
