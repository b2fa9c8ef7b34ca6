"""The indices of a segment's sequences, heads, queries and keys in the whole call.

A rank of context parallelism has only a part of that call, but dropout and score functions use the
indices of the whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...masks import Visibility
from ...problem import Operands, Options
from .segments import KeyRun, Segment


class Indices(NamedTuple):
    """The indices of a segment's sequences and heads, and the positions of its rows."""

    batch: Tensor  # (batch,)
    heads: Tensor  # (heads,)
    visibility: Visibility
    shift: int  # position of a query minus its index

    @classmethod
    def of(cls, operands: Operands, options: Options, segment: Segment) -> Indices:
        """The indices of a segment."""
        batch, heads = segment.batch, segment.heads
        visibility = segment.mask.visibility
        found = cls(
            torch.arange(batch.start, batch.stop),
            torch.arange(heads.start, heads.stop) + options.first_head,
            visibility,
            visibility.N - visibility.M,
        )
        if operands.sequences is None:
            return found
        number, shift = operands.sequences[batch.start].tolist()
        return found._replace(batch=torch.tensor([number]), shift=shift)

    def queries(self, m0: int, m1: int) -> Tensor:
        """The indices of the query rows ``[m0, m1)``."""
        return self.visibility.row_positions(m0, m1) - self.shift

    def keys(self, run: KeyRun) -> Tensor:
        """The indices of the keys of a run."""
        return self.visibility.key_positions(run.start, run.stop)
