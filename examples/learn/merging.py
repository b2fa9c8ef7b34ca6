"""Results over different keys merge by their log-sum-exps (lesson 4): the keys of a long cache are
divided among programs, or a sequence among GPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .flash_attention_2 import INFINITY, forward


def merge(O_a: Tensor, L_a: Tensor, O_b: Tensor, L_b: Tensor) -> tuple[Tensor, Tensor]:
    """(O, L) over the keys of both; O (M, Dv), L (M,), -inf for a row that has seen no key."""
    L = torch.logaddexp(L_a, L_b)
    pivot = L.masked_fill(L == -INFINITY, 0.0)
    O = torch.exp(L_a - pivot)[:, None] * O_a + torch.exp(L_b - pivot)[:, None] * O_b
    return O, L


def split_kv(Q: Tensor, K: Tensor, V: Tensor, visible: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """(O, L) from parts of `keys` keys, as flash-decoding computes them; `visible` is (M, N)."""
    parts = []
    for j in range(0, len(K), keys):  # on a GPU, each part is a program of its own
        cols = torch.arange(j, min(j + keys, len(K)))
        O_j, L_j = forward(Q, K[cols], V[cols], visible=visible[:, cols])
        parts.append((O_j, L_j))
    O, L = parts[0]
    for O_j, L_j in parts[1:]:  # another kernel
        O, L = merge(O, L, O_j, L_j)
    return O, L


def ring(Q: Tensor, K: Tensor, V: Tensor, visible: Tensor, ranks: int = 4) -> tuple[Tensor, Tensor]:
    """(O, L) as a ring of GPUs computes them (Liu et al. 2023); `visible` is (M, N)."""
    queries, keys = (torch.arange(len(x)).tensor_split(ranks) for x in (Q, K))
    O, L = Q.new_zeros(len(Q), V.shape[1]), Q.new_full((len(Q),), -INFINITY)
    for step in range(ranks):
        for rank in range(ranks):  # all of them at the same time
            rows, cols = queries[rank], keys[(rank - step) % ranks]
            K_j, V_j = K[cols], V[cols]  # from the rank before, except in the first step
            seen = visible[rows][:, cols]
            if seen.any():
                O_j, L_j = forward(Q[rows], K_j, V_j, visible=seen)
                O[rows], L[rows] = merge(O[rows], L[rows], O_j, L_j)
    return O, L
