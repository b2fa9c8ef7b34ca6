"""Cached calls of sequences that begin with the same tokens: their keys are read once for all.

The queries of the whole batch attend to the prefix as if they belonged to one sequence. The queries
of each sequence attend to its own keys after the prefix. The two results are merged by their
log-sum-exp (Hydragen: Juravsky et al. 2024, section 3; cascade inference: Ye et al. 2024).

In the part of the prefix every query has a position of its own, which its row does not say. A
window becomes spans of keys there. ALiBi becomes a bias of the keys: all of them come before the
query, whose own position is then one number for all its scores, which only moves its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..masks import Spans
from ..ops.merge import merge_parts
from ..problem import Operands, Options
from . import cached, checks
from .layouts import Cached
from .options import SCORE_NUMBERS
from .prepare import Prepared, prepare

# Options that do not depend on the positions of keys, or only as said above; others are refused.
_ALLOWED = SCORE_NUMBERS | {
    "causal", "window_size", "alibi_slopes", "sink", "qv", "k_descale", "v_descale", "num_splits",
    "batch_invariant", "pack_gqa", "sm_margin", "scheduler_metadata",
}  # fmt: skip
# The prefix has its own way of these; a sink counts once.
_LEFT_TO_THE_REST = ("causal", "window_size", "alibi_slopes", "sink")


def checked_length(prefix_len: Any, keywords: Mapping[str, Any]) -> int:
    """The length of a prefix, after a check of the options that a caller gives, by their names.

    Raises:
        TypeError, ValueError: it is not a number of tokens.
        NotImplementedError: an option cannot be used with a prefix.
    """
    prefix_len = checks.length("shared_prefix_len", prefix_len)
    for name, value in keywords.items():
        if prefix_len > 0 and value is not None and name not in _ALLOWED:
            raise _refusal(name)
    return prefix_len


def append_and_attend(
    call: Prepared, prefix_len: int, backend: str | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a cached call whose sequences share their first `prefix_len` keys.

    Raises:
        ValueError: the prefix is longer than the cache or than a sequence, or ends inside a page.
        NotImplementedError: an option of the call cannot be used with a prefix.
    """
    layout = call.layout
    assert isinstance(layout, Cached)
    if prefix_len > 0:
        _check(call, layout, prefix_len)
    # Reading the prefix once merges its part of a row with the rest, where other calls do not.
    is_whole = prefix_len == 0 or call.problem.options.batch_invariant
    if is_whole or layout.batch(call.operands.q) < 2:
        return cached.append_and_attend(call)
    operands = cached.rotate_and_append(call)
    parts = (
        _attend_to_prefix(operands, call, prefix_len, backend),
        _attend_to_suffix(operands, call, layout, prefix_len, backend),
    )
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out, lse = merge_parts(outs, lses, outs.dtype)
    if layout.cu_seqlens_q is not None:
        return out, lse.T
    batch, seq_q = operands.q.shape[:2]
    return out.unflatten(0, (batch, seq_q)), lse.unflatten(0, (batch, seq_q)).transpose(1, 2)


def _attend_to_prefix(
    operands: Operands, call: Prepared, prefix_len: int, backend: str | None
) -> tuple[Tensor, Tensor]:
    """out (total_q, heads, head_dim) and lse (total_q, heads) of all queries over the prefix, which
    is read where the first sequence has it.
    """
    q, k, v = operands[:3]
    table, rows = operands.page_table, operands.cache_batch_idx
    if table is not None:
        table = table[:1, : prefix_len // k.shape[1]]
    else:
        k, v = k[:, :prefix_len], v[:, :prefix_len]
    layout = Cached(prefix_len, table, rows if rows is None else rows[:1])
    if table is None and rows is None:
        k, v = k[:1], v[:1]
    keywords = {name: x for name, x in call.keywords.items() if name not in _LEFT_TO_THE_REST}
    for name in ("k_descale", "v_descale"):
        if keywords.get(name) is not None:
            keywords[name] = keywords[name][:1]
    if keywords.get("qv") is not None:
        keywords["qv"] = _as_one_sequence(keywords["qv"])
    positions, options = _positions(operands, call), call.problem.options
    if options.window_left is not None or (options.window_right or 0) < 0:
        # The window may leave out keys of the prefix.
        keywords["mask"] = _spans(positions, options, prefix_len)
    slopes = operands.alibi_slopes
    if slopes is not None:
        slopes = slopes.to(torch.promote_types(q.dtype, torch.float32))
        key = torch.arange(1 - prefix_len, 1, device=q.device)
        # As seen from the last key of the prefix.
        keywords["bias"] = (slopes[:, None] * key)[:, None]
    out, lse = cached.append_and_attend(
        prepare((_as_one_sequence(q), k, v), layout, keywords, backend)
    )
    lse = lse[0].T
    if slopes is not None:
        lse = lse - slopes * (positions - (prefix_len - 1))[:, None]
    return out[0], lse


def _positions(operands: Operands, call: Prepared) -> Tensor:
    """(total_q,): the position of every query in its sequence. Queries of no sequence, which packed
    ones may have at their end, have any.
    """
    layout, q, lengths = call.layout, operands.q, operands.seqused_k
    assert isinstance(layout, Cached)
    if lengths is None:
        capacity = layout.capacity(operands.k)
        lengths = torch.full((layout.batch(q),), capacity, device=q.device)
    if layout.cu_seqlens_q is None:
        row = torch.arange(q.shape[1], device=q.device) - q.shape[1]
        return (lengths[:, None] + row).flatten()
    row, ends = torch.arange(q.shape[0], device=q.device), layout.cu_seqlens_q[1:]
    sequence = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
    return lengths[sequence] - ends[sequence] + row


def _spans(positions: Tensor, options: Options, prefix_len: int) -> Spans:
    """What each query's window leaves of the prefix."""
    left, right = options.window_left, options.window_right
    starts = torch.zeros_like(positions) if left is None else positions - left
    stops = torch.full_like(positions, prefix_len) if right is None else positions + right + 1
    limits = (x.clamp(0, prefix_len).int()[None, None, :, None] for x in (starts, stops))
    return Spans(*limits)


def _attend_to_suffix(
    operands: Operands, call: Prepared, layout: Cached, prefix_len: int, backend: str | None
) -> tuple[Tensor, Tensor]:
    """The same of each sequence's queries over its own keys after the prefix."""
    q, k, v = operands[:3]
    table, lengths = operands.page_table, operands.seqused_k
    if table is not None:
        table = table[:, prefix_len // k.shape[1] :]
    else:
        k, v = k[:, prefix_len:], v[:, prefix_len:]
    suffix = Cached(
        lengths if lengths is None else lengths - prefix_len,
        table,
        operands.cache_batch_idx,
        cu_seqlens_q=layout.cu_seqlens_q,
        max_seqlen_q=layout.max_seqlen_q,
    )
    out, lse = cached.append_and_attend(prepare((q, k, v), suffix, call.keywords, backend))
    if layout.cu_seqlens_q is not None:
        return out, lse.T
    return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def _as_one_sequence(x: Tensor) -> Tensor:
    """(1, total_q, heads, head_dim), from packed or padded queries."""
    return x.reshape(1, -1, *x.shape[-2:])


def _check(call: Prepared, layout: Cached, prefix_len: int) -> None:
    """Raise unless the call can be made in two parts; nothing has been written yet."""
    operands, options, keywords = call.operands, call.problem.options, call.keywords
    if options.attention_chunk > 0:
        raise _refusal("attention_chunk")
    if operands.alibi_slopes is not None and operands.alibi_slopes.dim() > 1:
        raise _refusal("alibi_slopes for each sequence")
    for name in ("k_descale", "v_descale"):
        if keywords.get(name) is not None and keywords[name].dim() > 2:
            raise _refusal(f"{name} for each block of keys")
    if layout.cache_leftpad is not None:
        raise _refusal("cache_leftpad")
    capacity = layout.capacity(operands.k)
    if prefix_len > capacity:
        raise ValueError(
            f"shared_prefix_len: got {prefix_len}, want at most {capacity}, the capacity of the "
            "cache"
        )
    page_size = operands.k.shape[1]
    if layout.page_table is not None and prefix_len % page_size != 0:
        raise ValueError(
            f"shared_prefix_len: got {prefix_len}, want a multiple of {page_size}, the page size"
        )
    if checks.checking_values((*operands, *layout)):
        has_positions = bool(options.facts) or operands.alibi_slopes is not None
        _check_lengths(operands, layout, prefix_len, has_positions)


def _check_lengths(
    operands: Operands, layout: Cached, prefix_len: int, has_positions: bool
) -> None:
    """Raise unless all queries come after the prefix, the first one of each sequence if queries
    have positions of their own, else the last one; and unless all new keys come after it.
    """
    q, lengths = operands.q, operands.seqused_k
    after = layout.capacity(operands.k) if lengths is None else lengths + layout.added
    queries: Any = 1
    if has_positions:
        starts = layout.cu_seqlens_q
        queries = q.shape[1] if starts is None else starts.diff().clamp(min=1)
    seen = torch.as_tensor(after - queries + 1)  # by the first query of each sequence
    shortest = int(seen.min()) if seen.numel() else prefix_len
    if shortest < prefix_len:
        raise ValueError(
            f"shared_prefix_len: got {prefix_len}, but the first query of a sequence sees "
            f"{max(shortest, 0)} keys; all queries have to come after the prefix"
        )
    if lengths is None or layout.k_new is None:
        return
    grown = lengths[(lengths + layout.added) > lengths]
    before = int(grown.min()) if grown.numel() else prefix_len
    if before < prefix_len:
        raise ValueError(
            f"shared_prefix_len: got {prefix_len}, but a sequence has {max(before, 0)} keys before "
            "the append; new keys have to come after the prefix"
        )


def _refusal(name: str) -> NotImplementedError:
    return NotImplementedError(f"shared_prefix_len: cannot be used together with {name}")
