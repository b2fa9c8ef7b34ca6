"""Copies of rows between a rank's tensors, its messages and the buffer of a call.

A copy takes as long as its bytes take to be read and written, if the GPU moves many of them in an
instruction. PyTorch joins tensors with gaps between their rows, such as some heads of all, one
element at a time; here elements are as wide as the rows allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .schedule import Rows

WORDS = (torch.complex128, torch.complex64, torch.int32)  # of 16, 8 and 4 bytes


class KeyWords(NamedTuple):
    """Keys and values (rows, heads, head_dim) as rows of words."""

    k: Tensor  # (rows, words)
    v: Tensor
    heads: int
    head_dims: tuple[int, int]
    dtype: torch.dtype  # of the numbers

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> KeyWords:
        """In the widest words that divide every head of both."""
        rows_k, rows_v = k.flatten(1), v.flatten(1)
        size, together = k.element_size(), 0
        for x, dim in ((rows_k, k.shape[2]), (rows_v, v.shape[2])):
            together |= (dim | x.stride(0) | int(x.storage_offset())) * size | x.data_ptr()
        words = [word for word in WORDS if word.itemsize > size and not together % word.itemsize]
        if words and k.numel() and v.numel():
            rows_k, rows_v = rows_k.view(words[0]), rows_v.view(words[0])
        return cls(rows_k, rows_v, k.shape[1], (k.shape[2], v.shape[2]), k.dtype)

    def of_heads(self, heads: slice) -> KeyWords:
        """Some of the heads."""
        k, v = (
            x[:, heads.start * width : heads.stop * width]
            for x, width in zip((self.k, self.v), self.widths, strict=True)
        )
        return self._replace(k=k, v=v, heads=heads.stop - heads.start)

    def numbers(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of words as keys and values."""
        dims = self.head_dims
        return (
            k.view(self.dtype).view(len(k), self.heads, dims[0]),
            v.view(self.dtype).view(len(v), self.heads, dims[1]),
        )

    def message(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for rows of both: all of it as numbers, and as the rows of the keys and, after
        them, of the values."""
        widths = self.k.shape[1], self.v.shape[1]
        count = rows * self.heads * sum(self.head_dims)
        numbers = self.k.new_empty(count, dtype=self.dtype)
        words, split = numbers.view(self.k.dtype), rows * widths[0]
        k, v = words[:split].view(rows, widths[0]), words[split:].view(rows, widths[1])
        return numbers, k, v

    @property
    def widths(self) -> tuple[int, int]:
        """Words of a head."""
        size = self.dtype.itemsize
        return (
            self.head_dims[0] * size // self.k.element_size(),
            self.head_dims[1] * size // self.v.element_size(),
        )


def join_rows(
    sources: Sequence[Tensor], pieces: Sequence[Rows], out: Tensor | None = None
) -> Tensor:
    """Rows of several tensors (rows, words), one after the other.

    Args:
        sources: by `Rows.source`; there is at least one.
        out: where to write them; None is new memory, or a view where they lie in one piece.
    """
    parts = [sources[source][start:stop] for source, start, stop in pieces]
    if out is not None:
        return torch.cat(parts, out=out)
    if len(parts) > 1:
        return torch.cat(parts)
    return parts[0] if parts else sources[0][:0]
