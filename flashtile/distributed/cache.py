"""Decoding with a cache of keys and values whose tokens are dealt out to the ranks in blocks.

Every rank has the queries and the new tokens. It writes those new tokens that it owns, attends to
its own part of the cache, and sends the float32 result with its log-sum-exp to the others, so that
each of them merges the same parts in the same order. What a query sees follows from positions: the
keys that it sees are an interval of positions, and so of the rows of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autocast import autocast_off, cast_input, is_autocasting
from ..call import checks, dispatch
from ..call.dispatch import BackendName
from ..call.layouts import Cached
from ..call.prepare import describe
from ..masks import Window
from ..ops.merge.op import merge_parts
from ..positions import Dealt
from ..problem import FLOAT8, NO_RUN, AttentionProblem, Operands, Options
from .agreement import Compared, agreed
from .arguments import shapes
from .kinds import kind
from .layout import Layout
from .wire import Wire, connect

OPTIONS = (
    "softmax_scale",
    "causal",
    "window_size",
    "attention_chunk",
    "softcap",
    "alibi_slopes",
    "sink",
)

KV = tuple[Tensor, Tensor]


class Decoder:
    """The part of `ContextParallel` that decodes."""

    wire: Wire
    _compared: Compared  # the kinds of decoding

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        cache_seqlens: int | Tensor,
        block: int = 64,
        return_lse: bool = False,
        backend: BackendName | None = None,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Append new tokens to a cache that is dealt out to the ranks, then attend to all of it.

        Exactly `attention_with_kvcache` of the whole. Token t of a sequence lies on rank ``t //
        block % ranks``, in row ``t // (block * ranks) * block + t % block`` of its cache. All ranks
        pass the same queries and new tokens, and get the same result, bit for bit. It records no
        gradients.

        Args:
            q: (batch, seq_q, heads, head_dim), the last tokens of the sequences.
            k_cache, v_cache: (batch, capacity, kv_heads, head_dim), this rank's part.
            k, v: (batch, seq_new, kv_heads, head_dim), written by the ranks that own them.
            cache_seqlens: tokens of each whole sequence before the append, an int or (batch,)
                int32, which the host reads.
            block: neighbouring tokens that lie on one rank.
            options: `softmax_scale`, `causal`, `window_size`, `attention_chunk`, `softcap`,
                `alibi_slopes` (on CPUs) and `sink`, as in `attention_with_kvcache`.

        Returns:
            out, shaped as q with value_head_dim, and on request lse (batch, heads, seq_q).

        Raises:
            ValueError, TypeError, NotImplementedError: an argument does not fit, or the ranks
                disagree; every rank raises the same error, and nothing is written.

        Source: flash-decoding (Dao et al. 2023), with ranks in the place of splits.
        """

        def prepare() -> tuple[Decoding, dict[str, Any]]:
            unknown = [name for name in options if name not in OPTIONS]
            if unknown:
                raise checks.unexpected_keywords(unknown, Decoder.decode)
            tensors, new = (q, k_cache, v_cache), (k, v)
            return _prepared(self.wire, tensors, new, cache_seqlens, block, backend, options)

        with torch.no_grad():
            named = ("q", q), ("k", k), ("v", v), *sorted(options.items())
            kinds = tuple((name, kind(name, x)) for name, x in named)
            facts = (("block", block), ("backend", backend), *kinds)
            if self._compared.knows(facts):
                call = prepare()[0]
            else:
                call = self._compared.agreed(facts, dict(facts), prepare)
            out, lse = _run(self.wire, call)
        return (out, lse) if return_lse else out

    def deal(
        self,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        block: int = 64,
        capacity: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Deal the keys and values of a prefill out to caches for `decode`, by one exchange.

        Args:
            k, v: this rank's tokens in the layout's order, as in `attention`.
            block: as in `decode`.
            capacity: rows of the caches; by default what the longest sequence needs.

        Returns:
            k_cache and v_cache, (sequences, capacity, kv_heads, head_dim); rows that no token has
            are 0. Packed documents have a row each.

        Raises:
            ValueError: an argument does not fit, or the ranks disagree; every rank raises it.
        """
        with torch.no_grad():
            return _deal(self.wire, layout, (k, v), block, capacity)


class Decoding(NamedTuple):
    """A checked call of one rank."""

    operands: Operands  # q and the caches, without lengths
    options: Options
    backend: str | None
    new: KV | None  # (batch, seq_new, kv_heads, head_dim)
    before: Tensor  # (batch,) int64, tokens of every whole sequence without the new ones
    lengths: list[int]  # the same, on the host
    dealt: Dealt

    @property
    def total(self) -> Tensor:
        """Tokens of every whole sequence, the new ones included."""
        return self.before if self.new is None else self.before + self.new[0].shape[1]


def _prepared(
    wire: Wire,
    qkv: tuple[Tensor, Tensor, Tensor],
    new: tuple[Tensor | None, Tensor | None],
    cache_seqlens: int | Tensor,
    block: int,
    backend: str | None,
    options: Mapping[str, Any],
) -> tuple[Decoding, dict[str, Any]]:
    """A checked call of `Decoder.decode`, and the facts that have to be equal on all ranks.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument does not fit.
    """
    q, k_cache, v_cache = qkv
    k, v = new
    dealt = _dealt(wire, block)
    if isinstance(k_cache, Tensor) and k_cache.dtype in FLOAT8:
        raise NotImplementedError(
            f"k_cache: got {k_cache.dtype}, context parallelism has no float8"
        )
    if isinstance(q, Tensor) and q.device.type != "cpu" and options.get("alibi_slopes") is not None:
        raise NotImplementedError(
            f"alibi_slopes: got a cache over ranks on {q.device}, where want None; CPUs have it"
        )
    if is_autocasting(q):  # a cache never changes: the others get its dtype
        q, k, v = (cast_input(x, k_cache.dtype) for x in (q, k, v))
    lengths: list[int] | None = None
    if not isinstance(cache_seqlens, Tensor):
        count = checks.length("cache_seqlens", cache_seqlens)
        lengths = [count] * len(q)
        cache_seqlens = torch.full(q.shape[:1], count, dtype=torch.int32, device=q.device)
    cached = Cached(cache_seqlens, k_new=k, v_new=v)
    given = {name: x for name, x in options.items() if x is not None}
    operands, numbers = describe((q, k_cache, v_cache), cached, given)
    assert operands.seqused_k is not None
    pair = None if k is None or v is None else (k, v)
    before = operands.seqused_k.long()
    if lengths is None:
        lengths = before.tolist()
    operands = operands._replace(seqused_k=None)
    call = Decoding(operands, numbers, backend, pair, before, lengths, dealt)
    _check_lengths(call)
    facts = {
        "q, k_cache, v_cache": [tuple(x.shape) for x in (q, k_cache, v_cache)],
        "new tokens": 0 if k is None else k.shape[1],
        "cache_seqlens": lengths[:8],
        "device and dtype": (q.device.type, q.dtype),
        "block": block,
        "options": numbers._replace(backend=backend or ""),
        "the shapes of optional tensors": shapes(options),
    }
    return call, facts


def _run(wire: Wire, call: Decoding) -> tuple[Tensor, Tensor]:
    """Append the new tokens and attend: out (batch, seq_q, heads, value_head_dim) in q's dtype and
    lse (batch, heads, seq_q)."""
    if call.new is not None:
        _append(call, *call.new)
    out, lse = _own_part(call)
    # One message holds the outputs and their statistics.
    part = torch.cat([out, lse.transpose(1, 2).unsqueeze(-1).to(out.dtype)], -1).contiguous()
    others = [rank for rank in range(wire.ranks) if rank != wire.rank]
    parts = {rank: torch.empty_like(part) for rank in others}
    wire.exchange(dict.fromkeys(others, part), parts, "partial results").wait()
    parts[wire.rank] = part
    every = torch.stack([parts[rank] for rank in range(wire.ranks)])
    merged, lse = merge_parts(every[..., :-1], every[..., -1], call.operands.q.dtype)
    return merged, lse.transpose(1, 2).contiguous()


def _append(call: Decoding, k: Tensor, v: Tensor) -> None:
    """Write those of the new tokens that this rank owns.

    A GPU writes all of them, `block` at a time, so that the host need not ask which ones this rank
    owns: a token of another rank leaves a row as it was. That row has the same offset in its block,
    so no other token of the same block of tokens is written there.
    """
    dealt, device = call.dealt, k.device
    sequence = torch.arange(len(k), device=device)[:, None]
    for first in range(0, k.shape[1], dealt.block):
        new = slice(first, first + dealt.block)
        count = k[:, new].shape[1]
        positions = call.before[:, None] + torch.arange(first, first + count, device=device)
        is_own = dealt.owner(positions) == dealt.rank
        rows = torch.where(is_own, dealt.row(positions), positions % dealt.block)
        for cache, x in ((call.operands.k, k[:, new]), (call.operands.v, v[:, new])):
            if cache.shape[1] < dealt.block:  # it may lack these rows
                cache[sequence.expand_as(rows)[is_own], rows[is_own]] = x[is_own]
            else:
                kept = cache[sequence, rows]
                cache[sequence, rows] = torch.where(is_own[..., None, None], x, kept)


def _own_part(call: Decoding) -> tuple[Tensor, Tensor]:
    """Attention to this rank's part of the cache: out in float32 (float64 for float64), and lse."""
    operands = call.operands._replace(seqused_k=call.dealt.below(call.total).int())
    options = call.options
    if call.dealt.rank > 0:  # the sink counts once
        operands = operands._replace(sink=None)
    if operands.alibi_slopes is not None:  # it needs the position of each key
        q_runs, k_runs = _runs(call)
        operands = operands._replace(q_runs=q_runs, k_runs=k_runs)
    elif options.facts:
        options = options._replace(window_left=None, window_right=None, attention_chunk=0)
        if operands.q.shape[1] > 1 or call.options.facts != (Window(None, 0),):
            starts, stops = _seen(call)
            operands = operands._replace(span_starts=starts, span_stops=stops)
    problem = AttentionProblem.of(operands, options)._replace(is_partial=True)
    name = dispatch.select(problem, call.backend)
    problem = problem._replace(options=problem.options._replace(backend=name))
    with autocast_off(operands.q):
        return dispatch.load(name).forward(problem, operands)


def _seen(call: Decoding) -> KV:
    """`Operands.span_starts` and `span_stops`: the rows of this rank that each query sees."""
    count = call.operands.q.shape[1]
    total = call.total[:, None]
    positions = total - count + torch.arange(count, device=total.device)
    starts, stops = torch.zeros_like(positions), total.expand_as(positions)
    for fact in call.options.facts:
        first, last = fact.key_range(positions, total)
        starts, stops = torch.maximum(starts, first), torch.minimum(stops, last)
    rows = (call.dealt.below(x.clamp(min=0).minimum(total)) for x in (starts, stops))
    of_starts, of_stops = (x[:, None, :, None].int() for x in rows)
    return of_starts, of_stops


def _runs(call: Decoding) -> KV:
    """`Operands.q_runs` and `k_runs`: queries are the last tokens, keys are blocks."""
    q, k_cache = call.operands[:2]
    block = call.dealt.block
    firsts = torch.arange(0, max(k_cache.shape[1], 1), block, device=q.device)
    k_runs = torch.stack([firsts, call.dealt.at(firsts)], -1).int()
    q_runs = k_runs.new_full((q.shape[0], len(firsts), 2), NO_RUN)
    q_runs[:, 0, 0] = 0
    q_runs[:, 0, 1] = call.total - q.shape[1]
    return q_runs, k_runs.expand(q.shape[0], -1, -1)


def _deal(wire: Wire, layout: Layout, kv: KV, block: int, capacity: int | None) -> KV:
    """See `Decoder.deal`."""
    dealt, packed = agreed(wire, lambda: _prepared_deal(wire, layout, kv, block, capacity))
    connect(wire, packed[0].device)
    rows = _most_rows(dealt, max(layout.keys.lengths, default=0))
    rows = rows if capacity is None else capacity
    tokens = [_tokens(layout, rank, packed[0].device) for rank in range(wire.ranks)]
    document, position = tokens[wire.rank]
    sends, parts = {}, {}
    for rank in range(wire.ranks):
        to = (dealt.owner(position) == rank).nonzero().flatten()
        part = torch.cat([x.index_select(0, to).flatten() for x in packed])
        if rank == wire.rank:
            parts[rank] = part
            continue
        sends[rank] = part
        count = int((dealt.owner(tokens[rank][1]) == wire.rank).sum())
        parts[rank] = part.new_empty(count * sum(x[:1].numel() for x in packed))
    wire.exchange(sends, {rank: parts[rank] for rank in sends}, "keys and values").wait()
    caches = [x.new_zeros(len(layout.keys.lengths), rows, *x.shape[1:]) for x in packed]
    for rank, part in parts.items():
        document, position = tokens[rank]
        mine = dealt.owner(position) == wire.rank
        where = document[mine], dealt.row(position[mine])
        sizes = [int(mine.sum()) * x[:1].numel() for x in packed]
        for cache, x in zip(caches, part.split(sizes), strict=True):
            cache[where] = x.view(-1, *cache.shape[2:])
    return caches[0], caches[1]


def _prepared_deal(
    wire: Wire, layout: Layout, kv: KV, block: int, capacity: int | None
) -> tuple[tuple[Dealt, list[Tensor]], dict[str, Any]]:
    dealt = _dealt(wire, block)
    packed = [
        layout.without_padding(name, x.detach(), layout.keys, layout.local_keys)
        for name, x in zip(("k", "v"), kv, strict=True)
    ]
    k, v = packed
    if k.dtype != v.dtype or k.shape[1] != v.shape[1]:
        raise ValueError(
            f"v: got {v.shape[1]} heads in {v.dtype}, want {k.shape[1]} in {k.dtype}, as k"
        )
    needed = _most_rows(dealt, max(layout.keys.lengths, default=0))
    if capacity is not None and checks.length("capacity", capacity) < needed:
        raise ValueError(f"capacity: got {capacity} rows, want at least {needed}")
    facts = {
        "k and v": [(tuple(x.shape[1:]), x.dtype) for x in packed],
        "block and capacity": (block, capacity),
        "who owns which tokens": layout.keys.digest()[:12],
    }
    return (dealt, packed), facts


def _tokens(layout: Layout, rank: int, device: torch.device) -> KV:
    """The document and the position of each of a rank's rows, without padding."""
    pieces = layout.keys.pieces[rank]
    sizes = torch.tensor([piece.tokens for piece in pieces], dtype=torch.int64)
    documents = torch.tensor([piece.document for piece in pieces], dtype=torch.int64)
    positions = [torch.arange(piece.start, piece.stop) for piece in pieces]
    joined = torch.cat([*positions, torch.arange(0)])
    return documents.repeat_interleave(sizes).to(device), joined.to(device)


def _dealt(wire: Wire, block: int) -> Dealt:
    if checks.length("block", block) == 0:
        raise ValueError("block: got 0, want at least 1")
    return Dealt(block, wire.ranks, wire.rank)


def _most_rows(dealt: Dealt, tokens: int) -> int:
    """The most rows that a rank has of a sequence: those of the first rank."""
    return int(dealt._replace(rank=0).below(tokens))


def _check_lengths(call: Decoding) -> None:
    """Every rank checks the rank that has the most tokens, so that all of them raise."""
    before, new = call.lengths, 0 if call.new is None else call.new[0].shape[1]
    after = [length + new for length in before]
    capacity = call.operands.k.shape[1]
    needed = _most_rows(call.dealt, max(after, default=0))
    if min(before, default=0) < 0 or needed > capacity:
        raise ValueError(
            f"cache_seqlens: got {before}, {after} with the new tokens, want at least 0 and at "
            f"most {capacity} tokens of a sequence on a rank; the first rank would have {needed}"
        )
