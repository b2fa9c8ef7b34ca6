"""Merge partial attention results of the same queries over different keys, in plain PyTorch.

The merged output is the sum of the parts, weighted by ``exp(lse_part - lse)`` (FlashAttention-2,
section 3.1; flash-decoding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...autocast import without_autocast


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts.

    Args:
        out_a, out_b: (..., D), each normalised over its own keys.
        lse_a, lse_b: (...), natural log; -inf for a row that saw no key (its `out` must be finite).

    Returns:
        (out, lse) over the union of the keys; a row that neither part saw has out 0 and lse -inf.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    pivot = lse.masked_fill(lse == -torch.inf, 0.0)  # -inf - -inf would be NaN
    weight_a, weight_b = torch.exp(lse_a - pivot), torch.exp(lse_b - pivot)
    # 1, unless the log-sum-exps are so large that their sum is lost in rounding
    total = (weight_a + weight_b).masked_fill(lse == -torch.inf, 1.0)
    share_a, share_b = ((weight / total).unsqueeze(-1) for weight in (weight_a, weight_b))
    return out_a * share_a + out_b * share_b, lse


def merge_entropies(entropy_a: Tensor, lse_a: Tensor, entropy_b: Tensor, lse_b: Tensor) -> Tensor:
    """The entropies of rows over the keys of two parts, from the entropy and the log-sum-exp of
    each part, all (...): with the shares w of the parts, ``sum w (H - log w)``. 0 for a row that
    neither part saw.
    """
    lse = torch.stack((lse_a, lse_b))
    shares = torch.softmax(lse, 0).masked_fill((lse == -torch.inf).all(0), 0.0)
    return (shares * torch.stack((entropy_a, entropy_b)) + torch.special.entr(shares)).sum(0)


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Add a key of logit `sink` (broadcast to `lse`) and value zero to the softmax of (`out`,
    `lse`).
    """
    with_sink = torch.logaddexp(lse, sink)
    pivot = with_sink.masked_fill(with_sink == -torch.inf, 0.0)
    return out * torch.exp(lse - pivot).unsqueeze(-1), with_sink


@without_autocast
def merge_parts(
    out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Merge any number of parts.

    Args:
        out_partial: (splits, ..., D), floating; rows whose lse is -inf are ignored.
        lse_partial: (splits, ...), floating, natural log.
        dtype: dtype of the result.

    Returns:
        out (..., D) in `dtype` and lse (...); a row that no part saw has out 0 and lse -inf.
    """
    # Of parts that are all -inf, the gradient of `logsumexp` would be NaN.
    unseen = (lse_partial == -torch.inf).all(0)
    lse = torch.logsumexp(lse_partial.masked_fill(unseen, 0.0), dim=0)
    lse = lse.masked_fill(unseen, -torch.inf)
    pivot = lse.masked_fill(lse == -torch.inf, 0.0)
    weight = torch.exp(lse_partial - pivot).unsqueeze(-1)
    # A part that saw no key may hold NaN, and 0 times NaN would be NaN.
    parts = out_partial.to(lse.dtype).masked_fill(weight == 0, 0.0)
    # 1, unless the log-sum-exps are so large that their sum is lost in rounding
    total = weight.sum(0)
    return ((parts * weight).sum(0) / total.masked_fill(total == 0, 1.0)).to(dtype), lse
