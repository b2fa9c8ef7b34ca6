"""Absorbed multi-head latent attention: scores that also read the values (DeepSeek-V2, 2.1.2).

``scale * (q k + qv v)`` is one product: q and qv concatenated, times k and v concatenated. So every
backend runs it as attention whose keys have head_dim + value_head_dim columns. If k and v are views
of one latent buffer, the keys are a view of that buffer and nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..autocast import without_autocast
from ..problem import Operands, starts_after


@without_autocast
def fold_qv(q: Tensor, k: Tensor, v: Tensor, qv: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys whose product is q k + qv v."""
    if _are_neighbours(v, k):  # DeepSeek's cache: values, then rotated keys
        return torch.cat((qv, q), dim=-1), _buffer(v, k)
    if _are_neighbours(k, v):
        return torch.cat((q, qv), dim=-1), _buffer(k, v)
    return torch.cat((q, qv), dim=-1), torch.cat((k, v), dim=-1)


def with_folded_qv(operands: Operands, qv: Tensor) -> Operands:
    """The operands of a call with `qv`."""
    q, k = fold_qv(operands.q, operands.k, operands.v, qv)
    return operands._replace(q=q, k=k)


def with_placeholders(operands: Operands, qv: Tensor) -> Operands:
    """Placeholders with the shapes, dtypes and devices of the results of `with_folded_qv`: enough
    to check a call and choose its backend before new keys are in the cache.
    """
    columns = operands.q.shape[-1] + qv.shape[-1]
    q, k = (x[..., :1].expand(*x.shape[:-1], columns) for x in (operands.q, operands.k))
    return operands._replace(q=q, k=k)


def _are_neighbours(left: Tensor, right: Tensor) -> bool:
    """Whether every row of `right` directly follows that of `left` in one buffer."""
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
        return False  # a view past the end of `left` has no gradient
    return left.stride(-1) == 1 and starts_after(left, right, left.shape[-1])


def _buffer(left: Tensor, right: Tensor) -> Tensor:
    """View the two neighbours as one tensor."""
    columns = left.shape[-1] + right.shape[-1]
    return left.as_strided((*left.shape[:-1], columns), left.stride())
