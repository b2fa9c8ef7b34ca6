"""Ulysses: ranks exchange tokens for heads, so that each has all their tokens of some heads.

Source: DeepSpeed Ulysses (Jacobs et al. 2023). A rank gets whole groups of query heads with their
key head, as evenly as the numbers allow. Where there are more ranks than key heads, several ranks
share a key head and divide its query heads; the key head is sent to each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..backend_interface import Gradients
from ..masks import Span
from ..problem import Operands
from ..statistics import Statistics
from .buffers import of_heads
from .collectives import Communicator, exchange
from .partition import Piece, ShardMap


class HeadShare(NamedTuple):
    """The heads of one rank."""

    queries: slice
    keys: slice

    @property
    def counts(self) -> tuple[int, int]:
        """How many query heads and key heads they are."""
        queries, keys = self
        return queries.stop - queries.start, keys.stop - keys.start


def share_heads(query_heads: int, key_heads: int, ranks: int) -> list[HeadShare]:
    """The heads of every rank. A rank gets none where there are more ranks than query heads."""
    group = query_heads // key_heads
    shares = []
    if ranks <= key_heads:
        for first, last in _even(key_heads, ranks):
            shares.append(HeadShare(slice(first * group, last * group), slice(first, last)))
        return shares
    for key_head, (first, last) in enumerate(_even(ranks, key_heads)):
        for a, b in _even(group, last - first):
            queries = slice(key_head * group + a, key_head * group + b)
            shares.append(HeadShare(queries, slice(key_head, key_head + (a < b))))
    return shares


def _even(count: int, parts: int) -> list[Span]:
    """``range(count)`` in contiguous parts whose sizes differ by one at most."""
    cuts = [count * i // parts for i in range(parts + 1)]
    return list(pairwise(cuts))


def merged(shard_map: ShardMap, groups: Sequence[Sequence[int]]) -> ShardMap:
    """The tokens of each group of ranks, which pool theirs."""
    pieces = [[piece for rank in group for piece in shard_map.pieces[rank]] for group in groups]
    return ShardMap.of(shard_map.lengths, pieces)


class Exchange(NamedTuple):
    """How the members of a group divide tokens and heads."""

    comm: Communicator  # of the members
    tokens: tuple[int, ...]  # of every member
    # The rows of all members, one after the other, in the order in which the group holds them.
    order: tuple[Span, ...]

    @classmethod
    def of(cls, comm: Communicator, shard_map: ShardMap, members: Sequence[int]) -> Exchange:
        """The exchange between the `members`, ranks of `shard_map`; `comm` connects them."""
        located: list[tuple[Piece, Span]] = []
        row = 0
        for rank in members:
            for piece in shard_map.pieces[rank]:
                located.append((piece, (row, row + piece.tokens)))
                row += piece.tokens
        tokens = tuple(shard_map.tokens(rank) for rank in members)
        return cls(comm, tokens, tuple(span for _, span in sorted(located)))

    def spread(self, x: Tensor, heads: Sequence[slice]) -> Tensor:
        """Own tokens of all heads, (tokens, heads, ...), to the group's tokens of this rank's.

        Args:
            heads: those of every member; they may overlap.
        """
        comm, local = self.comm, heads[self.comm.rank]
        count = local.stop - local.start
        parts = [x.new_empty(tokens, count, *x.shape[2:]) for tokens in self.tokens]
        parts[comm.rank] = x[:, local]
        others = [peer for peer in range(comm.ranks) if peer != comm.rank]
        sends = {peer: x[:, heads[peer]].contiguous() for peer in others}
        comm.exchange(sends, {peer: parts[peer] for peer in others}, "heads of tokens").wait()
        joined = torch.cat(parts)
        return torch.cat([joined[a:b] for a, b in self.order] or [joined])

    def collect(
        self, x: Tensor, heads: Sequence[slice], total: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The reverse; what several members have of one of the `total` heads is added up.

        Args:
            dtype: in which the parts travel; None is that of `x`.
        """
        comm, tokens = self.comm, self.tokens
        joined, row = torch.empty_like(x), 0
        for a, b in self.order:
            joined[a:b] = x[row : row + b - a]
            row += b - a
        parts = joined.split(tokens)
        others = [peer for peer in range(comm.ranks) if peer != comm.rank]
        arriving = {
            peer: x.new_empty(tokens[comm.rank], heads[peer].stop - heads[peer].start, *x.shape[2:])
            for peer in others
        }
        sends = {peer: parts[peer].contiguous() for peer in others}
        exchange(comm, sends, arriving, "tokens of heads", dtype).wait()
        result = x.new_zeros(tokens[comm.rank], total, *x.shape[2:])
        for peer, share in enumerate(heads):
            result[:, share] += arriving.get(peer, parts[comm.rank])
        return result


class Ulysses(NamedTuple):
    """How the neighbours of a rank divide the tensors of a call."""

    shares: tuple[HeadShare, ...]
    queries: Exchange
    keys: Exchange
    bias: Exchange | None  # None where the bias has no rows
    heads: tuple[int, int]  # of queries and of keys, in all
    gradient_dtype: torch.dtype | None  # of dK and dV as they are sent; None is that of their sums

    @property
    def share(self) -> HeadShare:
        """The heads of this rank."""
        return self.shares[self.queries.comm.rank]

    @property
    def has_shared_keys(self) -> bool:
        """Whether several ranks have a key head, whose gradients are then added up."""
        return sum(heads.stop - heads.start for heads in self._key_heads) > self.heads[1]

    def spread(self, operands: Operands) -> Operands:
        """The tensors of this rank's heads, with the tokens of all its neighbours."""
        bias, sink, slopes = operands.bias, operands.sink, operands.alibi_slopes
        table = operands.relative_bias
        heads = self.share.queries
        if bias is not None and self.bias is None:
            bias = of_heads(bias, heads)
        elif bias is not None and self.bias is not None:
            rows = self.bias.spread(_rows_first(bias), self._own_heads(bias))
            bias = _heads_first(rows, bias.shape[0])
        return operands._replace(
            q=self.queries.spread(operands.q, self._query_heads),
            k=self.keys.spread(operands.k, self._key_heads),
            v=self.keys.spread(operands.v, self._key_heads),
            bias=bias,
            sink=None if sink is None else sink[heads],
            tile_kinds=of_heads(operands.tile_kinds, heads),
            partial_index=of_heads(operands.partial_index, heads),
            span_starts=self._spread_spans(operands.span_starts),
            span_stops=self._spread_spans(operands.span_stops),
            alibi_slopes=None if slopes is None else slopes[..., heads],
            relative_bias=None if table is None else table[heads],
        )

    def _spread_spans(self, ends: Tensor | None) -> Tensor | None:
        if ends is None:
            return None
        return _heads_first(self.queries.spread(_rows_first(ends), self._own_heads(ends)), 1)

    def spread_out(self, out: Tensor) -> Tensor:
        """The output or its gradient, (tokens, heads, head_dim), likewise."""
        return self.queries.spread(out, self._query_heads)

    def spread_lse(self, lse: Tensor) -> Tensor:
        """The log-sum-exp or its gradient, (heads, tokens), likewise."""
        return self.queries.spread(lse.mT.unsqueeze(2), self._query_heads).squeeze(2).mT

    def collect_results(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The reverse: all heads of this rank's tokens."""
        out = self.queries.collect(out, self._query_heads, self.heads[0])
        lse = self.queries.collect(lse.mT.unsqueeze(2), self._query_heads, self.heads[0])
        return out, lse.squeeze(2).mT

    def collect_statistics(self, found: Statistics) -> Statistics:
        """The entropies of this rank's tokens and the sums of its keys, (keys, heads), likewise;
        the largest scores of this rank's heads, with -inf for all other heads."""
        largest, entropy, sums = found
        if largest is not None:
            own, largest = largest, largest.new_full((self.heads[0],), -torch.inf)
            largest[self.share.queries] = own
        if entropy is not None:
            rows = entropy.mT.unsqueeze(2)
            entropy = self.queries.collect(rows, self._query_heads, self.heads[0]).squeeze(2).mT
        if sums is not None:
            sums = self.keys.collect(sums, self._query_heads, self.heads[0])
        return Statistics(largest, entropy, sums)

    def collect_gradients(self, gradients: Gradients, operands: Operands) -> Gradients:
        """The gradients of this rank's own tensors, from those of its heads."""
        dbias = gradients.dbias
        if dbias is not None and operands.bias is not None:
            dbias = self._collect_bias(dbias, operands.bias)
        of_keys = self._key_heads, self.heads[1], self.gradient_dtype
        return Gradients(
            self.queries.collect(gradients.dq, self._query_heads, self.heads[0]),
            self.keys.collect(gradients.dk, *of_keys),
            self.keys.collect(gradients.dv, *of_keys),
            dbias,
            self._of_all_heads(gradients.dsink, 0),
            gradients.dcaptured,
            self._of_all_heads(gradients.dalibi_slopes, -1),
            self._of_all_heads(gradients.drelative_bias, 0),
        )

    def _collect_bias(self, dbias: Tensor, bias: Tensor) -> Tensor:
        if self.bias is not None:
            rows = self.bias.collect(_rows_first(dbias), self._own_heads(bias), bias.shape[1])
            return _heads_first(rows, bias.shape[0])
        if bias.shape[1] == 1:
            return dbias
        whole = self._of_all_heads(dbias, 1)
        assert whole is not None
        return whole

    def _of_all_heads(self, gradient: Tensor | None, dim: int) -> Tensor | None:
        """A gradient of this rank's heads in dimension `dim`, with zeros for all other heads."""
        if gradient is None:
            return None
        shape = list(gradient.shape)
        shape[dim] = self.heads[0]
        whole = gradient.new_zeros(shape)
        heads = self.share.queries
        whole.narrow(dim, heads.start, heads.stop - heads.start).copy_(gradient)
        return whole

    @property
    def _query_heads(self) -> list[slice]:
        return [share.queries for share in self.shares]

    @property
    def _key_heads(self) -> list[slice]:
        return [share.keys for share in self.shares]

    def _own_heads(self, x: Tensor) -> list[slice]:
        """The heads of every rank in a tensor whose second dimension has all heads or one."""
        return self._query_heads if x.shape[1] > 1 else [slice(0, 1)] * len(self.shares)


def _rows_first(x: Tensor) -> Tensor:
    """(batch, heads, rows, keys) as (batch * rows, heads, keys)."""
    return x.transpose(1, 2).flatten(0, 1)


def _heads_first(rows: Tensor, batch: int) -> Tensor:
    """The reverse of `_rows_first`."""
    return rows.unflatten(0, (batch, rows.shape[0] // batch)).transpose(1, 2)
