"""Joining partial attention results that saw different keys of the same queries.

Each part carries its log-sum-exp, so the joined output is the parts' mean weighted by
``exp(lse_part - lse)`` (FlashAttention-2, section 3.1; flash-decoding). Split-KV decoding, native
tiles and ring attention all merge here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...autocast import without_autocast

library = torch.library.Library("flashtile", "FRAGMENT")
library.define(
    "combine(Tensor out_partial, Tensor lse_partial, ScalarType dtype) -> (Tensor, Tensor)"
)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join two parts.

    Args:
        out_a, out_b: (..., D), each normalised over its own keys.
        lse_a, lse_b: (...), natural log; -inf for a row that saw no key (its `out` must be finite).

    Returns:
        (out, lse) over the union of the keys; a row that neither part saw has out 0 and lse -inf.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    pivot = lse.masked_fill(lse == -torch.inf, 0.0)  # -inf - -inf would be NaN
    weight_a = torch.exp(lse_a - pivot).unsqueeze(-1)
    weight_b = torch.exp(lse_b - pivot).unsqueeze(-1)
    return out_a * weight_a + out_b * weight_b, lse


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Add a key of logit `sink` (broadcast to `lse`) and value zero to the softmax of (`out`,
    `lse`).
    """
    with_sink = torch.logaddexp(lse, sink)
    pivot = with_sink.masked_fill(with_sink == -torch.inf, 0.0)
    return out * torch.exp(lse - pivot).unsqueeze(-1), with_sink


def join_parts(
    out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Join any number of parts: (splits, ..., D) and (splits, ...) floating, to out in `dtype`.

    A row that no part saw has out 0 and lse -inf; what a part's `out` holds there does not matter.
    """
    # The op is for GPUs, where a kernel reads each part once; it records no gradient.
    has_gradient = torch.is_grad_enabled() and (
        out_partial.requires_grad or lse_partial.requires_grad
    )
    by_op = out_partial.is_cuda and lse_partial.dtype == torch.float32 and not has_gradient
    by_op = by_op and torch.float64 not in (out_partial.dtype, dtype)
    combine = torch.ops.flashtile.combine if by_op else _combine
    joined: tuple[Tensor, Tensor] = combine(out_partial, lse_partial, dtype)
    return joined


@without_autocast
def _combine(out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(lse_partial, dim=0)
    pivot = lse.masked_fill(lse == -torch.inf, 0.0)
    weight = torch.exp(lse_partial - pivot).unsqueeze(-1)
    # A split that saw nothing may carry anything in its out: weight 0 must win even over NaN.
    parts = out_partial.to(lse.dtype).masked_fill(weight == 0, 0.0)
    return (parts * weight).sum(0).to(dtype), lse


def _fake_combine(
    out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    out = out_partial.new_empty(out_partial.shape[1:], dtype=dtype)
    return out, lse_partial.new_empty(lse_partial.shape[1:])


library.impl("combine", _combine, "CompositeExplicitAutograd")  # where no backend has a kernel
torch.library.register_fake("flashtile::combine", _fake_combine, lib=library)
