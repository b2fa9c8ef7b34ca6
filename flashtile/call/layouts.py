"""Convert every layout of `attention_varlen` to one: sequences packed back to back.

Queries and keys may each be packed, (total, heads, head_dim) with cumulative lengths, or padded,
(batch, seq, heads, head_dim); keys may lie in pages. A padded tensor is viewed as a packed one
whose sequences all have the length of the dimension, and the results are viewed back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks


class Layout(NamedTuple):
    """The layout as the caller describes it."""

    cu_seqlens_q: Tensor | None = None  # None: padded queries
    cu_seqlens_k: Tensor | None = None  # None: padded keys, or pages
    max_seqlen_q: int | Tensor | None = None
    max_seqlen_k: int | Tensor | None = None
    page_table: Tensor | None = None


class Packed(NamedTuple):
    """Where sequences start and end in packed tensors."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    page_table: Tensor | None = None


class PackedCall(NamedTuple):
    """A call whose queries and keys are packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    qv: Tensor | None
    layout: Packed
    padded: tuple[int, int] | None  # batch and length, if the queries were padded


def as_packed(q: Any, k: Any, v: Any, qv: Any, layout: Layout) -> PackedCall:
    """Convert a call with any layout to a call over packed sequences.

    Raises:
        ValueError, TypeError: queries and keys have different batches, or a length cannot be read.
    """
    cu_seqlens_q, cu_seqlens_k, M, N, page_table = layout
    padded = None
    if cu_seqlens_q is None or cu_seqlens_k is None:
        batch = _check_padded(q, k, v, qv, layout)
        if cu_seqlens_q is None:
            padded = (batch, q.shape[1])
            cu_seqlens_q = starts(batch, q.shape[1], q.device)
            M = q.shape[1] if M is None else M
            q, qv = q.flatten(0, 1), tokens("qv", qv)
        if cu_seqlens_k is None:
            length = k.shape[1]
            if page_table is None:
                k, v = k.flatten(0, 1), v.flatten(0, 1)
            else:
                length *= page_table.shape[1]
            cu_seqlens_k = starts(batch, length, q.device)
            N = length if N is None else N
    M = longest("max_seqlen_q", M, "cu_seqlens_q", cu_seqlens_q, q)
    N = longest("max_seqlen_k", N, "cu_seqlens_k", cu_seqlens_k, q)
    return PackedCall(q, k, v, qv, Packed(cu_seqlens_q, cu_seqlens_k, M, N, page_table), padded)


def starts(batch: int, length: int, device: torch.device) -> Tensor:
    """Cumulative lengths of a padded batch."""
    dtype = torch.int32 if batch * length < 2**31 else torch.int64
    return torch.arange(batch + 1, dtype=dtype, device=device) * length


def tokens(name: str, x: Any) -> Any:
    """A padded tensor (batch, seq_q, heads, value_head_dim) viewed as packed; None stays None."""
    if x is None:
        return None
    checks.rank(name, x, "batch, seq_q, heads, value_head_dim")
    return x.flatten(0, 1)


def as_batch(out: Tensor, lse: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """View the results of packed queries of equal lengths as a batch: (batch, seq, heads,
    head_dim) and (batch, heads, seq)."""
    by_sequence = lse.unflatten(1, (batch, length))
    return out.unflatten(0, (batch, length)), by_sequence.transpose(0, 1).contiguous()


def longest(name: str, given: Any, name_of_starts: str, cu_seqlens: Any, q: Any) -> Any:
    """The longest length: as given, or read from cumulative lengths, which waits for the device."""
    if type(given) is int:
        return given
    if given is not None:
        return checks.integer(name, given)
    checks.tensor("q", q)
    checks.cumulative(name_of_starts, cu_seqlens, q)
    if not checks.is_readable(cu_seqlens):
        raise TypeError(
            f"{name}: got None, want an int where {name_of_starts} cannot be read (torch.compile, "
            "fake and meta tensors)"
        )
    return max(cu_seqlens.diff().tolist(), default=0)


def _check_padded(q: Any, k: Any, v: Any, qv: Any, layout: Layout) -> int:
    """The batch size of a call whose queries or keys have no cumulative lengths."""
    cu_seqlens_q, cu_seqlens_k, _, _, page_table = layout
    batches = {}
    if cu_seqlens_q is None:
        _rank("q", q, "batch, seq_q, heads, head_dim")
        if qv is not None:
            checks.tensor("qv", qv)
            checks.shape("qv", qv, (*q.shape[:-1], qv.shape[-1]), "as q but for the head dim")
        batches["q"] = q.shape[0]
    else:
        checks.rank("q", q, "total_q, heads, head_dim")
        checks.cumulative("cu_seqlens_q", cu_seqlens_q, q)
        batches["cu_seqlens_q"] = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k is not None:
        checks.cumulative("cu_seqlens_k", cu_seqlens_k, q)
        batches["cu_seqlens_k"] = cu_seqlens_k.shape[0] - 1
    elif page_table is None:
        _rank("k", k, "batch, seq_k, kv_heads, head_dim")
        checks.rank("v", v, "batch, seq_k, kv_heads, value_head_dim")
        checks.shape("v", v, (*k.shape[:-1], v.shape[-1]), "as k but for the head dim")
        batches["k"] = k.shape[0]
    else:
        checks.rank("k", k, checks.PAGES)
        checks.rank("page_table", page_table, "batch, pages per sequence")
        batches["page_table"] = page_table.shape[0]
    (first, batch), (second, other) = batches.items()
    if batch != other:
        raise ValueError(f"{second}: is for a batch of {other}, want {batch}, the batch of {first}")
    return batch


def _rank(name: str, x: Any, meaning: str) -> None:
    """Raise unless `x` is padded, with the dimensions that `meaning` lists."""
    if isinstance(x, Tensor) and x.dim() == 3:
        raise ValueError(
            f"cu_seqlens_{name}: got None with {name} of shape {checks.shape_of(x)}, want "
            f"cumulative lengths (batch + 1,), or {name} padded ({meaning})"
        )
    checks.rank(name, x, meaning)
