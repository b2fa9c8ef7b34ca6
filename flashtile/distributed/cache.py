"""Decoding with a cache of keys and values whose tokens are dealt out to the ranks in blocks.

Every rank has the queries and the new tokens. It writes those new tokens that it owns, attends to
its own part of the cache, and sends the float32 result with its log-sum-exp to the others, so that
each of them merges the same parts in the same order. What a query sees follows from positions: the
keys that it sees are an interval of positions, and so of the rows of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..autocast import autocast_dtype, cast_input, is_autocasting
from ..call import checks, dispatch
from ..call.dispatch import BackendName
from ..call.keywords import unexpected_keywords
from ..call.layouts import Cached
from ..call.prepare import describe
from ..lru import Memo
from ..positions import Dealt
from ..problem import FLOAT8
from .agreement import Compared, agreed
from .arguments import shapes
from .decoding import KV, Decoding, Step, check_lengths, decoding_of, step_key
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


class Decoder:
    """The part of `ContextParallel` that decodes."""

    wire: Wire
    _compared: Compared  # the kinds of decoding
    _steps: Memo[Any, tuple[Any, Step]]  # what they are and how they run, by `step_key`

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
                int32, which the host reads, but not while a CUDA graph captures the call. An int
                takes less time.
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
        tensors, new = (q, k_cache, v_cache), (k, v)
        with torch.no_grad():
            key = step_key((*tensors, *new, cache_seqlens), block, backend, options)
            known = None if key is None else self._steps.get(key)
            facts = _facts(tensors, new, block, backend, options) if known is None else known[0]
            is_known = self._compared.knows(facts)
            if known is not None and is_known:
                step = known[1]
                call = decoding_of(tensors, new, cache_seqlens, options)
                check_lengths(step.dealt, call)
            else:
                prepare = partial(
                    _prepared, self.wire, tensors, new, cache_seqlens, block, backend, options
                )
                if is_known:
                    (step, call), _ = prepare()
                else:
                    step, call = self._compared.agreed(facts, dict(facts), prepare)
                if key is not None:
                    self._steps[key] = facts, step
            out, lse = step.run(self.wire, call)
            # (batch, heads, seq_q), in memory of its own
            lse = lse.transpose(1, 2).contiguous() if return_lse else lse
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


def _facts(
    qkv: tuple[Any, Any, Any],
    new: tuple[Any, Any],
    block: int,
    backend: str | None,
    options: Mapping[str, Any],
) -> tuple[tuple[str, Any], ...]:
    """What a call is, by names that a user understands: equal on all ranks."""
    names = "q", "k_cache", "v_cache", "k", "v", "block", "backend"
    named = *zip(names, (*qkv, *new, block, backend), strict=True), *sorted(options.items())
    kinds = ((name, kind(name, x)) for name, x in named)
    return ("autocast", autocast_dtype(qkv[0])), *kinds


def _prepared(
    wire: Wire,
    qkv: tuple[Tensor, Tensor, Tensor],
    new: tuple[Tensor | None, Tensor | None],
    cache_seqlens: int | Tensor,
    block: int,
    backend: str | None,
    options: Mapping[str, Any],
) -> tuple[tuple[Step, Decoding], dict[str, Any]]:
    """A checked call of `Decoder.decode`, how it runs, and the facts that have to be equal on all
    ranks.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument does not fit.
    """
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise unexpected_keywords(unknown, Decoder.decode)
    q, k_cache, v_cache = qkv
    k, v = new
    dealt = _dealt(wire, block)
    if backend is not None:
        dispatch.check_name(backend)
    checks.rank("q", q, "batch, seq_q, heads, head_dim")
    if isinstance(k_cache, Tensor) and k_cache.dtype in FLOAT8:
        raise NotImplementedError(
            f"k_cache: got {k_cache.dtype}, context parallelism has no float8"
        )
    if q.device.type != "cpu" and options.get("alibi_slopes") is not None:
        raise NotImplementedError(
            f"alibi_slopes: got a cache over ranks on {q.device}, where want None; CPUs have it"
        )
    if is_autocasting(q):  # a cache never changes: the others get its dtype
        q, k, v = (cast_input(x, k_cache.dtype) for x in (q, k, v))
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = checks.length("cache_seqlens", cache_seqlens)
    cached = Cached(_lengths_for_checks(cache_seqlens, q), k_new=k, v_new=v)
    given = {name: x for name, x in options.items() if x is not None}
    _, numbers = describe((q, k_cache, v_cache), cached, given)
    call = decoding_of((q, k_cache, v_cache), (k, v), cache_seqlens, options)
    lengths = check_lengths(dealt, call)
    if isinstance(call.before, int):  # the ranks may give it in both ways
        lengths *= len(q)
    facts = {
        "q, k_cache, v_cache": [tuple(x.shape) for x in (q, k_cache, v_cache)],
        "new tokens": call.added,
        "cache_seqlens": lengths[:8],
        "device and dtype": (q.device.type, q.dtype),
        "block": block,
        "options": numbers._replace(backend=backend or ""),
        "the shapes of optional tensors": shapes(options),
    }
    return (Step.of(dealt, call, numbers, backend), call), facts


def _lengths_for_checks(cache_seqlens: int | Tensor, q: Tensor) -> Tensor:
    """A tensor, since an int would be compared with the capacity of this rank only."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    return torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)


def _deal(wire: Wire, layout: Layout, kv: KV, block: int, capacity: int | None) -> KV:
    """See `Decoder.deal`."""
    dealt, packed = agreed(wire, lambda: _prepared_deal(wire, layout, kv, block, capacity))
    connect(wire, packed[0].device)
    rows = dealt.most_rows(max(layout.keys.lengths, default=0))
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
        parts[rank] = part.new_empty(count * sum(x.shape[1:].numel() for x in packed))
    wire.exchange(sends, {rank: parts[rank] for rank in sends}, "keys and values").wait()
    caches = [x.new_zeros(len(layout.keys.lengths), rows, *x.shape[1:]) for x in packed]
    for rank, part in parts.items():
        document, position = tokens[rank]
        mine = dealt.owner(position) == wire.rank
        where = document[mine], dealt.row(position[mine])
        sizes = [int(mine.sum()) * x.shape[1:].numel() for x in packed]
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
    needed = dealt.most_rows(max(layout.keys.lengths, default=0))
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
