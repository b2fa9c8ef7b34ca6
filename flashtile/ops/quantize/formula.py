"""Quantise to float8 in plain PyTorch: Hadamard rotation, smoothing of K, scales, rounding, and the
layout of V that the tensor cores read.

Source: FlashAttention-3 (Shah et al. 2024), section 3.3; the smoothing of K is SageAttention's
(Zhang et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...operators import library, ops, register_fake
from ...problem import FLOAT8_KEY_BLOCK, FLOAT8_QUERY_BLOCK

E4M3 = torch.float8_e4m3fn

ROW_STEP = 16  # rows of float8 keys start at multiples of 16 bytes, as TMA requires


class Recipe(NamedTuple):
    """How q, k and v are quantised: the options of `quantize_qkv`."""

    scales: str = "block"
    hadamard: bool = True
    hadamard_v: bool = False
    smooth_k: bool = False
    seed: int = 0


class Quantized(NamedTuple):
    """Float8 tensors and their scales, for `flashtile.attention`.

    Attributes:
        q, k: float8_e4m3fn, with the shapes of the given tensors.
        v: likewise, but its keys are adjacent in memory, because the tensor cores read V so.
        q_descale: (batch, kv_heads) float32, or (batch, heads, blocks of 64 rows).
        k_descale, v_descale: (batch, kv_heads) float32, or (batch, kv_heads, blocks of 128 rows).
        k_mean: (batch, kv_heads, head_dim) float32, which was subtracted from k; None without
            smoothing.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    k_mean: Tensor | None


def quantize(
    q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, rows_q: Rows, rows_k: Rows
) -> Quantized:
    """`flashtile.quantize_qkv` for checked arguments, after any rotary embedding."""
    matrix = rotation(q.shape[-1], recipe.seed, q.device) if recipe.hadamard else None
    matrix_v = rotation(v.shape[-1], recipe.seed, v.device) if recipe.hadamard_v else None
    k_float, k_mean = k.float(), None
    if recipe.smooth_k:
        k_mean = means_of(k_float, rows_k)
        k_float = smoothed(k_float, k_mean, rows_k)
    kv_heads = k.shape[-2]
    q8, q_descale = scaled(rotated(q, matrix), rows_q, FLOAT8_QUERY_BLOCK, recipe, kv_heads)
    k8, k_descale = scaled(rotated(k_float, matrix), rows_k, FLOAT8_KEY_BLOCK, recipe, kv_heads)
    v8, v_descale = scaled(rotated(v, matrix_v), rows_k, FLOAT8_KEY_BLOCK, recipe, kv_heads)
    v8 = keys_adjacent_like(v8).copy_(v8)
    return Quantized(q8, k8, v8, q_descale, k_descale, v_descale, k_mean)


def rotated(x: Tensor, matrix: Tensor | None) -> Tensor:
    """`x` (..., head_dim) in float32, times `matrix`."""
    x = x.float()
    return x if matrix is None else x @ matrix


def means_of(k: Tensor, rows: Rows) -> Tensor:
    """The mean of each sequence of `k` (float32), (batch, kv_heads, head_dim)."""
    tokens = k.reshape(-1, *k.shape[-2:])
    usable = torch.where(tokens.isfinite(), tokens, 0.0)
    return per_block(usable, rows.sequence, rows.B, "mean")


def smoothed(k: Tensor, means: Tensor, rows: Rows) -> Tensor:
    """`k` minus the mean of its sequence."""
    tokens = k.reshape(-1, *k.shape[-2:])
    padded = torch.cat((means, means.new_zeros(1, *means.shape[1:])))
    return (tokens - padded[rows.sequence]).view(k.shape)


def scaled(
    x: Tensor, rows: Rows, block: int, recipe: Recipe, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """`x` (float32, dense or packed) in e4m3, and its scales."""
    tokens = x.reshape(-1, *x.shape[-2:])
    heads = tokens.shape[1]
    size = block if recipe.scales == "block" else max(rows.longest, 1)
    index, count = rows.blocks(size)
    magnitude = torch.where(tokens.isfinite(), tokens.abs(), 0.0).amax(-1)  # (tokens, heads)
    largest = per_block(magnitude, index, rows.B * count, "amax").view(rows.B, count, heads)
    largest = largest.transpose(1, 2)  # (B, heads, count)
    if recipe.scales != "block":
        largest = shared(largest, recipe, kv_heads)
    descale = power_of_two(largest / torch.finfo(E4M3).max)
    factors = token_factors(descale, rows, block, heads)
    numbers = torch.where(tokens.isfinite(), tokens / factors, torch.nan)
    return numbers.to(E4M3).view(x.shape), descale.contiguous()


def shared(magnitudes: Tensor, recipe: Recipe, kv_heads: int) -> Tensor:
    """Reduce the largest magnitudes of blocks (batch, heads, blocks) to (batch, kv_heads): those of
    each key head, or of the whole tensor.
    """
    of_heads = magnitudes.reshape(magnitudes.shape[0], kv_heads, -1)
    if of_heads.numel() == 0:
        return of_heads.new_zeros(of_heads.shape[:2])
    found = of_heads.amax(-1)
    return found.amax().expand(found.shape) if recipe.scales == "tensor" else found


def token_factors(descale: Tensor, rows: Rows, block: int, heads: int) -> Tensor:
    """The scale of every token, (tokens, heads, 1); 1 for tokens that belong to no sequence."""
    if descale.dim() == 2:
        index, factors = rows.sequence, descale
    else:
        index, _ = rows.blocks(block)
        factors = descale.transpose(1, 2).flatten(0, 1)
    factors = factors.repeat_interleave(heads // factors.shape[1], dim=1)
    return torch.cat((factors, factors.new_ones(1, heads)))[index][:, :, None]


def power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is at least `x`; 1 for 0."""
    mantissa, exponent = torch.frexp(x)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(min=-126)
    return torch.where(x > 0, torch.ldexp(torch.ones_like(x), exponent), 1.0)


def keys_adjacent_like(v: Tensor) -> Tensor:
    """An uninitialised float8 tensor of the shape of `v` (..., keys, heads, head_dim) whose keys
    are adjacent in memory."""
    *batch, N, heads, head_dim = v.shape
    rows = -(-N // ROW_STEP) * ROW_STEP
    memory = torch.empty(*batch, heads, head_dim, rows, dtype=E4M3, device=v.device)
    return memory[..., :N].movedim(-1, -3)


def dequantized(x: Tensor, descale: Tensor, rows: Rows, block: int, dtype: torch.dtype) -> Tensor:
    """Float8 `x` times its scales, in `dtype`."""
    tokens = x.float().reshape(-1, *x.shape[-2:])
    factors = token_factors(descale, rows, block, tokens.shape[1])
    return (tokens * factors).to(dtype).view(x.shape)


# The sequence and the block that every token belongs to, dense or packed.


@dataclass(frozen=True)
class Rows:
    """Tokens in memory order."""

    count: int  # tokens
    cu_seqlens: Tensor | None
    B: int
    longest: int
    device: torch.device

    @classmethod
    def of(cls, x: Tensor, cu_seqlens: Tensor | None, longest: int) -> Rows:
        """Rows of `x` (batch, longest, heads, head_dim), or packed (tokens, heads, head_dim)."""
        if cu_seqlens is None:
            return cls(x.shape[0] * longest, None, x.shape[0], longest, x.device)
        return cls(x.shape[0], cu_seqlens, cu_seqlens.shape[0] - 1, longest, x.device)

    @property
    def sequence(self) -> Tensor:
        """(tokens,) int64, the sequence of each token; B for a token of no sequence."""
        if self.cu_seqlens is None:
            return self._token // max(self.longest, 1)
        found = torch.searchsorted(self.cu_seqlens[1:].contiguous(), self._token, right=True)
        number = self._token - self.cu_seqlens.long()[found]
        return found.masked_fill(number >= self.longest, self.B)

    @property
    def number(self) -> Tensor:
        """(tokens,) int64, the index of each token in its sequence."""
        if self.cu_seqlens is None:
            return self._token % max(self.longest, 1)
        return self._token - self.cu_seqlens.long()[self.sequence]

    @property
    def _token(self) -> Tensor:
        return torch.arange(self.count, device=self.device)

    def blocks(self, size: int) -> tuple[Tensor, int]:
        """(index, count): the block of `size` rows that each token belongs to, counted over all
        sequences, and the number of blocks of a sequence. Tokens of no sequence belong to one
        additional last block.
        """
        count = -(-self.longest // size)
        sequence = self.sequence
        index = sequence * count + self.number // size
        return index.masked_fill(sequence == self.B, self.B * count), count


def per_block(x: Tensor, index: Tensor, blocks: int, how: str) -> Tensor:
    """Reduce rows of `x` (tokens, ...) by block: (blocks, ...). `how` is "mean", or "amax" for
    non-negative numbers.
    """
    found = x.new_zeros(blocks + 1, *x.shape[1:])  # the last block has the tokens of no sequence
    index = index.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    return found.scatter_reduce_(0, index, x, how, include_self=how == "amax")[:blocks]


# Incoherent processing. Rotating both Q and K does not change Q K^T, but an entry a hundred times
# larger than its neighbours becomes `head_dim` entries of similar size, so that a single number no
# longer determines the scale of a block (QuIP, Chee et al. 2023; FlashAttention-3, section 3.3).


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
