"""Lesson 1: standard attention, each step from memory to memory."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

INFINITY = float("inf")


def attention(Q: Tensor, K: Tensor, V: Tensor, visible: Tensor | None = None) -> Tensor:
    """Attention of one head: Q (M, D), K (N, D), V (N, Dv); `visible` (M, N), False where a mask
    hides.
    """
    S = Q @ K.T / sqrt(Q.shape[1])
    if visible is not None:
        S = S.masked_fill(~visible, -INFINITY)
    m = S.amax(1, keepdim=True)
    P = torch.exp(S - m.masked_fill(m == -INFINITY, 0.0))
    l = P.sum(1, keepdim=True)
    P = P / l.masked_fill(l == 0, 1.0)
    O = P @ V
    return O
