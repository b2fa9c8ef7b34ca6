"""Decoding with a cache of keys and values whose tokens are dealt out to the ranks in blocks.

Every rank has the queries and the new tokens. It writes those new tokens that it owns, attends to
its own part of the cache, and sends the float32 result with its log-sum-exp to the others, so that
each of them merges the same parts in the same order. What a query sees follows from positions: the
keys that it sees are an interval of positions, and so of the rows of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autocast import autocast_off, cast_input, is_autocasting
from ..backend_interface import PreparedForward
from ..call import checks, dispatch, memo
from ..call.dispatch import BackendName
from ..call.layouts import Cached
from ..call.options import SCORE_NUMBERS, unexpected_keywords
from ..call.prepare import describe
from ..lru import Memo
from ..masks import Chunk, Span, Window
from ..ops import append as append_op
from ..ops import merge as merge_op
from ..ops.append import formula as append_formula
from ..problem import FLOAT8, NO_RUN, AttentionProblem, Operands, Options
from .arguments import Qkv, call_signature, missing, shapes
from .collectives import Communicator, VerifiedCalls, connect, verify_across_ranks
from .layout import Layout

KV = tuple[Tensor, Tensor]
Rules = tuple[Window | Chunk, ...]

OPTIONS = SCORE_NUMBERS | {"causal", "window_size", "alibi_slopes", "sink"}


class Decoder:
    """The part of `ContextParallel` that decodes."""

    comm: Communicator
    _verified: VerifiedCalls  # the signatures of decoding
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
            options: `causal`, `window_size`, `alibi_slopes` (on CPUs), `sink`, and those that
                are one number of the scores, such as `softcap`, as in `attention_with_kvcache`.

        Returns:
            out, shaped as q with value_head_dim, and on request lse (batch, heads, seq_q).

        Raises:
            ValueError, TypeError, NotImplementedError: an argument does not fit, or the ranks
                disagree; every rank raises the same error, and nothing is written.

        Source: flash-decoding (Dao et al. 2023), with ranks in the place of splits.
        """
        if dispatch.is_batch_invariant():
            raise missing("batch_invariant")
        tensors, new = (q, k_cache, v_cache), (k, v)
        with torch.no_grad():
            key = step_key((*tensors, *new, cache_seqlens), block, backend, options)
            repeated = None if key is None else self._steps.get(key)
            arguments = *tensors, *new, block, backend
            signature = call_signature(arguments, options) if repeated is None else repeated[0]
            is_verified = signature in self._verified
            if repeated is not None and is_verified:
                step = repeated[1]
                call = decoding_of(tensors, new, cache_seqlens, options)
                check_lengths(step.blocks, call)
            else:
                prepare = partial(
                    _prepared, self.comm, tensors, new, cache_seqlens, block, backend, options
                )
                if is_verified:
                    (step, call), _ = prepare()
                else:
                    step, call = self._verified.verify(signature, prepare)
                if key is not None:
                    self._steps[key] = signature, step
            out, lse = step.run(self.comm, call)
            # (batch, heads, seq_q), in memory of its own
            lse = lse.transpose(1, 2).contiguous() if return_lse else lse
        return (out, lse) if return_lse else out

    @torch.no_grad()
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
        comm = self.comm
        blocks, packed = verify_across_ranks(
            comm, lambda: _prepared_deal(comm, layout, (k, v), block, capacity)
        )
        connect(comm, packed[0].device)
        rows = blocks.most_rows(max(layout.keys.lengths, default=0))
        rows = rows if capacity is None else capacity
        tokens = [_tokens(layout, rank, packed[0].device) for rank in range(comm.ranks)]
        document, position = tokens[comm.rank]
        sends, parts = {}, {}
        for rank in range(comm.ranks):
            to = (blocks.owner(position) == rank).nonzero().flatten()
            part = torch.cat([x.index_select(0, to).flatten() for x in packed])
            if rank == comm.rank:
                parts[rank] = part
                continue
            sends[rank] = part
            count = int((blocks.owner(tokens[rank][1]) == comm.rank).sum())
            parts[rank] = part.new_empty(count * sum(x.shape[1:].numel() for x in packed))
        comm.exchange(sends, {rank: parts[rank] for rank in sends}, "keys and values").wait()
        caches = [x.new_zeros(len(layout.keys.lengths), rows, *x.shape[1:]) for x in packed]
        for rank, part in parts.items():
            document, position = tokens[rank]
            is_local = blocks.owner(position) == comm.rank
            where = document[is_local], blocks.row(position[is_local])
            sizes = [int(is_local.sum()) * x.shape[1:].numel() for x in packed]
            for cache, x in zip(caches, part.split(sizes), strict=True):
                cache[where] = x.view(-1, *cache.shape[2:])
        return caches[0], caches[1]


def _prepared(
    comm: Communicator,
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
    blocks = _blocks(comm, block)
    if backend is not None:
        dispatch.check_name(backend)
    checks.tensor("q", q, dims="batch, seq_q, heads, head_dim")
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
    before = cache_seqlens
    if not isinstance(before, Tensor):
        cache_seqlens = count = checks.length("cache_seqlens", before)
        # A tensor, since an int would be compared with the capacity of this rank only.
        before = torch.full(q.shape[:1], count, dtype=torch.int32, device=q.device)
    cached = Cached(before, k_new=k, v_new=v)
    keywords = {name: x for name, x in options.items() if x is not None}
    _, call_options = describe((q, k_cache, v_cache), cached, keywords)
    call = decoding_of((q, k_cache, v_cache), (k, v), cache_seqlens, options)
    lengths = check_lengths(blocks, call)
    if isinstance(call.before, int):  # the ranks may give it in both ways
        lengths *= len(q)
    facts = {
        "q, k_cache, v_cache": [tuple(x.shape) for x in (q, k_cache, v_cache)],
        "new tokens": call.added,
        "cache_seqlens": lengths[:8],
        "device and dtype": (q.device.type, q.dtype),
        "block": block,
        "options": call_options._replace(backend=backend or ""),
        "the shapes of optional tensors": shapes(options),
    }
    return (Step.of(blocks, call, call_options, backend), call), facts


def _prepared_deal(
    comm: Communicator, layout: Layout, kv: KV, block: int, capacity: int | None
) -> tuple[tuple[BlockCyclic, list[Tensor]], dict[str, Any]]:
    blocks = _blocks(comm, block)
    packed = [
        layout.without_padding(name, x.detach(), layout.keys, layout.local_keys)
        for name, x in zip(("k", "v"), kv, strict=True)
    ]
    k, v = packed
    if k.dtype != v.dtype or k.shape[1] != v.shape[1]:
        raise ValueError(
            f"v: got {v.shape[1]} heads in {v.dtype}, want {k.shape[1]} in {k.dtype}, as k"
        )
    needed = blocks.most_rows(max(layout.keys.lengths, default=0))
    if capacity is not None and checks.length("capacity", capacity) < needed:
        raise ValueError(f"capacity: got {capacity} rows, want at least {needed}")
    facts = {
        "k and v": [(tuple(x.shape[1:]), x.dtype) for x in packed],
        "block and capacity": (block, capacity),
        "who owns which tokens": layout.keys.digest()[:12],
    }
    return (blocks, packed), facts


def _tokens(layout: Layout, rank: int, device: torch.device) -> KV:
    """The document and the position of each of a rank's rows, without padding."""
    pieces = layout.keys.pieces[rank]
    sizes = torch.tensor([piece.tokens for piece in pieces], dtype=torch.int64)
    documents = torch.tensor([piece.document for piece in pieces], dtype=torch.int64)
    positions = [torch.arange(piece.start, piece.stop) for piece in pieces]
    joined = torch.cat([*positions, torch.arange(0)])
    return documents.repeat_interleave(sizes).to(device), joined.to(device)


class BlockCyclic(NamedTuple):
    """The positions of one rank's rows in a block-cyclic distribution: token t of a sequence is on
    rank ``t // block % ranks``.

    A sequence that grows fills the ranks evenly, and the rows that a rank has stay where they are.
    Positions may be ints or tensors of integers.
    """

    block: int
    ranks: int
    rank: int

    def owner(self, position: Any) -> Any:
        """The rank that holds a token."""
        return position // self.block % self.ranks

    def row(self, position: Any) -> Any:
        """The row of a token on the rank that holds it."""
        return position // (self.block * self.ranks) * self.block + position % self.block

    def at(self, row: Any) -> Any:
        """The position of one of this rank's rows."""
        block, inside = row // self.block, row % self.block
        return (block * self.ranks + self.rank) * self.block + inside

    def below(self, position: Any) -> Any:
        """How many of this rank's rows stand before `position`: its rows of a sequence of that
        many tokens."""
        period = self.block * self.ranks
        inside = position % period - self.rank * self.block
        if isinstance(position, int):
            inside = min(max(inside, 0), self.block)
        else:
            inside = inside.clamp(0, self.block)
        return position // period * self.block + inside

    def most_rows(self, tokens: int) -> int:
        """The most rows that a rank has of a sequence: those of the first rank."""
        return int(self._replace(rank=0).below(tokens))

    def tokens_in(self, rows: int) -> int:
        """The most tokens of a sequence for which no rank needs more than `rows` rows."""
        return rows // self.block * self.block * self.ranks + rows % self.block

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """The intervals of this rank's positions from `start` to `stop`, a block each at most."""
        period = self.block * self.ranks
        for first in range(start // period * period + self.rank * self.block, stop, period):
            span = max(first, start), min(first + self.block, stop)
            if span[0] < span[1]:
                yield span


def _blocks(comm: Communicator, block: int) -> BlockCyclic:
    if checks.length("block", block) == 0:
        raise ValueError("block: got 0, want at least 1")
    return BlockCyclic(block, comm.ranks, comm.rank)


class Decoding(NamedTuple):
    """A checked call of one rank."""

    q: Tensor
    caches: KV
    new: KV | None  # (batch, seq_new, kv_heads, head_dim)
    before: int | Tensor  # tokens of every whole sequence without the new ones; or (batch,)
    sink: Tensor | None
    alibi_slopes: Tensor | None

    @property
    def added(self) -> int:
        """The new tokens of a sequence."""
        return 0 if self.new is None else self.new[0].shape[1]

    def operands(self, blocks: BlockCyclic, used: Tensor, spans: KV | None = None) -> Operands:
        """The tensors of the attention to a rank's part of the cache.

        Args:
            used: (batch,) int32, its rows of each sequence.
            spans: the first row and one past the last that each query sees; None for all.
        """
        sink = self.sink if blocks.rank == 0 else None  # it counts once
        starts, stops = spans or (None, None)
        operands = Operands(
            self.q, *self.caches, sink=sink, seqused_k=used, span_starts=starts, span_stops=stops
        )
        if self.alibi_slopes is None:
            return operands
        q_runs, k_runs = self._runs(blocks)  # slopes need the position of each key
        return operands._replace(alibi_slopes=self.alibi_slopes, q_runs=q_runs, k_runs=k_runs)

    def _runs(self, blocks: BlockCyclic) -> KV:
        """`Operands.q_runs` and `k_runs`: queries are the last tokens, keys are blocks."""
        batch, queries = self.q.shape[:2]
        firsts = torch.arange(
            0, max(self.caches[0].shape[1], 1), blocks.block, device=self.q.device
        )
        k_runs = torch.stack([firsts, blocks.at(firsts)], -1).int()
        q_runs = k_runs.new_full((batch, len(firsts), 2), NO_RUN)
        q_runs[:, 0, 0] = 0
        q_runs[:, 0, 1] = self.before + self.added - queries
        return q_runs, k_runs.expand(batch, -1, -1)


def step_key(
    tensors: Sequence[Any], block: int, backend: str | None, options: Mapping[str, Any]
) -> Any:
    """What decides how a rank runs a step, besides the contents of the tensors and the lengths.

    Args:
        tensors: q, the caches, the new tokens, and the lengths, which may be an int.

    Returns:
        None if that is not known: autocast changes dtypes, or the checks have to look at the types.
    """
    if torch.compiler.is_compiling() or is_autocasting(tensors[0]):
        return None
    *arguments, lengths = tensors
    if type(lengths) is int:  # it grows with each step
        lengths = "a number of tokens"
    return memo.key_of(tuple(options), (*arguments, lengths, block, backend, *options.values()))


def decoding_of(
    qkv: Qkv,
    new: tuple[Tensor | None, Tensor | None],
    cache_seqlens: int | Tensor,
    options: Mapping[str, Any],
) -> Decoding:
    """The call with these arguments, which have been checked."""
    k, v = new
    if isinstance(cache_seqlens, Tensor) and cache_seqlens.dim() == 0:
        cache_seqlens = cache_seqlens.expand(len(qkv[0]))
    pair = None if k is None or v is None else (k, v)
    sink, slopes = options.get("sink"), options.get("alibi_slopes")
    return Decoding(qkv[0], qkv[1:], pair, cache_seqlens, sink, slopes)


def check_lengths(blocks: BlockCyclic, call: Decoding) -> list[int]:
    """Every rank checks the rank that has the most tokens, so that all of them raise.

    Returns:
        The lengths before the append, an int as one of them. The host waits for those on a GPU;
        there are none while a CUDA graph captures the call, which will run with other lengths.

    Raises:
        ValueError: a length is negative, or a cache has too few rows.
    """
    before, capacity = call.before, call.caches[0].shape[1]
    if isinstance(before, int):
        lengths = [before]
    elif before.is_cuda and torch.cuda.is_current_stream_capturing():
        return []
    else:
        lengths = before.tolist()
    most = blocks.tokens_in(capacity) - call.added
    if lengths and not 0 <= min(lengths) <= max(lengths) <= most:
        after = [length + call.added for length in lengths]
        raise ValueError(
            f"cache_seqlens: got {lengths}, {after} with the new tokens, want at least 0 and at "
            f"most {capacity} tokens of a sequence on a rank; the first rank would have "
            f"{blocks.most_rows(max(after))}"
        )
    return lengths


class Step(NamedTuple):
    """How a rank runs the steps with one signature."""

    blocks: BlockCyclic
    rules: Rules  # those that are spans of the rank's rows
    # Functions of the device.
    append: Callable[..., Tensor]  # `ops.append`
    attend: Callable[[Operands], Sequence[Tensor]]  # (out, lse, ...) of the rank's part
    merge: Callable[[Tensor, Tensor, torch.dtype], KV]

    @classmethod
    def of(cls, blocks: BlockCyclic, call: Decoding, options: Options, backend: str | None) -> Step:
        """The step of calls like this one.

        Raises:
            NotImplementedError: no backend can run it.
        """
        rules: Rules = ()
        if call.alibi_slopes is None and options.facts:
            if call.q.shape[1] > 1 or options.facts != (Window(None, 0),):
                rules = options.facts
            options = options._replace(window_left=None, window_right=None, attention_chunk=0)
        used = call.q.new_empty(len(call.q), dtype=torch.int32)
        limits = call.q.new_empty(1, 1, call.q.shape[1], 1, dtype=torch.int32)
        operands = call.operands(blocks, used, (limits, limits) if rules else None)
        problem = AttentionProblem.of(operands, options)._replace(is_partial=True)
        name = dispatch.select(problem, backend)
        problem = problem._replace(options=options._replace(backend=name))
        module = dispatch.BACKENDS[name]
        if problem.device_type != "cuda":
            attend = partial(module.forward, problem)
            return cls(blocks, rules, append_formula.append, attend, merge_op.merge_parts)
        forward = PreparedForward(problem, module)

        def attend_on_gpu(operands: Operands) -> Sequence[Tensor]:
            return forward.run(operands)  # another function from the fourth call on

        merge = merge_op.merge_parts_on_gpu
        return cls(blocks, rules, append_op.append_on_gpu, attend_on_gpu, merge)

    def run(self, comm: Communicator, call: Decoding) -> tuple[Tensor, Tensor]:
        """Append the new tokens and attend: out (batch, seq_q, heads, value_head_dim) in q's dtype
        and lse (batch, seq_q, heads)."""
        if isinstance(call.before, int) and (not self.rules or call.q.shape[1] == 1):
            operands = self._appended_by_host(call, call.before)
        else:
            operands = self._appended(call, call.before)
        with autocast_off(call.q):
            out, lse = self.attend(operands)[:2]
        return self.merge(*exchanged(comm, out, lse), call.q.dtype)

    def _appended_by_host(self, call: Decoding, before: int) -> Operands:
        """Append the new tokens that this rank owns. The operands after that."""
        blocks, count = self.blocks, call.added
        total = before + count
        if call.new is not None:
            for first, end in blocks.spans(before, total):
                row, length = blocks.row(first), end - first
                for cache, x in zip(call.caches, call.new, strict=True):
                    own = x if length == count else x.narrow(1, first - before, length)
                    cache.narrow(1, row, length).copy_(own)
        batch, device = len(call.q), call.q.device
        used = torch.full((batch,), blocks.below(total), dtype=torch.int32, device=device)
        if not self.rules:
            return call.operands(blocks, used)
        starts, stops = zip(*(rule.key_range(total - 1, total) for rule in self.rules), strict=True)
        limits = min(max(0, *starts), total), max(min(total, *stops), 0)
        start, stop = (
            torch.full((1, 1, 1, 1), blocks.below(limit), dtype=torch.int32, device=device)
            for limit in limits
        )
        return call.operands(blocks, used, (start, stop))

    def _appended(self, call: Decoding, before: int | Tensor) -> Operands:
        """The same by operations on the device, which alone knows the lengths."""
        batch, queries = call.q.shape[:2]
        count, device = call.added, call.q.device
        lengths = before
        if isinstance(lengths, int):
            lengths = torch.full((batch,), lengths, dtype=torch.int32, device=device)
        # Positions for which the rows are wanted, (positions, batch) int64.
        ends = lengths + torch.arange(count + 1, device=device)[:, None]
        if self.rules:
            total = ends[-1]
            positions = total + torch.arange(-queries, 0, device=device)[:, None]
            ranges = (rule.key_range(positions, total) for rule in self.rules)
            starts, stops = zip(*ranges, strict=True)
            seen = reduce(torch.maximum, starts), reduce(torch.minimum, stops)
            ends = torch.cat([ends, *seen]).clamp(min=0).minimum(total)
        rows = self.blocks.below(ends)
        if call.new is not None:
            self._append(call.caches, call.new, rows[: count + 1])
        # Each in memory of its own: launches are repeated only for addresses that kernels take.
        used = rows[count].int()
        if not self.rules:
            return call.operands(self.blocks, used)
        limits = rows[count + 1 :].view(2, queries, batch).transpose(1, 2)[:, :, None, :, None]
        start, stop = (x.to(torch.int32, memory_format=torch.contiguous_format) for x in limits)
        return call.operands(self.blocks, used, (start, stop))

    def _append(self, caches: KV, new: KV, rows: Tensor) -> None:
        """Append the new tokens that this rank owns.

        Args:
            rows: (seq_new + 1, batch), how many rows the rank has before each new token, and after
                all of them.
        """
        # Each new token is a sequence of its own, to which the op appends it. The op drops a token
        # at row -1, so the host need not know which ones this rank owns.
        own = torch.where(rows[1:] > rows[:-1], rows[:-1], -1).int().transpose(0, 1).flatten()
        batch, count = new[0].shape[:2]
        sequences = None
        if count != 1:
            sequences = torch.arange(batch * count, dtype=torch.int32, device=rows.device) // count
        k, v = (x.reshape(-1, 1, *x.shape[2:]) for x in new)
        nothing = None, None
        self.append(*caches, k, v, own, *nothing, sequences, *nothing)


def exchanged(comm: Communicator, out: Tensor, lse: Tensor) -> KV:
    """The partial results of all ranks, in their order.

    Args:
        out: (batch, seq_q, heads, value_head_dim).
        lse: (batch, heads, seq_q), in the dtype of out.

    Returns:
        out (ranks, batch, seq_q, heads, value_head_dim) and lse (ranks, batch, seq_q, heads).
    """
    # One message holds the outputs and their statistics.
    batch, queries, heads, dim = out.shape
    size, ranks = out.numel(), comm.ranks
    length = size + lse.numel()
    every = out.new_empty(ranks, length)
    parts = every.unbind()
    torch.cat((out.reshape(-1), lse.reshape(-1)), out=parts[comm.rank])
    others = {rank: part for rank, part in enumerate(parts) if rank != comm.rank}
    comm.exchange(dict.fromkeys(others, parts[comm.rank]), others, "partial results").wait()
    strides = length, queries * heads * dim, heads * dim, dim, 1
    outs = every.as_strided((ranks, batch, queries, heads, dim), strides)
    strides_of_lse = length, heads * queries, 1, queries
    return outs, every.as_strided((ranks, batch, queries, heads), strides_of_lse, size)
