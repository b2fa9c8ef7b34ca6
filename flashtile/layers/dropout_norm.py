"""Dropout, addition and norm, with the names of ``flash_attn.ops.layer_norm`` and
``flash_attn.ops.rms_norm``.

They are `norm.layer_norm_fn` with other arguments: a factor for each feature, rows that are left
out, and masks in uint8. RMSNorm is the same function as LayerNorm with ``is_rms_norm=True``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import norm
from .norm import dropped, layer_norm_fn, normed


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm of x (..., features), in its dtype."""
    return layer_norm_fn(x, weight, bias, eps=epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of x (..., features), in its dtype."""
    return layer_norm_fn(x, weight, None, eps=epsilon, is_rms_norm=True)


def dropout_add_layer_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
    *,
    is_rms_norm: bool = False,
) -> Any:
    """``norm(dropout(x0 * rowscale) * layerscale + residual)`` in the dtype of x0, or a tuple of
    it, the sum and the mask.

    Args:
        x0, residual: (..., features).
        weight, bias, layerscale: (features,).
        rowscale: (...), factor on each row of x0.
        prenorm: also return the sum, in the dtype of `residual`.
        residual_in_fp32: without `residual`, return the sum in float32.
        return_dropout_mask: also return the mask, (..., features) uint8, 1 where kept.
        is_rms_norm: RMSNorm instead of LayerNorm.
    """
    branch, mask = dropped(x0, dropout_p, rowscale)
    stream = branch if layerscale is None else branch * layerscale
    stream = stream if residual is None else stream + residual
    y = normed(stream, weight, bias, epsilon, is_rms_norm).to(x0.dtype)
    total = stream.to(_stream_dtype(x0, residual, residual_in_fp32)) if prenorm else None
    return _asked((y,), total, (_as_bytes(mask, x0),) if return_dropout_mask else ())


def dropout_add_layer_norm_subset(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    layerscale: Tensor | None = None,
    x0_subset: Tensor | None = None,
    out_subset: Tensor | None = None,
    rowscale_const: float = 1.0,
    out_numrows: int = 0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
    *,
    is_rms_norm: bool = False,
) -> Any:
    """`dropout_add_layer_norm` of the rows that stochastic depth keeps; results (-1, ...,
    features), the mask in the shape of x0.

    Args:
        x0: (kept batch, ..., features), without the rows that were dropped.
        x0_subset: (rows,) integers: the row of x0 that is added to each row of the sum, counted
            from 1; 0 for none.
        out_subset: (rows,) integers: the row of the result to which each row of the sum goes,
            counted from 1; 0 for none.
        rowscale_const: factor on x0.
        out_numrows: rows of the result, if out_subset is given.
    """
    shape = (-1, *x0.shape[1:])
    branch, mask = dropped(x0, dropout_p)
    branch = branch * rowscale_const
    branch = branch if layerscale is None else branch * layerscale
    stream = branch.flatten(0, -2)
    if x0_subset is not None:
        stream = F.pad(stream, (0, 0, 1, 0))[x0_subset.flatten().long()]
    stream = stream if residual is None else stream + residual.flatten(0, -2)
    y = normed(stream, weight, bias, epsilon, is_rms_norm).to(x0.dtype)
    if out_subset is not None:  # row 0 takes what is left out
        rows = y.new_zeros(out_numrows + 1, y.shape[-1])
        y = rows.index_copy(0, out_subset.flatten().long(), y)[1:]
    total = stream.to(_stream_dtype(x0, residual, residual_in_fp32)).view(shape)
    masks = (_as_bytes(mask, x0),) if return_dropout_mask else ()
    return _asked((y.view(shape),), total if prenorm else None, masks)


def dropout_add_layer_norm_parallel_residual(
    x0: Tensor,
    x1: Tensor | None,
    residual: Tensor | None,
    weight0: Tensor,
    bias0: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
    *,
    is_rms_norm: bool = False,
) -> tuple[Tensor | None, ...]:
    """Two norms of ``dropout(x0) + dropout(x1) + residual``, as `norm.layer_norm_fn`: (y0, y1),
    then the sum with prenorm, then two masks with return_dropout_mask; y1 is None without weight1.
    """
    terms = (x0, weight0, bias0, residual, x1, weight1, bias1)
    options: dict[str, Any] = {"residual_in_fp32": residual_in_fp32, "is_rms_norm": is_rms_norm}
    options |= {"prenorm": True, "return_dropout_mask": True}
    *ys, total, mask0, mask1 = layer_norm_fn(*terms, epsilon, dropout_p, **options)
    masks = (_as_bytes(mask0, x0), _as_bytes(mask1, x0)) if return_dropout_mask else ()
    return _asked((*ys, None)[:2], total if prenorm else None, masks)


def _stream_dtype(x0: Tensor, residual: Tensor | None, in_fp32: bool) -> torch.dtype:
    if residual is not None:
        return residual.dtype
    return torch.promote_types(x0.dtype, torch.float32) if in_fp32 else x0.dtype


def _as_bytes(mask: Tensor | None, x0: Tensor) -> Tensor:
    return torch.ones_like(x0, dtype=torch.uint8) if mask is None else mask.to(torch.uint8)


def _asked(ys: tuple[Any, ...], total: Tensor | None, masks: tuple[Tensor, ...]) -> Any:
    """The results that are asked for; one alone is no tuple."""
    results = (*ys, *(() if total is None else (total,)), *masks)
    return results[0] if len(results) == 1 else results


dropout_add_rms_norm = partial(dropout_add_layer_norm, is_rms_norm=True)
dropout_add_rms_norm_subset = partial(dropout_add_layer_norm_subset, is_rms_norm=True)
dropout_add_rms_norm_parallel_residual = partial(
    dropout_add_layer_norm_parallel_residual, is_rms_norm=True
)


class RMSNorm(norm.RMSNorm):
    """`norm.RMSNorm` without dropout, whose third argument is the device."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, device=device, dtype=dtype)


class DropoutAddLayerNorm(nn.Module):
    """``norm(dropout(x0) + residual)``

    Args:
        hidden_size: number of features.
        prenorm: also return the sum.
        p: dropout rate in training mode.
        eps: added to the variance.
        residual_in_fp32: without `residual`, return the sum in float32.
        device, dtype: of the parameters.
    """

    is_rms_norm = False
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.prenorm = prenorm
        self.p = p
        self.eps = eps
        self.residual_in_fp32 = residual_in_fp32
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        bias = None if self.is_rms_norm else nn.Parameter(torch.empty_like(self.weight))
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the factors to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Any:
        """`dropout_add_layer_norm` of x0 (..., hidden_size)."""
        p = self.p if self.training else 0.0
        options: dict[str, Any] = {"prenorm": self.prenorm, "is_rms_norm": self.is_rms_norm}
        options["residual_in_fp32"] = self.residual_in_fp32
        terms = (x0, residual, self.weight, self.bias)
        return dropout_add_layer_norm(*terms, p, self.eps, **options)


class DropoutAddRMSNorm(DropoutAddLayerNorm):
    """`DropoutAddLayerNorm` with RMSNorm, without bias."""

    is_rms_norm = True
