"""Copies of rows between a rank's tensors, its messages and the buffer of a call.

A copy takes as long as its bytes take to be read and written, if the GPU moves many of them in an
instruction. PyTorch joins tensors with gaps between their rows, such as some heads of all, one
element at a time; here elements are as wide as the rows allow. Keys and values of equal width are
copied by one kernel, since a launch may take longer than the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..positions import Span
from .schedule import Rows

WORDS = (torch.complex128, torch.complex64, torch.int32)  # of 16, 8 and 4 bytes


def _adjacent(x: Tensor) -> Tensor:
    """The rows of (rows, heads, head_dim); a copy if their numbers do not follow each other."""
    x = x.resolve_neg().flatten(1)
    return x if x.stride(1) == 1 else x.contiguous()


class KeyRows(NamedTuple):
    """Keys and values as rows of words."""

    k: Tensor  # (rows, words)
    v: Tensor

    def pieces(self, spans: Sequence[Span]) -> tuple[list[Tensor], list[Tensor]]:
        """Some of the rows."""
        return [self.k[a:b] for a, b in spans], [self.v[a:b] for a, b in spans]


class KeyWords(NamedTuple):
    """The keys and values (rows, heads, head_dim) that `rows` holds."""

    rows: KeyRows
    heads: int
    head_dims: tuple[int, int]
    dtype: torch.dtype  # of the numbers

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> KeyWords:
        """In the widest words that divide every head of both."""
        rows_k, rows_v = _adjacent(k), _adjacent(v)
        size, together = k.element_size(), 0
        for x, dim in ((rows_k, k.shape[2]), (rows_v, v.shape[2])):
            together |= (dim | x.stride(0) | int(x.storage_offset())) * size | x.data_ptr()
        words = [word for word in WORDS if word.itemsize > size and not together % word.itemsize]
        if words and k.numel() and v.numel():
            rows_k, rows_v = rows_k.view(words[0]), rows_v.view(words[0])
        return cls(KeyRows(rows_k, rows_v), k.shape[1], (k.shape[2], v.shape[2]), k.dtype)

    def of_heads(self, heads: slice) -> KeyWords:
        """Some of the heads."""
        count = heads.stop - heads.start
        if count == self.heads:
            return self
        parts = (
            x[:, heads.start * width : heads.stop * width]
            for x, width in zip(self.rows, self._words_of_head(), strict=True)
        )
        return self._replace(rows=KeyRows(*parts), heads=count)

    def _words_of_head(self) -> list[int]:
        size = self.rows.k.element_size()
        return [dim * self.dtype.itemsize // size for dim in self.head_dims]

    def numbers(self, rows: KeyRows) -> tuple[Tensor, Tensor]:
        """Rows of words as keys and values."""
        k, v = (
            x.view(self.dtype).view(x.shape[0], self.heads, dim)
            for x, dim in zip(rows, self.head_dims, strict=True)
        )
        return k, v

    def message(self, spans: Sequence[Span]) -> Tensor:
        """Some of the rows, as numbers: those of the keys, and then those of the values."""
        return self._joined(*self.rows.pieces(spans)).view(self.dtype)

    def buffer(self, sources: Sequence[KeyRows], order: Sequence[Rows]) -> KeyRows:
        """Rows of several sources, one after the other: new memory, or a view where they lie in
        one piece."""
        if not order:
            return KeyRows(self.rows.k[:0], self.rows.v[:0])
        k = [sources[source].k[start:stop] for source, start, stop in order]
        v = [sources[source].v[start:stop] for source, start, stop in order]
        if len(order) == 1:
            return KeyRows(k[0], v[0])
        return self.split(self._joined(k, v), sum(stop - start for _, start, stop in order))

    def empty(self, rows: int) -> Tensor:
        """Memory for a message of so many rows, as numbers."""
        count = rows * self.heads * sum(self.head_dims)
        return self.rows.k.new_empty(count, dtype=self.dtype)

    def split(self, whole: Tensor, rows: int) -> KeyRows:
        """A message of so many rows, as numbers or as words."""
        words = whole.view(self.rows.k.dtype)
        if self._widths_are_equal:
            return KeyRows(*words.view(2, rows, self.rows.k.shape[1]).unbind())
        end = rows * self.rows.k.shape[1]
        return KeyRows(
            words[:end].view(rows, self.rows.k.shape[1]),
            words[end:].view(rows, self.rows.v.shape[1]),
        )

    @property
    def _widths_are_equal(self) -> bool:
        return self.rows.k.shape[1] == self.rows.v.shape[1]

    def _joined(self, k: list[Tensor], v: list[Tensor]) -> Tensor:
        """Pieces of the keys and then those of the values, without gaps, as words or numbers."""
        if self._widths_are_equal:
            return torch.cat(k + v).view(-1)
        rows = sum(x.shape[0] for x in k)
        whole = self.empty(rows)
        for pieces, out in zip((k, v), self.split(whole, rows), strict=True):
            torch.cat(pieces, out=out)
        return whole
