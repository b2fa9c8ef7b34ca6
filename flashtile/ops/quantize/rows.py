"""The sequence and the block that every token belongs to, dense or packed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
