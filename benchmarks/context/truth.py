"""Attention and its gradients in float64, by the definition, of a few heads of a long sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 256  # queries whose scores are in memory at a time


class Results(NamedTuple):
    """(tokens, heads, head_dim) each."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def exact(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lengths: Sequence[int], window: int = 0
) -> Results:
    """Causal attention of documents, packed one after the other, with one key head.

    Args:
        q, dout: (tokens, heads, head_dim).
        k, v: (tokens, 1, head_dim).
        window: keys that a query sees before its own; 0 is all.
    """
    q, k, v, dout = (x.double() for x in (q, k[:, 0], v[:, 0], dout))
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    scale = q.shape[-1] ** -0.5
    begin = 0
    for length in lengths:
        for start in range(begin, begin + length, ROWS):
            stop = min(start + ROWS, begin + length)
            first = max(begin, start - window) if window else begin
            mine, keys = slice(start, stop), slice(first, stop)
            # (heads, queries, keys)
            scores = torch.einsum("ihd,jd->hij", q[mine], k[keys]).mul_(scale)
            distance = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(
                first, stop, device=q.device
            )
            hidden = (distance < 0) | (distance > (window or length))
            p = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            out[mine] = torch.einsum("hij,jd->ihd", p, v[keys])
            dp = torch.einsum("ihd,jd->hij", dout[mine], v[keys])
            delta = (dout[mine] * out[mine]).sum(-1).mT.unsqueeze(-1)
            ds = p * (dp - delta) * scale
            dq[mine] = torch.einsum("hij,jd->ihd", ds, k[keys])
            dk[keys] += torch.einsum("hij,ihd->jd", ds, q[mine])
            dv[keys] += torch.einsum("hij,ihd->jd", p, dout[mine])
        begin += length
    return Results(out, dq, dk.unsqueeze(1), dv.unsqueeze(1))
