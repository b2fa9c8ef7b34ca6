"""One step of decoding over ranks, after its checks: append, attend to the rank's own part of the
cache, exchange the results, merge them.

Most steps repeat an earlier one with other contents and lengths. So the backend and its launches
are chosen once for a kind of step. Lengths that the host knows, ints, stay on the host: it works
out where a token lies, and the GPU runs nothing for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autocast import autocast_off, is_autocasting
from ..call import dispatch, memo
from ..masks import Chunk, Window
from ..ops.append import formula as append_formula
from ..ops.append import op as append_op
from ..ops.merge import op as merge_op
from ..positions import Dealt
from ..prepared_calls import PreparedForward
from ..problem import NO_RUN, AttentionProblem, Operands, Options
from .wire import Wire

KV = tuple[Tensor, Tensor]
Qkv = tuple[Tensor, Tensor, Tensor]
Rules = tuple[Window | Chunk, ...]


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

    def operands(self, dealt: Dealt, used: Tensor, spans: KV | None = None) -> Operands:
        """The tensors of the attention to a rank's part of the cache.

        Args:
            used: (batch,) int32, its rows of each sequence.
            spans: the first row and one past the last that each query sees; None for all.
        """
        sink = self.sink if dealt.rank == 0 else None  # it counts once
        if spans is not None:
            starts, stops = spans
            return Operands(
                self.q,
                *self.caches,
                sink=sink,
                seqused_k=used,
                span_starts=starts,
                span_stops=stops,
            )
        operands = Operands(self.q, *self.caches, sink=sink, seqused_k=used)
        if self.alibi_slopes is None:
            return operands
        q_runs, k_runs = self._runs(dealt)  # slopes need the position of each key
        return operands._replace(alibi_slopes=self.alibi_slopes, q_runs=q_runs, k_runs=k_runs)

    def _runs(self, dealt: Dealt) -> KV:
        """`Operands.q_runs` and `k_runs`: queries are the last tokens, keys are blocks."""
        batch, queries = self.q.shape[:2]
        firsts = torch.arange(0, max(self.caches[0].shape[1], 1), dealt.block, device=self.q.device)
        k_runs = torch.stack([firsts, dealt.at(firsts)], -1).int()
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
    *given, lengths = tensors
    if type(lengths) is int:  # it grows with each step
        lengths = "a number of tokens"
    return memo.key_of(tuple(options), (*given, lengths, block, backend, *options.values()))


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


def check_lengths(dealt: Dealt, call: Decoding) -> list[int]:
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
    most = dealt.tokens_in(capacity) - call.added
    if lengths and not 0 <= min(lengths) <= max(lengths) <= most:
        after = [length + call.added for length in lengths]
        raise ValueError(
            f"cache_seqlens: got {lengths}, {after} with the new tokens, want at least 0 and at "
            f"most {capacity} tokens of a sequence on a rank; the first rank would have "
            f"{dealt.most_rows(max(after))}"
        )
    return lengths


class Step(NamedTuple):
    """How a rank runs the steps of one kind."""

    dealt: Dealt
    rules: Rules  # those that are spans of the rank's rows
    # Functions of the device.
    append: Callable[..., Tensor]  # `ops.append`
    attend: Callable[[Operands], Sequence[Tensor]]  # (out, lse, ...) of the rank's part
    merge: Callable[[Tensor, Tensor, torch.dtype], KV]

    @classmethod
    def of(cls, dealt: Dealt, call: Decoding, options: Options, backend: str | None) -> Step:
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
        operands = call.operands(dealt, used, (limits, limits) if rules else None)
        problem = AttentionProblem.of(operands, options)._replace(is_partial=True)
        name = dispatch.select(problem, backend)
        problem = problem._replace(options=options._replace(backend=name))
        module = dispatch.load(name)
        if problem.device_type != "cuda":
            attend = partial(module.forward, problem)
            return cls(dealt, rules, append_formula.append, attend, merge_op.merge_parts)
        forward = PreparedForward(problem, module)

        def attend_on_gpu(operands: Operands) -> Sequence[Tensor]:
            return forward.run(operands)  # another function from the fourth call on

        merge = merge_op.merge_parts_on_gpu
        return cls(dealt, rules, append_op.append_on_gpu, attend_on_gpu, merge)

    def run(self, wire: Wire, call: Decoding) -> tuple[Tensor, Tensor]:
        """Append the new tokens and attend: out (batch, seq_q, heads, value_head_dim) in q's dtype
        and lse (batch, seq_q, heads)."""
        if isinstance(call.before, int) and (not self.rules or call.q.shape[1] == 1):
            operands = self._appended_by_host(call, call.before)
        else:
            operands = self._appended(call, call.before)
        with autocast_off(call.q):
            out, lse = self.attend(operands)[:2]
        return self.merge(*exchanged(wire, out, lse), call.q.dtype)

    def _appended_by_host(self, call: Decoding, before: int) -> Operands:
        """Append the new tokens that this rank owns. The operands after that."""
        dealt, count = self.dealt, call.added
        total = before + count
        if call.new is not None:
            for first, end in dealt.spans(before, total):
                row, length = dealt.row(first), end - first
                for cache, x in zip(call.caches, call.new, strict=True):
                    own = x if length == count else x.narrow(1, first - before, length)
                    cache.narrow(1, row, length).copy_(own)
        batch, device = len(call.q), call.q.device
        used = torch.full((batch,), dealt.below(total), dtype=torch.int32, device=device)
        if not self.rules:
            return call.operands(dealt, used)
        starts, stops = zip(*(rule.key_range(total - 1, total) for rule in self.rules), strict=True)
        limits = min(max(0, *starts), total), max(min(total, *stops), 0)
        start, stop = (
            torch.full((1, 1, 1, 1), dealt.below(limit), dtype=torch.int32, device=device)
            for limit in limits
        )
        return call.operands(dealt, used, (start, stop))

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
        rows = self.dealt.below(ends)
        if call.new is not None:
            self._append(call.caches, call.new, rows[: count + 1])
        # Each in memory of its own: launches are repeated only for addresses that kernels take.
        used = rows[count].int()
        if not self.rules:
            return call.operands(self.dealt, used)
        limits = rows[count + 1 :].view(2, queries, batch).transpose(1, 2)[:, :, None, :, None]
        start, stop = (x.to(torch.int32, memory_format=torch.contiguous_format) for x in limits)
        return call.operands(self.dealt, used, (start, stop))

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


def exchanged(wire: Wire, out: Tensor, lse: Tensor) -> KV:
    """The partial results of all ranks, in their order.

    Args:
        out: (batch, seq_q, heads, value_head_dim).
        lse: (batch, heads, seq_q), in the dtype of out.

    Returns:
        out (ranks, batch, seq_q, heads, value_head_dim) and lse (ranks, batch, seq_q, heads).
    """
    # One message holds the outputs and their statistics.
    batch, queries, heads, dim = out.shape
    size, ranks = out.numel(), wire.ranks
    length = size + lse.numel()
    every = out.new_empty(ranks, length)
    parts = every.unbind()
    torch.cat((out.reshape(-1), lse.reshape(-1)), out=parts[wire.rank])
    others = {rank: part for rank, part in enumerate(parts) if rank != wire.rank}
    wire.exchange(dict.fromkeys(others, parts[wire.rank]), others, "partial results").wait()
    strides = length, queries * heads * dim, heads * dim, dim, 1
    outs = every.as_strided((ranks, batch, queries, heads, dim), strides)
    strides_of_lse = length, heads * queries, 1, queries
    return outs, every.as_strided((ranks, batch, queries, heads), strides_of_lse, size)
