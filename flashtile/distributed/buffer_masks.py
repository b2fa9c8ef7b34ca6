"""Masks that count keys in the whole document, for a call whose keys are the rows of a buffer.

The rows of a sequence in a buffer are sorted by position. Its rows inside an interval of positions
are therefore an interval, too, whatever keys the buffer lacks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..positions import Positions


def rows_before(ends: Tensor, queries: Sequence[Positions], keys: Sequence[Positions]) -> Tensor:
    """Ends of intervals of keys as rows of the buffer.

    Args:
        ends: (1, heads or 1, tokens, intervals) int32, numbers of keys in their document.
        queries: of every sequence, one after the other in `ends`.
        keys: of the same sequences in the buffer.

    Returns:
        For each end, how many rows of its sequence stand before it.
    """
    ends = ends.clamp(min=0)  # so that no difference overflows
    sequences = ends.split([positions.length for positions in queries], dim=2)
    rows = [torch.zeros_like(x) for x in sequences]
    for total, x, positions in zip(rows, sequences, keys, strict=True):
        for run in positions.runs:
            total += (x - run.position).clamp(0, run.length)
    return torch.cat(rows, dim=2) if rows else ends
