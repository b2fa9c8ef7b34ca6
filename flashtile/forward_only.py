"""Results without a backward, for calls that FlashAttention-3 can run but not train.

FlashAttention-3 runs float8 inputs and `qv` whether or not they require gradients; only its
backward fails. `flashtile.attention` refuses such a call on a GPU before it runs. The interface for
FlashAttention-3 uses this module instead, so that code written for it behaves as it does there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .problem import FLOAT8

# Largest head dim for which a GPU backend has a backward; with `qv`, the sum of both head dims.
WIDEST_WITH_GRADIENT = 512


class _ForwardOnly(torch.autograd.Function):
    """The identity on tensors, with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, reason: str, inputs: int, *tensors: Tensor) -> Any:
        ctx.reason = reason
        results = tuple(x.view_as(x) for x in tensors[inputs:])
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(ctx.reason)


def forward_only(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Callable[[Any], Any]]:
    """Return the inputs to use for the call, and a function to apply to its result.

    If the call requires a gradient that no GPU backend has, the inputs are detached, and the
    backward of the result raises NotImplementedError. Otherwise both are left unchanged.
    """
    inputs = [q, k, v] if qv is None else [q, k, v, qv]
    are_tensors = all(isinstance(x, Tensor) for x in inputs)  # the call itself rejects others
    requires_grad = torch.is_grad_enabled() and are_tensors and any(x.requires_grad for x in inputs)
    if not (requires_grad and _has_no_backward(q, qv)):
        return q, k, v, qv, lambda result: result
    what = "float8 inputs have" if q.dtype in FLOAT8 else "qv with this head dim has"
    reason = f"{what} no backward on a GPU; flashtile.attention refuses such a call before it runs"

    def attach(result: Any) -> Any:
        results = result if isinstance(result, tuple) else (result,)
        return _ForwardOnly.apply(reason, len(inputs), *inputs, *results)

    detached = [x.detach() for x in (q, k, v)]
    return *detached, None if qv is None else qv.detach(), attach  # type: ignore[return-value]  # a list has no fixed length


def _has_no_backward(q: Tensor, qv: Tensor | None) -> bool:
    is_wide = qv is not None and q.shape[-1] + qv.shape[-1] > WIDEST_WITH_GRADIENT
    return q.is_cuda and (q.dtype in FLOAT8 or is_wide)
