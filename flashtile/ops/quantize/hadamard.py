"""Incoherent processing: a random rotation that spreads outliers over the head dim.

Rotating both Q and K does not change ``Q K^T``, but an entry a hundred times larger than its
neighbours becomes ``head_dim`` entries of similar size, so that a single number no longer
determines the scale of a block (QuIP, Chee et al. 2023; FlashAttention-3, Shah et al. 2024, section
3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...operators import library, ops, register_fake


def rotation(head_dim: int, seed: int = 0, device: torch.device | str | None = None) -> Tensor:
    """Random signs times a Hadamard matrix: an orthogonal matrix to multiply rows by.

    If the head dim is not a power of two, the matrix is block-diagonal: the blocks are Hadamard
    matrices of the largest power of two that divides it. 96 has three blocks of 32.

    Args:
        head_dim: size of the matrix.
        seed: determines the signs, the same on every machine.
        device: device of the result.

    Returns:
        (head_dim, head_dim) float32. All nonzero entries have the same magnitude.
    """
    if torch.compiler.is_compiling():  # whose graphs make no generators
        matrix: Tensor = ops.rotation(head_dim, seed, device or torch.device("cpu"))
        return matrix
    return _rotation(head_dim, seed, device)


def _rotation(head_dim: int, seed: int, device: torch.device | str | None) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (head_dim,), generator=g, device="cpu").to(torch.float32) * 2 - 1
    power = head_dim & -head_dim
    block = hadamard(power) * power**-0.5
    whole = torch.block_diag(*[block] * (head_dim // power))
    return (signs[:, None] * whole).to(device)


def hadamard(size: int) -> Tensor:
    """Sylvester's Hadamard matrix; `size` is a power of two, the entries are 1 and -1."""
    matrix = torch.ones(1, 1, device="cpu")
    twice = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device="cpu")
    while matrix.shape[0] < size:
        matrix = torch.kron(twice, matrix)
    return matrix


def _fake_rotation(head_dim: int, seed: int, device: torch.device) -> Tensor:
    return torch.empty(head_dim, head_dim, device=device)


library.define("rotation(SymInt head_dim, int seed, Device device) -> Tensor")
library.impl("rotation", _rotation, "CompositeExplicitAutograd")
register_fake("rotation", _fake_rotation)
