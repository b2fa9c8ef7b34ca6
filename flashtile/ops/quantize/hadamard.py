"""Incoherent processing: a random rotation that spreads outliers over the head dim.

A rotation of both Q and K leaves ``Q K^T`` as it is, but an entry a hundred times larger than its
neighbours becomes ``head_dim`` entries of like size, so that the scale of a block is no longer
decided by one number (QuIP, Chee et al. 2023; FlashAttention-3, Shah et al. 2024, section 3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(head_dim: int, seed: int = 0, device: torch.device | str | None = None) -> Tensor:
    """Random signs times a Hadamard matrix: an orthogonal matrix to multiply rows with.

    A head dim that is no power of two has Hadamard matrices of its largest factor that is one
    along the diagonal: 96 is three blocks of 32.

    Args:
        head_dim: size of the matrix.
        seed: decides the signs, the same on every machine.
        device: where to put it.

    Returns:
        (head_dim, head_dim) float32. Its entries are 0 or plus or minus one number.
    """
    g = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (head_dim,), generator=g, device="cpu").to(torch.float32) * 2 - 1
    power = head_dim & -head_dim
    block = hadamard(power) * power**-0.5
    whole = torch.block_diag(*[block] * (head_dim // power))
    return (signs[:, None] * whole).to(device)


def hadamard(size: int) -> Tensor:
    """Sylvester's Hadamard matrix of a power of two, entries plus or minus 1."""
    matrix = torch.ones(1, 1, device="cpu")
    twice = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device="cpu")
    while matrix.shape[0] < size:
        matrix = torch.kron(twice, matrix)
    return matrix
