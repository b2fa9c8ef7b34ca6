"""ALiBi: a penalty on the distance between query and key instead of position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slope of each head, (num_heads,) float32.

    For n heads, n a power of two, a geometric sequence from ``2 ** (-8 / n)``. Other numbers of
    heads add slopes of the sequence for 2n heads (Press et al. 2021, "Train Short,
    Test Long", https://arxiv.org/abs/2108.12409, section 3 and the authors' code).
    """
    n = 2 ** (num_heads.bit_length() - 1)  # the largest power of two up to num_heads
    head = torch.arange(num_heads, device=device, dtype=torch.float64)
    exponent = torch.where(head < n, (head + 1) * 8 / n, (2 * (head - n) + 1) * 4 / n)
    return torch.exp2(-exponent).float()


def get_alibi_slopes(nheads: int) -> list[float]:
    """`alibi_slopes` as a list of floats, like flash-attn's function of this name."""
    return alibi_slopes(nheads).tolist()
