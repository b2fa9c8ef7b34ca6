"""A plain zigzag ring, as a yardstick: keys go from rank to rank, partial results are merged.

Rank r holds parts r and 2 ranks - 1 - r of the sequence. The partial results have the inputs' dtype
and are merged by their log-sum-exp in separate operations; autograd sends the gradients of keys
back the way they came (ring-flash-attention's zigzag ring, Striped Attention's balance).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flashtile


def zigzag_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of this rank's (batch, tokens, heads, head_dim); all ranks call it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    half = q.shape[1] // 2
    out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True)
    out = out.float()
    for hop in range(1, ranks):
        k, v = _Passed.apply(k), _Passed.apply(v)
        if hop <= rank:  # keys of an earlier rank: its first half lies before all queries
            part, part_lse = flashtile.attention(q, k[:, :half], v[:, :half], return_lse=True)
            out, lse = _merged(out, lse, part, part_lse)
        else:  # of a later rank: all its keys lie before the second half of the queries
            part, part_lse = flashtile.attention(q[:, half:], k, v, return_lse=True)
            late, late_lse = _merged(out[:, half:], lse[:, :, half:], part, part_lse)
            out = torch.cat([out[:, :half], late], dim=1)
            lse = torch.cat([lse[:, :, :half], late_lse], dim=2)
    return out.to(q.dtype)


def _merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(lse, part_lse)
    old, new = ((x - total).exp().mT[..., None] for x in (lse, part_lse))
    return out * old + part.float() * new, total


class _Passed(torch.autograd.Function):
    """The previous rank's tensor; its gradient goes to the previous rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _shifted(x, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _shifted(gradient, -1)


def _shifted(x: Tensor, by: int) -> Tensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    operations = [
        dist.P2POp(dist.isend, sent, (rank + by) % ranks),
        dist.P2POp(dist.irecv, received, (rank - by) % ranks),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received
