"""The reference's sums in another order: the same result but for its roundings.

The error of one float32 sum is a matter of luck, so plain PyTorch is measured in several orders
(see `tolerance.py`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


class Order(NamedTuple):
    """The order of query rows, keys and the two head dims: int64 permutations."""

    m: Tensor
    n: Tensor
    d: Tensor
    dv: Tensor

    @classmethod
    def make(cls, M: int, N: int, D: int, Dv: int, shuffle: torch.Generator | None) -> Order:
        """As they come, or drawn from `shuffle`."""
        if shuffle is None:
            return cls(*(torch.arange(size) for size in (M, N, D, Dv)))
        return cls(*(torch.randperm(size, generator=shuffle) for size in (M, N, D, Dv)))

    def inverse(self) -> Order:
        return Order(*(x.argsort() for x in self))

    def matrix(self, x: Tensor, M: int, N: int) -> Tensor:
        """x, which broadcasts to (..., M, N), in this order."""
        return x.expand(*x.shape[:-2], M, N)[..., self.m[:, None], self.n]


def softmax_product(
    scores: Tensor,
    again: Tensor | None,
    v: Tensor,
    factor: Tensor,
    stored: torch.dtype | None,
    weights: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and probabilities; rows that see nothing give 0, -inf, 0 and zero gradients."""
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(dead, 0)
    if again is None:
        probs = used = scores.softmax(-1)
        if weights is not None:
            unit = probs.amax(-1, keepdim=True) / 256
            used = (probs / unit).float().to(weights).to(probs.dtype) * unit
        out = torch.einsum("bhmn,bnhd->bmhd", used * factor, v)
        lse = scores.logsumexp(-1)
    else:
        out, lse = _Recomputed.apply(scores, again.masked_fill(dead, 0), v, factor, stored)
        probs = torch.exp(scores - lse[..., None])
    out = out.masked_fill(dead.transpose(1, 2), 0)
    return out, lse.masked_fill(dead[..., 0], -torch.inf), probs.masked_fill(dead, 0)


class _Recomputed(torch.autograd.Function):
    """softmax(S) V with the gradient of FlashAttention-2, section 2.3.2, on the whole matrix.

    The forward has the scores as `S_forward`, the backward as `S`: equal but for roundings. The
    exponentials are powers of two, as in every fast kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, S: Tensor, S_forward: Tensor, V: Tensor, factor: Tensor, stored: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        L = S_forward.logsumexp(-1, keepdim=True)
        P = torch.exp2((S_forward - L) * LOG2_E)
        out = torch.einsum("bhmn,bnhd->bmhd", P * factor, V)
        ctx.save_for_backward(S, V, factor, L, out.to(stored).to(out.dtype))
        return out, L[..., 0]

    @staticmethod
    def backward(ctx: Any, dO: Tensor, dL: Tensor) -> tuple[Tensor | None, ...]:
        S, V, factor, L, out = ctx.saved_tensors
        P = torch.exp2((S - L) * LOG2_E)
        # A running sum from the other end: kernels do not add up delta in the order of dP either.
        delta = (dO * out).flip(-1).cumsum(-1)[..., -1].transpose(1, 2) - dL
        dV = torch.einsum("bhmn,bmhd->bnhd", P * factor, dO)
        dP = torch.einsum("bmhd,bnhd->bhmn", dO, V) * factor
        return P * (dP - delta[..., None]), None, dV, None, None
