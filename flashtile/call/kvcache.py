"""Calls over a key-value cache, contiguous or paged: their checks and their description.

A cache row holds one sequence. The token at position ``p`` is ``cache[row, p]`` or, in a paged
cache, ``cache[page_table[b, p // page_size], p % page_size]``. Lengths stay on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import autograd
from ..gpu import workspace
from ..masks import structure
from ..ops.append import op as append
from ..problem import FLOAT8, AttentionProblem, Operands, Options
from . import checks, layouts, memo, prefill
from .absorbed import described_operands
from .prepare import Arguments, decide, with_arguments, with_numbers_read, with_tensors


class Cache(NamedTuple):
    """The cache as the caller gave it."""

    k: Tensor
    v: Tensor
    page_table: Tensor | None
    batch_idx: Tensor | None
    leftpad: Tensor | None
    seqlens: int | Tensor | None

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can have."""
        if self.page_table is not None:
            if self.k.shape[0] == 0:  # without pages every number in the table points nowhere
                return 0
            return self.page_table.shape[1] * self.k.shape[1]
        return self.k.shape[1]

    @property
    def rows(self) -> tuple[Tensor | None, Tensor | None]:
        """The pages of each sequence of the batch, or the rows of the cache."""
        if self.page_table is None or self.batch_idx is None:
            return self.page_table, self.batch_idx
        rows = self.batch_idx.long().clamp(0, max(self.page_table.shape[0] - 1, 0))
        return self.page_table.index_select(0, rows), None


class NewTokens(NamedTuple):
    """Keys and values to append, dense or packed."""

    k: Tensor | None
    v: Tensor | None
    cu_seqlens: Tensor | None


class Queries(NamedTuple):
    """Queries, dense or packed."""

    q: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int | Tensor | None


class Rotary(NamedTuple):
    """The rotary embedding of the new tokens."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    seqlens: Tensor | None


def workspace_size(
    batch: int,
    seq_q: int,
    heads: int,
    value_head_dim: int,
    num_splits: int = 0,
    device: torch.device | str = "cuda",
) -> int:
    """Bytes of `workspace` that are enough for every call of these sizes and of smaller ones,
    however long the caches are.

    Args:
        batch: sequences at most.
        seq_q: query tokens of each at most; packed queries are at most ``batch * seq_q``.
        heads: query heads.
        value_head_dim: head dim of the values.
        num_splits: as in the calls; with 0 of them, chosen for you, calls of `num_splits=1` may
            use the same memory.
        device: of the calls; 0 bytes on a CPU, where keys are not split.

    Raises:
        ValueError, TypeError: for a size that is no length, and a device that is no GPU or CPU.
    """
    sizes = {"batch": batch, "seq_q": seq_q, "heads": heads, "value_head_dim": value_head_dim}
    for name, size in sizes.items():
        checks.length(name, size)
    checks.splits(num_splits)
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {device}, want a cuda device or cpu")
    return workspace.workspace_size(batch * seq_q, heads, value_head_dim, num_splits, device)


def decided(
    queries: Queries,
    cache: Cache,
    new: NewTokens,
    rotary: Rotary,
    arguments: Arguments,
    backend: str | None,
    out: Tensor | None,
) -> tuple[Operands, Tensor | None, memo.Decision]:
    """A call checked and decided, from memory where nothing new came.

    Returns:
        The operands, which lack the new tokens until they are appended, and `qv`; the lengths
        before the append, int32 (batch,), None for the whole cache; what is decided.
    """
    arguments = with_numbers_read(arguments)
    queries = _with_longest(queries)
    given = ("cache", *queries, *cache, *new, *rotary, *arguments, backend)
    checking = checks.checking_values(given)
    key = memo.key_of((*given, *_strides(cache)))
    decision = memo.recall(key)
    if decision is not None:
        operands, lengths = _described(queries, cache, new, checking)
        if checking:
            check_values(queries, cache, lengths, new, rotary, decision.options)
        operands = with_tensors(operands, arguments)
        if checking:
            checks.values(operands, decision.options)
        checks.output(out, operands)
        checks.workspace(operands, decision.options)
        return operands, lengths, decision
    M = check(queries, cache, new)
    operands, lengths = _described(queries, cache, new, checking)
    checks.absorbed(arguments.qv, queries.q, cache.v)
    check_rotary(rotary, operands, new)
    operands = described_operands(operands, arguments.qv)
    operands, options = with_arguments(operands, M, cache.capacity, arguments)
    if checking:
        check_values(queries, cache, lengths, new, rotary, options)
    decision = decide(operands, options, backend, out)
    packed = prefill.packed_problem(decision.problem, operands, backend)
    if packed is not None:
        decision = memo.Decision(packed, packed.options)
    memo.remember(key, decision)
    return operands._replace(q=queries.q, k=cache.k), lengths, decision


def _strides(cache: Cache) -> tuple[int, ...]:
    """How the caches lie, which decides whether they are packed sequences as they are."""
    caches = (x for x in (cache.k, cache.v) if isinstance(x, Tensor) and not x.is_nested)
    return tuple(stride for x in caches for stride in x.stride())


def check(queries: Queries, cache: Cache, new: NewTokens) -> int:
    """Check how queries, cache and new tokens fit; the longest query."""
    for name, x in (("k", new.k), ("v", new.v)):
        if x is not None:
            checks.tensor(name, x)
    if (new.k is None) != (new.v is None):
        missing, given = ("k", "v") if new.k is None else ("v", "k")
        raise ValueError(f"{missing}: got None with {given} given, want both or neither")
    batch, max_seqlen_q = _check_queries(queries, cache)
    _check_cache(queries.q, cache, batch)
    if _lengths(cache, new, batch) is not None and new.k is not None:
        _check_new(queries.q, cache, new, batch)
    return max_seqlen_q


def _described(
    queries: Queries, cache: Cache, new: NewTokens, checking: bool
) -> tuple[Operands, Tensor | None]:
    """The operands of a checked call, and the lengths before the append."""
    starts = queries.cu_seqlens
    batch = queries.q.shape[0] if starts is None else starts.shape[0] - 1
    lengths = used = _lengths(cache, new, batch)
    if lengths is None and (cache.page_table is not None or cache.leftpad is not None):
        used = torch.full((batch,), cache.capacity, dtype=torch.int32, device=cache.k.device)
    elif lengths is not None and checking:
        # Elsewhere the append says so, which is a kernel less.
        used = (lengths + _added(new)).int()
    page_table, cache_batch_idx = cache.rows
    operands = Operands(
        q=queries.q,
        k=cache.k,
        v=cache.v,
        cu_seqlens_q=starts,
        seqused_k=used,
        page_table=page_table,
        cache_batch_idx=cache_batch_idx,
        leftpad_k=cache.leftpad,
    )
    return operands, lengths


def _with_longest(queries: Queries) -> Queries:
    """Packed queries with the longest length as a number."""
    q, cu_seqlens, longest = queries
    if cu_seqlens is None or type(longest) is int:
        return queries
    longest = layouts.longest("max_seqlen_q", longest, "cu_seqlens_q", cu_seqlens, q)
    return queries._replace(max_seqlen=longest)


def _check_queries(queries: Queries, cache: Cache) -> tuple[int, int]:
    """Batch and longest query."""
    names = "q k_cache v_cache"
    keys = "cache_rows, capacity, kv_heads, head_dim" if cache.page_table is None else checks.PAGES
    if queries.cu_seqlens is None:
        layout = "batch, seq_q, heads, head_dim"
        checks.qkv(queries.q, cache.k, cache.v, layout, keys, names, takes_float8_keys=True)
        return queries.q.shape[0], queries.q.shape[1]
    layout = "total_q, heads, head_dim"
    checks.qkv(queries.q, cache.k, cache.v, layout, keys, names, takes_float8_keys=True)
    checks.cumulative("cu_seqlens_q", queries.cu_seqlens, queries.q)
    batch = queries.cu_seqlens.shape[0] - 1
    return batch, checks.length("max_seqlen_q", queries.max_seqlen)


def _check_cache(q: Tensor, cache: Cache, batch: int) -> None:
    checks.per_sequence("cache_batch_idx", cache.batch_idx, q, batch)
    checks.per_sequence("cache_leftpad", cache.leftpad, q, batch)
    if cache.page_table is not None:
        checks.paged(cache.page_table, cache.k, batch, has_rows=cache.batch_idx is not None)
    elif cache.batch_idx is not None and cache.k.shape[0] == 0 < batch:
        raise ValueError("k_cache: got no rows, want those that cache_batch_idx points at")
    elif cache.batch_idx is None and cache.k.shape[0] != batch:
        raise ValueError(
            f"k_cache: got {cache.k.shape[0]} rows for a batch of {batch}; pass cache_batch_idx "
            "to choose rows"
        )


def _lengths(cache: Cache, new: NewTokens, batch: int) -> Tensor | None:
    """Tokens in the cache before the append, int32 (batch,)."""
    seqlens, q_device = cache.seqlens, cache.k.device
    if seqlens is None:
        if new.k is not None:
            raise ValueError(
                "cache_seqlens: got None, want where to append k and v, an int or (batch,) int32"
            )
        return None
    if isinstance(seqlens, Tensor) and seqlens.dim() > 0:
        checks.per_sequence("cache_seqlens", seqlens, cache.k, batch)
        return seqlens.int()
    if isinstance(seqlens, Tensor):
        checks.index_tensor("cache_seqlens", seqlens, cache.k)
        return seqlens.int().expand(batch)
    count = checks.length("cache_seqlens", seqlens)
    added = (
        new.k.shape[1] if new.k is not None and new.cu_seqlens is None and new.k.dim() == 4 else 0
    )
    if count + added > cache.capacity:
        raise ValueError(
            f"cache_seqlens: got {count} with {added} new tokens, but the cache holds "
            f"{cache.capacity}"
        )
    return torch.full((batch,), count, dtype=torch.int32, device=q_device)


def _check_new(q: Tensor, cache: Cache, new: NewTokens, batch: int) -> None:
    packed = new.cu_seqlens is not None
    layout = "total_new, kv_heads, head_dim" if packed else "batch, seq_new, kv_heads, head_dim"
    for name, x, row in (("k", new.k, cache.k), ("v", new.v, cache.v)):
        checks.rank(name, x, layout)
        assert x is not None
        if x.shape[-2:] != row.shape[-2:]:
            raise ValueError(
                f"{name}: got (heads, head_dim) {tuple(x.shape[-2:])}, want "
                f"{tuple(row.shape[-2:])}, as {name}_cache"
            )
        if x.dtype != q.dtype:  # which is the cache's, but for float8 caches
            raise TypeError(f"{name}: got dtype {x.dtype}, want {q.dtype}, the dtype of q")
        checks.same_device(name, x, q)
    assert new.k is not None and new.v is not None
    if new.k.shape[:-1] != new.v.shape[:-1]:
        raise ValueError(
            f"v: got shape {checks.shape_of(new.v)}, want as many tokens as k, "
            f"{checks.shape_of(new.k)}"
        )
    if packed:
        checks.cumulative("cu_seqlens_k_new", new.cu_seqlens, q)
        assert new.cu_seqlens is not None
        checks.shape("cu_seqlens_k_new", new.cu_seqlens, (batch + 1,), "one longer than the batch")
    elif new.k.shape[0] != batch:
        raise ValueError(f"k: got batch {new.k.shape[0]}, want {batch}, the batch of q")


def check_rotary(rotary: Rotary, operands: Operands, new: NewTokens) -> None:
    """The rotary tables fit the queries, and there are new tokens to rotate."""
    checks.flag("rotary_interleaved", rotary.interleaved)
    if rotary.cos is None and rotary.sin is None:
        return
    if new.k is None:
        raise ValueError(
            "rotary_cos: rotates new tokens, but k and v are None; pass the new keys and values"
        )
    for name, x in (("rotary_cos", rotary.cos), ("rotary_sin", rotary.sin)):
        checks.rank(name, x, "positions, rotary_dim / 2")
        assert x is not None
        if not x.is_floating_point():
            raise TypeError(f"{name}: got dtype {x.dtype}, want a floating dtype")
        checks.same_device(name, x, operands.q)
    assert rotary.cos is not None and rotary.sin is not None
    checks.shape("rotary_sin", rotary.sin, tuple(rotary.cos.shape), "the shape of rotary_cos")
    if rotary.cos.shape[0] < 1 or 2 * rotary.cos.shape[1] > operands.q.shape[-1]:
        raise ValueError(
            f"rotary_cos: got shape {checks.shape_of(rotary.cos)}, want at least one position "
            "and at most "
            f"head_dim / 2 = {operands.q.shape[-1] // 2} columns"
        )
    if rotary.seqlens is not None:
        batch = operands.seqused_k.shape[0] if operands.seqused_k is not None else 0
        checks.per_sequence("rotary_seqlens", rotary.seqlens, operands.q, batch)


def check_values(
    queries: Queries,
    cache: Cache,
    lengths: Tensor | None,
    new: NewTokens,
    rotary: Rotary,
    options: Options,
) -> None:
    """Checks that read rows and lengths on the host; see `checks.checking_values`."""
    if cache.batch_idx is not None:
        rows = cache.k if cache.page_table is None else cache.page_table
        checks.within("cache_batch_idx", cache.batch_idx, rows.shape[0])
    if lengths is None:
        return
    if new.k is not None and new.cu_seqlens is not None:
        total = new.k.shape[0]
        checks.cumulative_values("cu_seqlens_k_new", new.cu_seqlens, total, "k")
    added = _added(new)
    before, after = lengths.tolist(), (lengths + added).tolist()
    if cache.page_table is not None:
        page_size = cache.k.shape[1] if cache.k.shape[0] > 0 else 0
        with_new = "cache_seqlens" if new.k is None else "cache_seqlens with the new tokens"
        checks.lengths_in_pages(with_new, after, cache.page_table, page_size)
    if min(before, default=0) < 0 or max(after, default=0) > cache.capacity:
        raise ValueError(
            f"cache_seqlens: got {before}, {after} with the new tokens, want at least 0 and at "
            f"most {cache.capacity}, what the cache holds"
        )
    if rotary.cos is not None and before:
        base = lengths if rotary.seqlens is None else rotary.seqlens
        if int(base.min()) < 0:
            raise ValueError(f"rotary_seqlens: got {base.tolist()}, want positions, 0 or more")
        needed = max(int((base + n).max()) for n in (added, _positions(queries, options)))
        if needed > rotary.cos.shape[0]:
            raise ValueError(
                f"rotary_cos: got {rotary.cos.shape[0]} positions, want at least {needed}, for the "
                "last new token and the last query"
            )


def _positions(queries: Queries, options: Options) -> int | Tensor:
    """Positions from the first on at which each sequence's queries are rotated."""
    starts = queries.cu_seqlens
    count = queries.q.shape[1] if starts is None else starts.diff()
    return count if _is_local(options) else count > 0


def _is_local(options: Options) -> bool:
    """Whether every query has a position of its own: with a causal mask, a window or a chunk."""
    return bool(structure(options.window_left, options.window_right, options.attention_chunk))


def _added(new: NewTokens) -> int | Tensor:
    """New tokens of each sequence."""
    if new.k is None:
        return 0
    return new.k.shape[1] if new.cu_seqlens is None else new.cu_seqlens.diff()


def attend(
    problem: AttentionProblem, operands: Operands, options: Options
) -> tuple[Tensor, Tensor]:
    """(out, lse) of what `decided` and `rotate_and_append` made, shaped as the queries came."""
    if problem.layout != "packed":
        return autograd.attend(problem, operands, options)
    out, lse = autograd.attend(problem, prefill.as_packed(operands, problem), options)
    if operands.cu_seqlens_q is not None:
        return out, lse
    return layouts.as_batch(out, lse, problem.B, problem.M)


def rotate_and_append(
    operands: Operands,
    options: Options,
    lengths: Tensor | None,
    cache: Cache,
    new: NewTokens,
    rotary: Rotary,
) -> Operands:
    """Rotate queries and new keys, write keys and values into the cache.

    Args:
        options: with a causal mask, a window or a chunk every query has its own position;
            otherwise all are rotated like the first one, as in FlashAttention-2.
        lengths: int32 (batch,), where each sequence's new tokens go.
    """
    k, v = new.k, new.v
    if k is None or v is None or lengths is None:
        return operands
    cos, sin = rotary.cos, rotary.sin
    descales = (operands.k_descale, operands.v_descale)
    if cache.k.dtype not in FLOAT8 or k.dtype in FLOAT8:
        descales = (None, None)  # stored as they are
    places = (new.cu_seqlens, operands.page_table, operands.cache_batch_idx, *descales)
    store, turn_and_store = _appending(operands, cache, k, v)
    if cos is None or sin is None:
        used = store(cache.k, cache.v, k, v, lengths, *places)
        return operands._replace(seqused_k=used)
    base = lengths if rotary.seqlens is None else rotary.seqlens
    q, used = turn_and_store(
        operands.q, cache.k, cache.v, k, v, cos, sin, lengths, base, operands.cu_seqlens_q,
        *places, rotary.interleaved, _is_local(options),
    )  # fmt: skip
    return operands._replace(q=q, seqused_k=used)


def _appending(operands: Operands, cache: Cache, k: Tensor, v: Tensor) -> tuple[Any, Any]:
    """Call the two ops or, on a GPU without a tracer or dispatch mode, their functions directly."""
    tensors = (*operands, k, v)
    transforms = torch._C._are_functorch_transforms_active()
    if not cache.k.is_cuda or transforms or autograd.is_watched(tensors):
        ops = torch.ops.flashtile
        return ops.kvcache_append, ops.kvcache_rotate_append
    return append.append_on_gpu, append.rotate_and_append_on_gpu
