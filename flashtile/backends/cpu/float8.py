"""Attention on float8 inputs with the roundings of the tensor cores.

FlashAttention-3 (Shah et al. 2024), section 3.3. Products of e4m3 numbers are exact and are added
up in float32. The weights ``P = exp(S - m)``, at most 1, are multiplied by 2**8 and rounded to e4m3
before the product with V. They stay below e4m3's largest number, 448, and weights down to 2**-14
stay out of its subnormal numbers. The row sums add the weights before rounding.

The row maximum is lazy: ``m`` does not change while scores exceed it by at most `SLACK`, because
then the output so far need not be rescaled. The weights are still below 448, and the row sum uses
the same m. A rounding depends on the row maximum so far, so blocks and their order are those of the
kernel: `FLOAT8_KEY_BLOCK` keys, the last block first.

Per-head and per-block scales are applied outside of the products: those of Q and K multiply S, and
the output so far is kept in units of the scale of the last block of V that was added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...problem import FLOAT8_KEY_BLOCK, FLOAT8_QUERY_BLOCK, Operands
from . import tiles
from .segments import KeyRun, Segment, cut
from .tiles import INFINITY, TileProblem, fold, unfold

WEIGHT = 2.0**8  # factor on the weights before they are rounded
SLACK = 0.75 * math.log(2)  # by how much a score may exceed the lazy row maximum; 2**8.75 is 431


class Scales(NamedTuple):
    """Scales of float8 inputs; they broadcast over batch, query heads, rows and keys."""

    q: Tensor  # (batch, heads, M or 1, 1)
    k: Tensor  # (batch, heads, 1, N or 1)
    v: Tensor  # (batch, heads, 1, N or 1); equal within a block of keys


def scales(operands: Operands, segment: Segment) -> Scales:
    """The scales of one segment."""
    q = query_factors(operands.q_descale, segment)
    k, v = (
        per_head(key_factors(descale, segment), segment)
        for descale in (operands.k_descale, operands.v_descale)
    )
    return Scales(q, k.mT, v.mT)


def query_factors(descale: Tensor | None, segment: Segment) -> Tensor:
    """The scale of every query of a segment: (batch, heads, M or 1, 1)."""
    if descale is None or descale.dim() == 2:
        return per_head(key_factors(descale, segment), segment)
    factors = descale[segment.batch, segment.heads].float()
    rows = factors.repeat_interleave(FLOAT8_QUERY_BLOCK, dim=2)
    return rows[:, :, : segment.mask.visibility.M, None]


def key_factors(descale: Tensor | None, segment: Segment) -> Tensor:
    """The scale of every key of a segment: (batch, kv_heads, N or 1, 1)."""
    if descale is None:
        return torch.ones(1, 1, 1, 1)
    factors = descale[segment.batch, segment.kv_heads].float()
    if descale.dim() == 2:
        return factors[:, :, None, None]
    rows = factors.repeat_interleave(FLOAT8_KEY_BLOCK, dim=2)
    return rows[:, :, : segment.mask.visibility.N, None]


def per_head(factors: Tensor, segment: Segment) -> Tensor:
    """Repeat the scales of key heads for their query heads."""
    heads = segment.heads.stop - segment.heads.start
    return factors.repeat_interleave(heads // factors.shape[1], dim=1)


def forward(tp: TileProblem, scale: Scales) -> tuple[Tensor, Tensor]:
    """O (batch, heads, M, Dv) and L (batch, heads, M), as in `tiles.forward`; Q, K and V hold e4m3
    numbers without their scales.
    """
    batch, heads, M, _ = tp.Q.shape
    O_all = tp.Q.new_empty(batch, heads, M, tp.V.shape[-1])
    L_all = tp.Q.new_empty(batch, heads, M)
    for m0, m1 in tp.mask.query_tiles(tp.BLOCK_M):
        Q = fold(tp.Q[:, :, m0:m1], tp.K)
        O = Q.new_zeros(*Q.shape[:-1], tp.V.shape[-1])
        m, l = tiles.first_statistics(tp, m1 - m0)
        unit = O.new_ones(1, 1, 1, 1)
        q_factor = rows_of(scale.q, 2, m0, m1) * tp.score.options.softmax_scale
        for run in blocks(tp, m0, m1):
            K, V = tiles.keys_and_values(tp, m0, m1, run)
            factor = q_factor * rows_of(scale.k, 3, run.start, run.stop)
            S, _ = tiles.scores(tp, unfold(Q @ K.mT, tp.Q) * factor, m0, m1, run)
            largest = S.amax(-1, keepdim=True)
            m_new = torch.where(largest - m > SLACK, largest, m)
            pivot = m_new.masked_fill(m_new == -INFINITY, 0.0)
            P = tiles.exp_(S.sub_(pivot))
            rescale = torch.exp(m - pivot)
            l = rescale * l + P.sum(-1, keepdim=True)
            if tp.dropout is not None:
                P.mul_(tp.dropout.kept(m0, m1, run))
            v_factor = rows_of(scale.v, 3, run.start, run.start + 1)
            O.mul_(fold(rescale * (unit / v_factor), tp.K))
            O.add_(fold(rounded(P * WEIGHT), tp.K) @ V)
            m, unit = m_new, v_factor
        seen = l != 0  # NaN was seen
        normalisation = unit / (WEIGHT * tp.keep) / l.masked_fill(~seen, 1.0)
        O_all[:, :, m0:m1] = unfold(O, tp.Q) * normalisation
        L_all[:, :, m0:m1] = torch.where(seen, m + torch.log(l), -INFINITY).squeeze(-1)
    return O_all, L_all


def rounded(x: Tensor) -> Tensor:
    """`x`, which is not negative, rounded to e4m3 with saturation."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(max=largest).to(torch.float8_e4m3fn).to(x.dtype)


def rows_of(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """`x[start:stop]` along `dim`, or `x` if it is broadcast along `dim`."""
    return x.narrow(dim, start, stop - start) if x.shape[dim] > 1 else x


def blocks(tp: TileProblem, m0: int, m1: int) -> Iterator[KeyRun]:
    """The blocks of keys that some row of ``[m0, m1)`` sees, the last first.

    They start at multiples of the block size, as in the kernel. With a block mask or
    spans, which the kernel does not support, they also start where a tile or a span starts.
    """
    if tp.mask.layout is not None or tp.mask.spans is not None:
        for run in reversed(list(tp.mask.key_runs(m0, m1, tp.BLOCK_N))):
            yield from reversed(list(cut(run, tp.BLOCK_N)))
        return
    visibility = tp.mask.visibility
    start, full_stop = visibility.key_range(m0)
    full_start, stop = visibility.key_range(m1 - 1)
    first = start // tp.BLOCK_N * tp.BLOCK_N
    for n0 in reversed(range(first, stop, tp.BLOCK_N)):
        n1 = min(n0 + tp.BLOCK_N, visibility.N)
        inside = full_start <= n0 and n1 <= full_stop
        yield KeyRun(n0, n1, None if inside else visibility.dense((m0, m1), (n0, n1)))
