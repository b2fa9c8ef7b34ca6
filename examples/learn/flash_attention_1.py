"""Lesson 3: FlashAttention as in the first paper (Dao et al. 2022, algorithm 1).

The outer loop goes over tiles of keys, the inner loop over tiles of queries. O is always a finished
average of the keys so far, so each tile divides by the row sum and multiplies by it again.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, sqrt

import torch
from torch import Tensor

INFINITY = float("inf")


def block_sizes(fast_memory: int, D: int) -> tuple[int, int]:
    """(rows of Q, rows of K) of a tile for `fast_memory` numbers of on-chip memory, so that Q_i,
    K_j, V_j and O_i take about a quarter each (algorithm 1, line 1).
    """
    B_c = ceil(fast_memory / (4 * D))
    return min(B_c, D), B_c


def attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    fast_memory: int = 32 * 1024,
    visible: Tensor | None = None,
    is_kept: Callable[[int, int], bool] = lambda i, j: True,
) -> Tensor:
    """Attention of one head.

    Args:
        Q: (M, D); K: (N, D); V: (N, Dv).
        fast_memory: numbers that fit the on-chip memory; 32,768 of float32 are 128 KiB.
        visible: (N,), False for padding, or (M, N), False where a mask hides.
        is_kept: whether the mask keeps tile (i, j); others are skipped (algorithm 5, block-sparse).
    """
    (M, D), N = Q.shape, len(K)
    B_r, B_c = block_sizes(fast_memory, D)
    visible = None if visible is None else visible.expand(M, N)
    O = Q.new_zeros(M, V.shape[1])  # these three are in slow memory
    l = Q.new_zeros(M, 1)
    m = Q.new_full((M, 1), -INFINITY)
    for j in range(ceil(N / B_c)):
        cols = slice(j * B_c, (j + 1) * B_c)
        K_j, V_j = K[cols], V[cols]
        for i in range(ceil(M / B_r)):
            if not is_kept(i, j):
                continue
            rows = slice(i * B_r, (i + 1) * B_r)
            S = Q[rows] @ K_j.T / sqrt(D)
            if visible is not None:
                S = S.masked_fill(~visible[rows, cols], -INFINITY)
            m_tile = S.amax(1, keepdim=True)
            m_new = torch.maximum(m[rows], m_tile)
            pivot = m_new.masked_fill(m_new == -INFINITY, 0.0)  # a row that has seen no key yet
            P = torch.exp(S - pivot)
            rescale = torch.exp(m[rows] - pivot)
            l_new = rescale * l[rows] + P.sum(1, keepdim=True)
            divisor = l_new.masked_fill(l_new == 0, 1.0)
            O[rows] = (l[rows] * rescale * O[rows] + P @ V_j) / divisor
            l[rows], m[rows] = l_new, m_new
    return O
