"""Lesson 4: FlashAttention-2 (Dao 2023, algorithm 1).

The loops have changed places: a tile of queries keeps its m, l and O in fast memory until it has
seen all keys, divides once at the end, and leaves one number for each row, the log-sum-exp L.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

INFINITY = float("inf")


def forward(
    Q: Tensor, K: Tensor, V: Tensor, causal: bool = False, B_r: int = 64, B_c: int = 64,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(O, L) of one head.

    Args:
        Q: (M, D); K: (N, D); V: (N, Dv).
        causal: query i sees the keys up to i + N - M: the last query sees all keys.
        B_r: queries of a tile.
        B_c: keys of a tile.
        visible: (M, N), False where another mask hides.
    """
    (M, D), N = Q.shape, len(K)
    O, L = Q.new_empty(M, V.shape[1]), Q.new_empty(M)
    for i in range(0, M, B_r):  # on a GPU, each i is a program of its own
        rows = torch.arange(i, min(i + B_r, M))
        Q_i = Q[rows]
        O_i = Q.new_zeros(len(rows), V.shape[1])
        l = Q.new_zeros(len(rows), 1)
        m = Q.new_full((len(rows), 1), -INFINITY)
        stop = min(N, int(rows[-1]) + N - M + 1) if causal else N  # no tile beyond the diagonal
        for j in range(0, stop, B_c):
            cols = torch.arange(j, min(j + B_c, N))
            if visible is not None and not visible[rows][:, cols].any():
                continue
            S = Q_i @ K[cols].T / sqrt(D)
            if causal:
                S = S.masked_fill(cols > rows[:, None] + N - M, -INFINITY)
            if visible is not None:
                S = S.masked_fill(~visible[rows][:, cols], -INFINITY)
            m_new = torch.maximum(m, S.amax(1, keepdim=True))
            pivot = m_new.masked_fill(m_new == -INFINITY, 0.0)  # a row that has seen no key yet
            P = torch.exp(S - pivot)
            rescale = torch.exp(m - pivot)
            l = rescale * l + P.sum(1, keepdim=True)
            O_i = rescale * O_i + P @ V[cols]
            m = m_new
        O[rows] = O_i / l.masked_fill(l == 0, 1.0)
        L[rows] = (m + torch.log(l)).squeeze(1)  # -inf for a row that sees no key
    return O, L
