"""PyTorch's ``scaled_dot_product_attention``, same signature and same meaning, computed by
flashtile.

::

    from flashtile.integrations import sdpa

    out = sdpa.scaled_dot_product_attention(query, key, value, is_causal=True)
    with sdpa.install():  # every torch.nn.functional.scaled_dot_product_attention inside
        model(inputs)

It differs from `flashtile.attention` as PyTorch does: the layout is (..., heads, seq, head_dim),
and the causal mask starts in the top-left corner.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from ..api import attention
from .bool_masks import options_of


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``softmax(scale * query key^T + attn_mask) value``, as
    ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        query: (..., heads, seq_q, head_dim); the leading dimensions broadcast, and may be absent.
        key: (..., heads, seq_k, head_dim).
        value: (..., heads, seq_k, value_head_dim).
        attn_mask: broadcasts to (..., heads, seq_q, seq_k). Bool: True where a query sees a key.
            Floating: added to the scores; has a gradient.
        dropout_p: probability in [0, 1] of dropping a probability; applied in evaluation mode too.
        is_causal: query i sees the keys ``j <= i`` (top-left corner), whatever the lengths; not
            with `attn_mask`.
        scale: factor on the scores; ``head_dim ** -0.5`` by default.
        enable_gqa: key and value may have fewer heads, a number that divides the query's.

    Returns:
        (..., heads, seq_q, value_head_dim) in the query's dtype. A query that sees no key gets 0.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        NotImplementedError: no backend can run the call; the message lists each with its reasons.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 2:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want (..., seq, head_dim)")
    M = query.shape[-2]
    if is_causal:  # no query sees a key past M, and without those M >= N
        key, value = key[..., :M, :], value[..., :M, :]
        attn_mask = None if attn_mask is None else attn_mask[..., :M]
    N = key.shape[-2]

    leading, q, k, v = _four_dimensional(query, key, value, attn_mask, enable_gqa)
    options: dict[str, Any] = {} if attn_mask is None else _mask_options(attn_mask, leading, M, N)
    if is_causal:  # top-left, j <= i, where a window ends at i + N - M + right
        options["window_size"] = (-1, M - N)
    drop_all = dropout_p == 1.0  # PyTorch allows it: zeros, with zero gradients
    dropout_p = 0.0 if drop_all else dropout_p
    out = cast(Tensor, attention(q, k, v, softmax_scale=scale, dropout_p=dropout_p, **options))
    out = out.transpose(1, 2).reshape(*leading, M, v.shape[-1])
    return torch.dropout(out, 1.0, True) if drop_all else out


@contextmanager
def install() -> Iterator[None]:
    """Put this function in the place of PyTorch's, ``torch.nn.functional``, in a ``with`` block.

    It reaches code that looks the function up there at each call, as models do; a name that was
    imported from there before keeps its old value. Blocks nest. Afterwards the function is again
    what it was before, also after an exception.
    """
    functional = torch.nn.functional
    previous = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = previous


def _four_dimensional(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor]:
    """Leading dimensions of the result, and q, k, v as (batch, seq, heads, head_dim) with those
    dimensions folded."""
    inputs = [query, key, value]
    shaped = inputs if attn_mask is None else [*inputs, attn_mask]
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in shaped))
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in inputs]
    Hq = heads[0] if enable_gqa else max(heads)
    if any(H < 1 or (Hq % H if enable_gqa else H not in (1, Hq)) for H in heads):
        wanted = "that divide the query's" if enable_gqa else "equal or 1 (or else enable_gqa=True)"
        raise ValueError(f"query, key, value: got {heads} heads, want numbers {wanted}")
    if heads[1] != heads[2]:  # attention() has one number of key heads, PyTorch has two
        heads[1:] = [Hq, Hq]
    heads[0] = Hq
    q, k, v = (
        _folded(_with_heads(x, H), batch).transpose(1, 2)
        for x, H in zip(inputs, heads, strict=True)
    )
    has_heads = any(x.dim() > 2 for x in shaped)
    return (*batch, Hq) if has_heads else (), q, k, v


def _with_heads(x: Tensor, H: int) -> Tensor:
    """`x` (..., seq, head_dim) with `H` heads, each of its own repeated as often as that takes."""
    x = x if x.dim() > 2 else x[None]
    return x if x.shape[-3] == H else x.repeat_interleave(H // x.shape[-3], dim=-3)


def _folded(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """`x` (..., a, b, c) broadcast over the dimensions `batch`, which become one."""
    x = x.expand(*batch, *x.shape[-3:])
    return x.flatten(0, -4) if batch else x[None]


def _mask_options(attn_mask: Tensor, leading: tuple[int, ...], M: int, N: int) -> dict[str, Any]:
    """`attn_mask` as an option of `attention`, folded to four dimensions as the inputs are."""
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(
            f"attn_mask: got dtype {attn_mask.dtype}, want torch.bool or a floating dtype"
        )
    wanted = (*(leading or (1,)), M, N)
    mask = attn_mask[(None,) * max(0, 3 - attn_mask.dim())]
    aligned = wanted[len(wanted) - mask.dim() :]
    if any(size not in (1, full) for size, full in zip(mask.shape, aligned, strict=True)):
        raise ValueError(
            f"attn_mask: got shape {tuple(attn_mask.shape)}, want one that broadcasts to {wanted}"
        )
    shared = all(size == 1 for size in mask.shape[:-3])
    mask = mask.reshape(1, *mask.shape[-3:]) if shared else _folded(mask, leading[:-1])
    return options_of(mask, M, N) if mask.dtype == torch.bool else {"bias": mask}
