"""Norm of a sum of branches, with the names of ``flash_attn.ops.triton.layer_norm``::

    stream = dropout(x * rowscale) + dropout(x1) + residual
    y = norm(stream) * weight + bias
    y1 = norm(stream) * weight1 + bias1

Sums and norms are computed in float32 (float64 for float64) and rounded once. ``torch.compile``
fuses them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autocast import autocast_dtype


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """LayerNorm or RMSNorm of a sum: y, or a tuple of those of (y, y1, sum, mask, mask1) that were
    asked for.

    Args:
        x, x1: (..., features), the branches; with dropout each has its own mask.
        weight, bias, weight1, bias1: (features,); no second result without weight1.
        residual: (..., features), the stream, to which the branches are added.
        eps: added to the variance.
        dropout_p: dropout rate of the branches.
        rowscale: (...), factor on each row of x; ValueError with x1.
        prenorm: also return the sum, in the dtype of `residual`.
        residual_in_fp32: without `residual`, return the sum in float32.
        zero_centered_weight: the factors are ``1 + weight`` and ``1 + weight1``.
        is_rms_norm: divide by the root of the mean square, and subtract no mean.
        return_dropout_mask: also return the masks of x and x1, (..., features) bool, True where
            kept; None without dropout or without x1.
        out_dtype: dtype of the results; that of x by default.
        out, residual_out: tensors to write the first result and the sum to.
    """
    if x1 is not None and rowscale is not None:
        raise ValueError("rowscale: want None with x1")
    stream, mask = dropped(x, dropout_p, rowscale)
    mask1 = None
    if x1 is not None:
        branch, mask1 = dropped(x1, dropout_p)
        stream = stream + branch
    if residual is not None:
        stream = stream + residual
        stream_dtype = residual.dtype
    else:
        stream_dtype = torch.promote_types(x.dtype, torch.float32) if residual_in_fp32 else x.dtype
    results = []
    for factor, term in ((weight, bias), (weight1, bias1)):
        if factor is not None:
            factor = 1.0 + factor.to(stream.dtype) if zero_centered_weight else factor
            y = normed(stream, factor, term, eps, is_rms_norm)
            results.append(y.to(x.dtype if out_dtype is None else out_dtype))
    if out is not None:
        results[0] = out.copy_(results[0])
    if prenorm:
        total = stream.to(stream_dtype)
        results.append(total if residual_out is None else residual_out.copy_(total))
    if return_dropout_mask:
        results += [mask, mask1]  # type: ignore[list-item]  # None without dropout
    return results[0] if len(results) == 1 else tuple(results)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """`layer_norm_fn` with ``is_rms_norm=True``."""
    branches = (x, weight, bias, residual, x1, weight1, bias1)
    options = (eps, dropout_p, rowscale, prenorm, residual_in_fp32, zero_centered_weight, True)
    results = (return_dropout_mask, out_dtype, out, residual_out)
    return layer_norm_fn(*branches, *options, *results)


def dropped(x: Tensor, p: float, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """``dropout(x * scale)`` in float32, and the mask; `scale` has the shape of x without the last
    dimension."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if scale is not None:
        x = x * scale.view(x.shape[:-1]).unsqueeze(-1)
    if p == 0.0:
        return x, None
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1.0 - p)
    return x.masked_fill(~mask, 0.0) / ((1.0 - p) or 1.0), mask  # nothing is kept at p = 1


def normed(
    stream: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_rms_norm: bool
) -> Tensor:
    """The norm of `stream`, in its dtype."""
    weight, bias = weight.to(stream.dtype), None if bias is None else bias.to(stream.dtype)
    if not is_rms_norm:
        return F.layer_norm(stream, stream.shape[-1:], weight, bias, eps)
    y = F.rms_norm(stream, stream.shape[-1:], weight, eps)
    return y if bias is None else y + bias


def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    """A linear layer of `layer_norm_fn`, in the dtype of x or of autocast; with prenorm also the
    sum.
    """
    options: dict[str, Any] = {"residual_in_fp32": residual_in_fp32, "is_rms_norm": is_rms_norm}
    options |= {"eps": eps, "out_dtype": autocast_dtype(x)}
    y, total = layer_norm_fn(x, norm_weight, norm_bias, residual, prenorm=True, **options)
    linear_bias = None if linear_bias is None else linear_bias.to(y.dtype)
    result = F.linear(y, linear_weight.to(y.dtype), linear_bias)
    return (result, total) if prenorm else result


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x ** 2) + eps) * weight`` of a sum, computed in float32.

    Args:
        hidden_size: number of features.
        eps: added to the mean square.
        dropout_p: dropout rate of x in training mode.
        zero_centered_weight: the factor is ``1 + weight``.
        device, dtype: of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.zero_centered_weight = zero_centered_weight
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all factors to 1."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """`rms_norm_fn` of x (..., hidden_size)."""
        options: dict[str, Any] = {"prenorm": prenorm, "residual_in_fp32": residual_in_fp32}
        options |= {"eps": self.eps, "zero_centered_weight": self.zero_centered_weight}
        if self.drop is not None and self.training:
            options["dropout_p"] = self.drop.p
        return rms_norm_fn(x, self.weight, None, residual, **options)
