"""A layout of shared memory that is linear over bits, for the emulator."""

from __future__ import annotations

import torch
from torch import Tensor


class LinearLayout:
    """gl.SharedLinearLayout: where bit i of an offset leads."""

    def __init__(self, bases: list[list[int]]) -> None:
        self.bases = bases

    def offsets(self, shape: list[int]) -> Tensor:
        """The offset of every element."""
        offsets = torch.arange(2 ** len(self.bases))
        rows, columns = torch.zeros_like(offsets), torch.zeros_like(offsets)
        for bit, (row, column) in enumerate(self.bases):
            on = offsets >> bit & 1
            rows, columns = rows ^ on * row, columns ^ on * column
        found = torch.full((shape[0] * shape[1],), -1)
        found[rows * shape[1] + columns] = offsets
        assert (found >= 0).all(), "the layout misses elements"
        return found
