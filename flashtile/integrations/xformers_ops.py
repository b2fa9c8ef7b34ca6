"""The functions of ``xformers.ops`` and ``xformers.ops.fmha``.

Masks never become matrices: see `xformers_attn_bias`. A row that sees no key, which xFormers leaves
undefined, has out 0, lse -inf and zero gradients. `op` and the operators of SwiGLU select a kernel
in xFormers; here they are hints, named in the log ``flashtile.hints``.

Source: xFormers 0.0.35, ``xformers/ops``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..api import attention, attention_varlen
from ..call.checks import ignored
from ..call.layouts import Dense, Packed
from ..call.packing import as_packed
from ..combine import flash_attn_combine
from ..flash_attn_2_cuda import gradients
from ..layers.activations import swiglu as gated
from .xformers_attn_bias import QKV, VARLEN_BIASES, AttentionBias

AttentionMask = AttentionBias
Bias = Tensor | AttentionBias | None


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """``softmax(scale * query key^T + attn_bias) value``, with gradients, also of a tensor bias.

    Args:
        query: (batch, seq_q, heads, head_dim); (batch, seq_q, head_dim) for one head; or (batch,
            seq_q, groups, heads of a group, head_dim).
        key, value: likewise. Heads that share keys are expanded, which costs no memory.
        attn_bias: an object of `xformers_attn_bias`, or a tensor that broadcasts to (batch, heads,
            seq_q, seq_k), without heads for 3-D inputs and with groups for 5-D ones.
        p: rate in [0, 1) at which probabilities are dropped, whether a module trains or not.
        scale: by default ``head_dim ** -0.5``.
        op: a hint.
        output_dtype: dtype of the result, by default the query's.

    Returns:
        shaped as query, with value's head dim.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        NotImplementedError: `attn_bias` is of another class; or as `flashtile.attention`.
    """
    ignored("memory_efficient_attention", op=op)
    out, _ = _attend(query, key, value, attn_bias, p, scale, return_lse=False)
    return out.to(output_dtype or out.dtype)


memory_efficient_attention_forward = torch.no_grad()(memory_efficient_attention)


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The result without gradients, and lse for `memory_efficient_attention_backward`: float32,
    (batch, heads, seq_q) or (batch, groups, heads, seq_q); with blocks, the batch is 1.
    """
    _refuse_dropout(p)
    ignored("memory_efficient_attention_forward_requires_grad", op=op)
    with torch.no_grad():
        out, lse = _attend(query, key, value, attn_bias, p, scale, return_lse=True)
    return out.to(output_dtype or out.dtype), lse


def memory_efficient_attention_partial(
    query: Tensor, *args: Any, output_dtype: torch.dtype | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The same for one part of the keys, for `merge_attentions`; out is float32 by default."""
    dtype = output_dtype or torch.promote_types(query.dtype, torch.float32)
    function = memory_efficient_attention_forward_requires_grad
    return function(query, *args, output_dtype=dtype, **kwargs)


def memory_efficient_attention_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from the results of
    `memory_efficient_attention_forward_requires_grad`.
    """
    _refuse_dropout(p)
    ignored("memory_efficient_attention_backward", op=op)
    qkv, arguments = _call(query, key, value, attn_bias, scale, shares_heads=False)
    packed = "cu_seqlens_q" in arguments
    layout: Dense | Packed = Dense()
    if packed:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "page_table")
        qkv, _, layout, _ = as_packed(*qkv, None, *(arguments.pop(name, None) for name in names))
    dtype, rows = query.dtype, qkv[0].shape[:-1]
    grad, output = (x.reshape(*rows, x.shape[-1]).to(dtype) for x in (grad, output))
    lse = lse.flatten(1, -2)  # (batch, heads, seq_q)
    results = grad, output, lse[0] if packed else lse
    _, grads = gradients(qkv, layout, arguments, results, (None, None, None))
    dq, dk, dv = (g.reshape(x.shape) for g, x in zip(grads, (query, key, value), strict=False))
    return dq, dk, dv


def merge_attentions(
    attn_split: Tensor | Sequence[Tensor],
    lse_split: Tensor | Sequence[Tensor],
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention over all keys, from that over each of several parts of them.

    Args:
        attn_split: for each part, (batch, seq_q, [groups,] heads, head_dim).
        lse_split: for each part, (batch, [groups,] heads, seq_q), float32.
        write_lse: whether to return the lse, too.

    Raises:
        ValueError, TypeError: as `flashtile.flash_attn_combine`.
    """
    out, lse = (
        x if isinstance(x, Tensor) else torch.stack(tuple(x)) for x in (attn_split, lse_split)
    )
    groups = out.shape[3:-1]
    merged, merged_lse = flash_attn_combine(
        out.flatten(3, -2), lse.flatten(2, -2).transpose(-1, -2), out_dtype=output_dtype
    )
    heads_first = merged_lse.transpose(-1, -2).unflatten(1, groups) if write_lse else None
    return merged.unflatten(2, groups), heads_first


def _refuse_dropout(p: float) -> None:
    if p != 0.0:
        raise NotImplementedError(f"p: got {p}, want 0 in a function without autograd")


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias,
    p: float,
    scale: float | None,
    return_lse: bool,
) -> tuple[Tensor, Any]:
    """Out, shaped as query, and lse (batch, [groups,] heads, seq_q) or None."""
    qkv, arguments = _call(query, key, value, attn_bias, scale, shares_heads=True)
    packed = "cu_seqlens_q" in arguments
    attend: Any = attention_varlen if packed else attention
    result = attend(*qkv, **arguments, dropout_p=p, return_lse=return_lse)
    out, lse = result if return_lse else (result, None)
    if lse is not None:
        lse = (lse[None] if packed else lse).unflatten(1, query.shape[2:-1] or (1,))
    return out.reshape(*query.shape[:-1], out.shape[-1]), lse


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any,
    scale: float | None,
    shares_heads: bool,
) -> tuple[QKV, dict[str, Any]]:
    """The tensors and the arguments of `attention` or, with `cu_seqlens_q`, `attention_varlen`.

    Args:
        shares_heads: read keys once that are expanded over heads; their gradient is then the sum.
    """
    dims = {x.dim() for x in (query, key, value)}
    if len(dims) > 1 or not dims <= {3, 4, 5}:
        shapes = [tuple(x.shape) for x in (query, key, value)]
        raise ValueError(f"query, key, value: got shapes {shapes}, want all 3-D, 4-D or 5-D")
    # The gradient of a leaf is to be stored in this very tensor.
    expanded = all(x.stride(-2) == 0 and not (x.requires_grad and x.is_leaf) for x in (key, value))
    if shares_heads and expanded and query.dim() > 3:
        key, value = key[..., :1, :], value[..., :1, :]
    # (batch, seq, [groups,] heads, head_dim) -> (batch, seq, heads, head_dim)
    q, k, v = (x[:, :, None] if x.dim() == 3 else x.flatten(2, -2) for x in (query, key, value))
    arguments: dict[str, Any]
    qkv, arguments = (q, k, v), {}
    if isinstance(attn_bias, AttentionBias):
        if type(attn_bias).__module__ != AttentionBias.__module__:
            raise NotImplementedError(
                f"attn_bias: got {type(attn_bias).__name__}, want a class of "
                "xformers.ops.fmha.attn_bias, or a tensor such as its materialize(...)"
            )
        if isinstance(attn_bias, VARLEN_BIASES):  # which are made where `from_seqlens` guessed
            attn_bias = attn_bias.to(q.device)
        qkv, arguments = attn_bias.call(q, k, v)
    elif attn_bias is not None:
        arguments = {"bias": attn_bias}
    bias = arguments.get("bias")
    if isinstance(bias, Tensor) and query.dim() == 5:
        arguments["bias"] = _without_groups(bias, *query.shape[2:4])
    elif isinstance(bias, Tensor) and bias.dim() == query.dim() == 3:
        arguments["bias"] = bias[:, None]
    return qkv, arguments | {"softmax_scale": scale}


def _without_groups(bias: Tensor, groups: int, heads: int) -> Tensor:
    """What broadcasts to (batch, groups, heads, seq_q, seq_k), as what does to (batch, groups *
    heads, seq_q, seq_k).
    """
    wide = bias[(None,) * (5 - bias.dim())]
    own = wide.shape[1:3]
    if wide.dim() != 5 or own[0] not in (1, groups) or own[1] not in (1, heads):
        raise ValueError(
            f"attn_bias: got shape {tuple(bias.shape)}, want one that broadcasts to (batch, "
            f"{groups}, {heads}, seq_q, seq_k)"
        )
    if own != (1, 1):  # a bias that all heads share stays one
        wide = wide.expand(-1, groups, heads, -1, -1)
    return wide.flatten(1, 2)


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """`torch.unbind`."""
    return x.unbind(dim)


def index_select_cat(sources: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """The rows `indices[i]` (rows_i,) of each of `sources` (_, columns_i), as one flat tensor."""
    rows = (x[index.long()].flatten() for x, index in zip(sources, indices, strict=True))
    return torch.cat(list(rows))


def scaled_index_add(
    input: Tensor, index: Tensor, source: Tensor, scaling: Tensor | None = None, alpha: float = 1.0
) -> Tensor:
    """Add ``alpha * scaling * source`` to the entries `index` (batch_i,) of `input` (batch, seq,
    dim), in place.

    Args:
        source: (batch_i, seq, dim).
        scaling: (dim,).
    """
    return input.index_add_(0, index, source if scaling is None else scaling * source, alpha=alpha)


class SwiGLUOp:
    """An operator of `swiglu`: a hint."""


SwiGLUEagerOp = SwiGLUOp()


def swiglu(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    w3: Tensor,
    b3: Tensor | None,
    *,
    op: SwiGLUOp | None = None,
) -> Tensor:
    """``(silu(x w1^T + b1) * (x w2^T + b2)) w3^T + b3`` (Shazeer 2020).

    Args:
        x: (..., in_features).
        w1, w2: (hidden_features, in_features).
        w3: (out_features, hidden_features).
        op: a hint.
    """
    ignored("swiglu", op=op)
    return F.linear(gated(F.linear(x, w1, b1), F.linear(x, w2, b2)), w3, b3)


class SwiGLU(nn.Module):
    """`swiglu` with its weights: `w12`, or `w1` and `w2` if they are not packed, and `w3`."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        _pack_weights: bool = True,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.hidden_features = hidden_features or in_features
        self.out_features = out_features or in_features
        self.w12: nn.Linear | None = None
        if _pack_weights:
            self.w12 = nn.Linear(in_features, 2 * self.hidden_features, bias=bias)
        else:
            self.w1 = nn.Linear(in_features, self.hidden_features, bias=bias)
            self.w2 = nn.Linear(in_features, self.hidden_features, bias=bias)
        self.w3 = nn.Linear(self.hidden_features, self.out_features, bias=bias)
        self.op: SwiGLUOp | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        ignored("SwiGLU", op=self.op)
        halves = (self.w1(x), self.w2(x)) if self.w12 is None else self.w12(x).chunk(2, dim=-1)
        return cast(Tensor, self.w3(gated(*halves)))
