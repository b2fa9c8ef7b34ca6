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
from ..ops.merge.op import merge_parts
from ..positions import Dealt
from ..prepared_calls import PreparedForward
from ..problem import NO_RUN, AttentionProblem, Operands, Options
from .wire import Wire

KV = tuple[Tensor, Tensor]
Qkv = tuple[Tensor, Tensor, Tensor]
Rules = tuple[Window | Chunk, ...]


class Decoding(NamedTuple):
    """A checked call of one rank."""

    operands: Operands  # q, the caches, the sink and the slopes, without lengths
    new: KV | None  # (batch, seq_new, kv_heads, head_dim)
    before: int | Tensor  # tokens of every whole sequence without the new ones; or (batch,)

    @property
    def added(self) -> int:
        """The new tokens of a sequence."""
        return 0 if self.new is None else self.new[0].shape[1]

    @property
    def total(self) -> int | Tensor:
        """Tokens of every whole sequence, the new ones included; or (batch,)."""
        return self.before if self.new is None else self.before + self.added


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
    tensors = {name: options.get(name) for name in ("sink", "alibi_slopes")}
    pair = None if k is None or v is None else (k, v)
    return Decoding(Operands(*qkv, **tensors), pair, cache_seqlens)


def check_lengths(dealt: Dealt, call: Decoding) -> list[int]:
    """Every rank checks the rank that has the most tokens, so that all of them raise.

    Returns:
        The lengths before the append, for which the host waits if they are on a GPU. There are none
        while a CUDA graph captures the call, which will run with other lengths.

    Raises:
        ValueError: a length is negative, or a cache has too few rows.
    """
    before, capacity = call.before, call.operands.k.shape[1]
    if isinstance(before, int):
        lengths = [before] * len(call.operands.q)
    elif before.is_cuda and torch.cuda.is_current_stream_capturing():
        return []
    else:
        lengths = before.tolist()
    needed = most_rows(dealt, max(lengths, default=0) + call.added)
    if min(lengths, default=0) < 0 or needed > capacity:
        after = [length + call.added for length in lengths]
        raise ValueError(
            f"cache_seqlens: got {lengths}, {after} with the new tokens, want at least 0 and at "
            f"most {capacity} tokens of a sequence on a rank; the first rank would have {needed}"
        )
    return lengths


def most_rows(dealt: Dealt, tokens: int) -> int:
    """The most rows that a rank has of a sequence: those of the first rank."""
    return int(dealt._replace(rank=0).below(tokens))


class Step(NamedTuple):
    """How a rank runs the steps of one kind."""

    dealt: Dealt
    rules: Rules  # those that are spans of the rank's rows
    attend: Callable[[Operands], Sequence[Tensor]]  # (out, lse, ...) of the rank's part

    @classmethod
    def of(cls, dealt: Dealt, call: Decoding, options: Options, backend: str | None) -> Step:
        """The step of calls like this one.

        Raises:
            NotImplementedError: no backend can run it.
        """
        rules: Rules = ()
        if call.operands.alibi_slopes is None and options.facts:
            if call.operands.q.shape[1] > 1 or options.facts != (Window(None, 0),):
                rules = options.facts
            options = options._replace(window_left=None, window_right=None, attention_chunk=0)
        operands = own_operands(dealt, rules, call)
        problem = AttentionProblem.of(operands, options)._replace(is_partial=True)
        name = dispatch.select(problem, backend)
        problem = problem._replace(options=options._replace(backend=name))
        module = dispatch.load(name)
        if problem.device_type != "cuda":
            return cls(dealt, rules, partial(module.forward, problem))
        prepared = PreparedForward(problem, module)
        return cls(dealt, rules, lambda operands: prepared.run(operands))

    def run(self, wire: Wire, call: Decoding) -> tuple[Tensor, Tensor]:
        """Append the new tokens and attend: out (batch, seq_q, heads, value_head_dim) in q's dtype
        and lse (batch, seq_q, heads)."""
        if call.new is not None:
            append(self.dealt, call.operands[1:3], call.new, call.before)
        operands = own_operands(self.dealt, self.rules, call)
        with autocast_off(operands.q):
            out, lse = self.attend(operands)[:2]
        return merged(wire, out, lse, operands.q.dtype)


def append(dealt: Dealt, caches: KV, new: KV, before: int | Tensor) -> None:
    """Write those of the new tokens that this rank owns."""
    batch, count = new[0].shape[:2]
    if isinstance(before, int):
        for start, stop in dealt.spans(before, before + count):
            row = dealt.row(start)
            for cache, x in zip(caches, new, strict=True):
                cache[:, row : row + stop - start].copy_(x[:, start - before : stop - before])
        return
    # Each new token is a sequence of its own, to which the op appends it. It drops a token at row
    # -1, so the host need not know which ones this rank owns.
    rows = dealt.below(before[:, None] + torch.arange(count + 1, device=before.device))
    first = rows[:, :-1]
    own_rows = torch.where(rows[:, 1:] > first, first, -1).int().flatten()
    sequences = None
    if count != 1:
        sequences = torch.arange(batch, dtype=torch.int32, device=before.device)
        sequences = sequences.repeat_interleave(count)
    k, v = (x.reshape(-1, 1, *x.shape[2:]) for x in new)
    nothing = None, None
    torch.ops.flashtile.kvcache_append(*caches, k, v, own_rows, *nothing, sequences, *nothing)


def own_operands(dealt: Dealt, rules: Rules, call: Decoding) -> Operands:
    """The tensors of the attention to this rank's part of the cache."""
    q, k, v = call.operands[:3]
    total = call.total
    slopes, sink = call.operands.alibi_slopes, call.operands.sink
    tensors = {
        "seqused_k": _on_device(dealt.below(total), q.shape[:1], q.device),
        "sink": sink if dealt.rank == 0 else None,  # it counts once
    }
    if slopes is not None:  # they need the position of each key
        q_runs, k_runs = _runs(dealt, call)
        tensors |= {"alibi_slopes": slopes, "q_runs": q_runs, "k_runs": k_runs}
    elif rules:
        starts, stops = _seen(dealt, rules, total, q)
        tensors |= {"span_starts": starts, "span_stops": stops}
    return Operands(q, k, v, **tensors)


def _seen(dealt: Dealt, rules: Rules, total: int | Tensor, q: Tensor) -> KV:
    """`Operands.span_starts` and `span_stops`: the rows of this rank that each query sees."""
    count = q.shape[1]
    position: Any = None
    if isinstance(total, int) and count == 1:
        position = total - 1
    elif isinstance(total, int):
        position = torch.arange(total - count, total, device=q.device)[None]
    else:
        total = total[:, None]
        position = total - count + torch.arange(count, device=q.device)
    starts, stops = zip(*(rule.key_range(position, total) for rule in rules), strict=True)
    ends = _smaller(reduce(_larger, starts, 0), total), _larger(reduce(_smaller, stops, total), 0)
    first, last = (_on_device(dealt.below(x), (1, 1), q.device) for x in ends)
    return first[:, None, :, None], last[:, None, :, None]


def _larger(a: Any, b: Any) -> Any:
    """The larger one of two ints or tensors."""
    if isinstance(a, Tensor):
        return a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)


def _smaller(a: Any, b: Any) -> Any:
    """The smaller one of two ints or tensors."""
    if isinstance(a, Tensor):
        return a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, Tensor) else min(a, b)


def _on_device(x: int | Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
    """An int32 tensor: `x` itself, or one of `shape` where each number is `x`."""
    if isinstance(x, Tensor):
        return x.int()
    return torch.full(shape, x, dtype=torch.int32, device=device)


def _runs(dealt: Dealt, call: Decoding) -> KV:
    """`Operands.q_runs` and `k_runs`: queries are the last tokens, keys are blocks."""
    q, k_cache = call.operands[:2]
    firsts = torch.arange(0, max(k_cache.shape[1], 1), dealt.block, device=q.device)
    k_runs = torch.stack([firsts, dealt.at(firsts)], -1).int()
    q_runs = k_runs.new_full((q.shape[0], len(firsts), 2), NO_RUN)
    q_runs[:, 0, 0] = 0
    q_runs[:, 0, 1] = call.total - q.shape[1]
    return q_runs, k_runs.expand(q.shape[0], -1, -1)


def merged(wire: Wire, out: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Exchange the partial results and merge those of all ranks in the order of ranks.

    Args:
        out: (batch, seq_q, heads, value_head_dim).
        lse: (batch, heads, seq_q), in the dtype of out.
        dtype: that of the merged output.

    Returns:
        out, and lse (batch, seq_q, heads).
    """
    # One message holds the outputs and their statistics.
    size = out.numel()
    length = size + lse.numel()
    every = out.new_empty(wire.ranks, length)
    parts = every.unbind()
    torch.cat((out.reshape(-1), lse.reshape(-1)), out=parts[wire.rank])
    others = {rank: part for rank, part in enumerate(parts) if rank != wire.rank}
    wire.exchange(dict.fromkeys(others, parts[wire.rank]), others, "partial results").wait()
    batch, queries, heads, dim = out.shape
    strides = queries * heads * dim, heads * dim, dim, 1
    outs = every.as_strided((wire.ranks, *out.shape), (length, *strides))
    strides = length, heads * queries, 1, queries
    lses = every.as_strided((wire.ranks, batch, queries, heads), strides, size)
    return merge_parts(outs, lses, dtype)
