"""Lesson 5: the gradients, from O and L alone (Dao 2023, algorithm 2).

P is computed again, tile by tile, from Q, K and the log-sum-exp. A tile of keys stays in fast
memory with its dK and dV; dQ is added up in slow memory.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from .flash_attention_2 import INFINITY, forward


def backward(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, L: Tensor, dO: Tensor,
    causal: bool = False, B_r: int = 64, B_c: int = 64, visible: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dQ, dK, dV) of one head; the arguments are those and the results of `forward`."""
    (M, D), N = Q.shape, len(K)
    dQ, dK, dV = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
    delta = (dO * O).sum(1)
    L = L.masked_fill(L == -INFINITY, INFINITY)  # rows that see no key: P = exp(S - inf) = 0
    for j in range(0, N, B_c):
        cols = torch.arange(j, min(j + B_c, N))
        K_j, V_j = K[cols], V[cols]
        start = max(0, j + M - N) // B_r * B_r if causal else 0  # no tile above the diagonal
        for i in range(start, M, B_r):
            rows = torch.arange(i, min(i + B_r, M))
            if visible is not None and not visible[rows][:, cols].any():
                continue
            Q_i, dO_i = Q[rows], dO[rows]
            S = Q_i @ K_j.T / sqrt(D)
            if causal:
                S = S.masked_fill(cols > rows[:, None] + N - M, -INFINITY)
            if visible is not None:
                S = S.masked_fill(~visible[rows][:, cols], -INFINITY)
            P = torch.exp(S - L[rows, None])
            dV[cols] += P.T @ dO_i
            dP = dO_i @ V_j.T
            dS = P * (dP - delta[rows, None]) / sqrt(D)
            dQ[rows] += dS @ K_j
            dK[cols] += dS.T @ Q_i
    return dQ, dK, dV


class FlashAttention(torch.autograd.Function):
    """Both passes as one function that autograd can differentiate."""

    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, causal: bool) -> Tensor:
        O, L = forward(Q, K, V, causal)
        ctx.save_for_backward(Q, K, V, O, L)  # everything is linear in the length
        ctx.causal = causal
        return O

    @staticmethod
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        Q, K, V, O, L = ctx.saved_tensors
        return *backward(Q, K, V, O, L, dO, ctx.causal), None
