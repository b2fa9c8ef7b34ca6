"""Masks as spans: every query sees the keys of one or two intervals.

The two tensors of a `Spans` grow with the number of queries, not with queries times keys. They stay
on the device, so that a mask may change in every call without making the host wait.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Spans(NamedTuple):
    """A mask for ``mask=``: query ``i`` sees key ``j`` when ``starts[..., i, r] <= j < stops[...,
    i, r]`` for some ``r``.

    It is combined (AND) with every other mask option of the call. Intervals may overlap: a key is
    never counted twice. Parts outside of the sequence are ignored, and ``start >= stop`` is an
    empty interval. A size of 1 for batch or heads is shared over that dimension; heads are query
    heads.

    Attributes:
        starts, stops: int32, both of the shape (batch or 1, heads or 1, seq_q, 1 or 2); for packed
            queries (1, heads or 1, total_q, 1 or 2). Row ``i`` belongs to row ``i`` of the call's
            queries, new tokens in the case of a cache. Keys are counted from the first key of the
            query's own sequence, as for `bias`: in a cache from the first key after the left pad,
            wherever its pages are. Nothing shifts when lengths differ.
    """

    starts: Tensor
    stops: Tensor

    def pack(self, batch: int) -> Spans:
        """The mask of a padded batch, for the same queries packed back to back: (1, heads or 1,
        batch * seq_q, 1 or 2).
        """
        starts, stops = (
            x.expand(batch, *x.shape[1:]).transpose(0, 1).flatten(1, 2)[None] for x in self
        )
        return Spans(starts, stops)
