"""Convert all layouts of `attention_varlen` to one: sequences packed back to back.

Queries and keys may each be packed, (total, heads, head_dim) with cumulative lengths, or padded,
(batch, seq, heads, head_dim); keys may be in pages. A padded tensor is viewed as a packed one whose
sequences all have the padded length, and the results are viewed as padded again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks
from .layouts import Packed


class PackedCall(NamedTuple):
    """A call whose queries and keys are packed."""

    qkv: tuple[Tensor, Tensor, Tensor]
    qv: Tensor | None
    layout: Packed
    padded: tuple[int, int] | None  # (batch, seq_q) if the queries were padded


def as_packed(
    q: Any,
    k: Any,
    v: Any,
    qv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    page_table: Any,
) -> PackedCall:
    """Convert a call with any layout to a call over packed sequences.

    Raises:
        ValueError, TypeError: queries and keys have different batches, or a length cannot be read.
    """
    M, N = max_seqlen_q, max_seqlen_k
    padded = None
    if cu_seqlens_q is None or cu_seqlens_k is None:
        batch = checks.padded(q, k, v, qv, cu_seqlens_q, cu_seqlens_k, page_table)
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
    M = checks.longest("max_seqlen_q", M, "cu_seqlens_q", cu_seqlens_q, q)
    N = checks.longest("max_seqlen_k", N, "cu_seqlens_k", cu_seqlens_k, q)
    return PackedCall((q, k, v), qv, Packed(cu_seqlens_q, cu_seqlens_k, M, N, page_table), padded)


def starts(batch: int, length: int, device: torch.device) -> Tensor:
    """Cumulative lengths of a padded batch."""
    dtype = torch.int32 if batch * length < 2**31 else torch.int64
    return torch.arange(batch + 1, dtype=dtype, device=device) * length


def tokens(name: str, x: Any) -> Any:
    """A padded tensor (batch, seq_q, heads, value_head_dim) viewed as packed; None stays None."""
    if x is None:
        return None
    checks.tensor(name, x, dims="batch, seq_q, heads, value_head_dim")
    return x.flatten(0, 1)


def as_batch(out: Tensor, lse: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """View the results of packed queries of equal lengths as a batch: (batch, seq, heads,
    head_dim) and (batch, heads, seq).
    """
    by_sequence = lse.unflatten(1, (batch, length))
    return out.unflatten(0, (batch, length)), by_sequence.transpose(0, 1).contiguous()
