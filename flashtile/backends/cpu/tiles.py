"""FlashAttention in plain PyTorch, as the papers write it. Read this file first.

The score matrix S (M queries x N keys) is computed in tiles; only one tile of it exists at a time.

- Forward: FlashAttention-2 (Dao 2023), algorithm 1. Each query tile keeps a running row maximum m,
  a running row sum l and an unnormalised output O; a new key tile rescales l and O by
  ``exp(m_old - m_new)`` (online softmax, Milakov and Gimelshein 2018).
- Backward: FlashAttention-2, algorithm 2. The probabilities are recomputed from S and the stored
  log-sum-exp L, and ``delta = rowsum(dO * O)`` equals the row sums of P * dP.

Symbols are the papers': Q, K, V, S, P, O, L (log-sum-exp), m (row maximum), l (row sum), dX
gradients. All tensors are (batch, heads, length, head_dim) in one compute dtype. The query heads of
a group are stacked as extra rows over their key head, so grouped and multi-query attention never
copy K or V.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ... import dropout
from ...problem import LARGE_LSE, Options
from .distances import DistanceGradients, adjacent_columns
from .distances import bias_tile as relative_tile
from .score_function import TileFunction
from .segments import Indices, KeyRun, SegmentMask, without_hidden

INFINITY = float("inf")
LOG2_E = math.log2(math.e)


class ScoreRule(NamedTuple):
    """The rule that turns q.k into a score: scale, softcap, score function, ALiBi, biases."""

    options: Options  # its numbers, such as `softmax_scale` and `softcap`
    alibi_slopes: Tensor | None  # (batch or 1, heads, 1, 1)
    bias: Tensor | None  # (batch or 1, heads or 1, M or 1, N or 1)
    relative_bias: Tensor | None = None  # (heads, 2 R + 1)
    function: TileFunction | None = None


class ScoreSlope(NamedTuple):
    """What the backward needs of the rule: the slope of the softcap, and its results."""

    softcap: Tensor | None
    capped: Tensor | None  # None without a score function


class DropoutRule(NamedTuple):
    """Which probabilities are dropped."""

    p: float
    key: tuple[Tensor, Tensor]  # `dropout.philox_key`
    indices: Indices

    @classmethod
    def of(cls, p: float, rng_state: Tensor, indices: Indices) -> DropoutRule:
        return cls(p, dropout.philox_key(rng_state), indices)

    def kept(self, m0: int, m1: int, run: KeyRun) -> Tensor:
        """Which probabilities of a tile are kept: bool (batch, heads, rows, keys)."""
        found = self.indices
        where = found.batch, found.heads, found.queries(m0, m1), found.keys(run)
        return dropout.keep_mask_of_key(self.key, self.p, *where)


class TileProblem(NamedTuple):
    """One segment's attention: tensors in the compute dtype, mask and rules."""

    Q: Tensor  # (batch, heads, M, D)
    K: Tensor  # (batch, kv_heads, N, D)
    V: Tensor  # (batch, kv_heads, N, Dv)
    mask: SegmentMask
    score: ScoreRule
    dropout: DropoutRule | None
    sink: Tensor | None  # (heads,)
    BLOCK_M: int
    BLOCK_N: int

    @property
    def keep(self) -> float:
        """The probability with which dropout keeps a weight."""
        return 1.0 if self.dropout is None else dropout.keep_rate(self.dropout.p)


class TileGradients(NamedTuple):
    """Gradients of a segment. Those of what segments share are added in place instead."""

    dQ: Tensor
    dK: Tensor
    dV: Tensor


def forward(tp: TileProblem, has_statistics: bool = False) -> tuple[Tensor, ...]:
    """O (batch, heads, M, Dv) and L (batch, heads, M). A row that sees no key has O = 0 and
    L = -inf (with a sink: the sink).

    With `has_statistics`, also the largest capped score of each row and its entropy,
    ``log(l) - h / l`` with a running sum h of P log P: both shaped as L.
    """
    batch, heads, M, _ = tp.Q.shape
    O_all = tp.Q.new_empty(batch, heads, M, tp.V.shape[-1])
    L_all, *found = (tp.Q.new_empty(batch, heads, M) for _ in range(1 + 2 * has_statistics))
    for m0, m1 in tp.mask.query_tiles(tp.BLOCK_M):
        Q = fold(tp.Q[:, :, m0:m1] * tp.score.options.softmax_scale, tp.K)
        O = Q.new_zeros(*Q.shape[:-1], tp.V.shape[-1])
        m, l = first_statistics(tp, m1 - m0)
        largest, h = torch.full_like(m, -INFINITY), torch.zeros_like(m)
        for run in tp.mask.key_runs(m0, m1, tp.BLOCK_N):
            K, V = keys_and_values(tp, m0, m1, run)
            QK = Q @ K.mT
            S, _ = scores(tp, QK.clone() if has_statistics else QK, m0, m1, run)
            m_new = torch.maximum(m, S.amax(-1, keepdim=True))
            pivot = m_new.masked_fill(m_new == -INFINITY, 0.0)  # -inf - -inf would be NaN
            rescale = torch.exp(m - pivot)
            if has_statistics:
                visible = unfold(QK, tp.Q).masked_fill_(S == -INFINITY, -INFINITY)
                largest = torch.maximum(largest, visible.amax(-1, keepdim=True))
            P = exp_(S.sub_(pivot))
            if has_statistics:  # exp(-1000) is 0, and 0 times -inf would be NaN
                h = rescale * (h + l * (m - pivot).clamp_(min=-1000.0))
                h -= torch.special.entr(P).sum(-1, keepdim=True)
            l = rescale * l + P.sum(-1, keepdim=True)
            if tp.dropout is not None:  # after the row sum: dropout does not affect normalisation
                P.mul_(tp.dropout.kept(m0, m1, run))
            O.mul_(fold(rescale, tp.K)).add_(fold(P, tp.K) @ V)
            m = m_new
        seen = l != 0  # NaN was seen
        O_all[:, :, m0:m1] = unfold(O, tp.Q) / (l.masked_fill(~seen, 1.0) * tp.keep)
        L_all[:, :, m0:m1] = torch.where(seen, m + torch.log(l), -INFINITY).squeeze(-1)
        if has_statistics:
            H = torch.where(seen, torch.log(l) - h / l, 0.0)
            for total, x in zip(found, (capped(tp, largest), H), strict=True):
                total[:, :, m0:m1] = x.squeeze(-1)
    return O_all, L_all, *found


def backward(
    tp: TileProblem,
    L: Tensor,
    dO: Tensor,
    delta: Tensor,
    dbias: Tensor | None,
    dcaptured: Tensor | None = None,
    of_distances: DistanceGradients | None = None,
    is_partial: bool = False,
) -> TileGradients:
    """Gradients from the stored log-sum-exp.

    Args:
        L: (batch, heads, M), from the forward.
        dO: (batch, heads, M, Dv).
        delta: (batch, heads, M), ``rowsum(dO * O)`` minus the gradient of L.
        dbias: tensor of the bias's shape to which its gradient is added; None if not needed.
        dcaptured: likewise for the values that the score function captures.
        of_distances: likewise for ALiBi's slopes and the relative bias.
        is_partial: L is of more keys than these.
    """
    dQ, dK, dV = torch.zeros_like(tp.Q), torch.zeros_like(tp.K), torch.zeros_like(tp.V)
    L = L.masked_fill(L == -INFINITY, INFINITY)  # rows that see no key: P = exp(S - inf) = 0
    for m0, m1 in tp.mask.query_tiles(tp.BLOCK_M):
        Q = fold(tp.Q[:, :, m0:m1] * tp.score.options.softmax_scale, tp.K)
        dO_tile = fold(dO[:, :, m0:m1], tp.K)
        L_tile, delta_tile = L[:, :, m0:m1, None], delta[:, :, m0:m1, None]
        log_sums = None if is_partial else lost_log_sums(tp, Q, L_tile, m0, m1)
        dQ_tile = torch.zeros_like(Q)
        for run in tp.mask.key_runs(m0, m1, tp.BLOCK_N):
            keys = slice(run.start, run.stop)
            K, V = keys_and_values(tp, m0, m1, run)
            S, slope = scores(tp, Q @ K.mT, m0, m1, run, want_slope=True)
            assert slope is not None
            P = relative_exponentials(S, L_tile, log_sums)
            dP = unfold(dO_tile @ V.mT, tp.Q)
            P_kept = P
            if tp.dropout is not None:
                factor = tp.dropout.kept(m0, m1, run).to(P.dtype).mul_(1.0 / tp.keep)
                P_kept = P * factor
                dP.mul_(factor)
            dV[:, :, keys] += fold(P_kept, tp.K).mT @ dO_tile
            dS = dP.sub_(delta_tile).mul_(P)
            if dbias is not None:
                add_reduced(dbias, dS, m0, m1, run)
            if of_distances is not None:
                of_distances.add(dS, tp.mask.visibility, (m0, m1), run)
            if slope.capped is not None and tp.score.function is not None:
                dS = tp.score.function.gradient(slope.capped, dS, (m0, m1), run, dcaptured)
            if slope.softcap is not None:
                dS.mul_(slope.softcap)
            dS_rows = fold(dS, tp.K)
            dQ_tile += dS_rows @ K
            dK[:, :, keys] += dS_rows.mT @ Q  # Q carries the scale
        dQ[:, :, m0:m1] = unfold(dQ_tile, tp.Q).mul_(tp.score.options.softmax_scale)
    return TileGradients(dQ, dK, dV)


def probabilities(
    tp: TileProblem, L: Tensor, is_partial: bool = False
) -> Iterator[tuple[tuple[int, int], KeyRun, Tensor]]:
    """P = exp(S - L) of each tile, (batch, heads, rows, keys), with its rows and its keys.

    `is_partial`: L is of more keys than these.
    """
    L = L.masked_fill(L == -INFINITY, INFINITY)
    for m0, m1 in tp.mask.query_tiles(tp.BLOCK_M):
        Q = fold(tp.Q[:, :, m0:m1] * tp.score.options.softmax_scale, tp.K)
        L_tile = L[:, :, m0:m1, None]
        log_sums = None if is_partial else lost_log_sums(tp, Q, L_tile, m0, m1)
        for run in tp.mask.key_runs(m0, m1, tp.BLOCK_N):
            K, _ = keys_and_values(tp, m0, m1, run)
            S, _ = scores(tp, Q @ K.mT, m0, m1, run)
            yield (m0, m1), run, relative_exponentials(S, L_tile, log_sums)


def keys_and_values(tp: TileProblem, m0: int, m1: int, run: KeyRun) -> tuple[Tensor, Tensor]:
    """K and V of a tile, with zeros at the keys that none of its rows sees."""
    K, V = tp.K[:, :, run.start : run.stop], tp.V[:, :, run.start : run.stop]
    visible = run.visible
    if tp.score.bias is not None:  # -inf is how a small mask arrives
        bias = bias_tile(tp.score.bias, m0, m1, run)
        if bias.numel() > 0 and bias.amin() == -INFINITY:
            finite = bias > -INFINITY
            visible = finite if visible is None else finite & visible
    if visible is None:
        return K, V
    seen = visible.any(-2)
    return without_hidden(K, seen), without_hidden(V, seen)


def scores(
    tp: TileProblem, QK: Tensor, m0: int, m1: int, run: KeyRun, want_slope: bool = False
) -> tuple[Tensor, ScoreSlope | None]:
    """S (batch, heads, rows, keys) of a tile from scaled Q K^T, -inf where masked; overwrites `QK`.

    With `want_slope`, also returns what the backward needs. The slope of a softcap is ``1 - tanh(QK
    / cap)^2``.
    """
    S = unfold(QK, tp.Q)
    rule, slope, capped = tp.score, None, None
    softcap = rule.options.softcap
    if softcap > 0:
        S = S.div_(softcap).tanh_()
        slope = 1.0 - S * S if want_slope else None
        S = S * softcap  # not in place: PyTorch may differentiate tanh
    if rule.function is not None:
        capped = S if want_slope else None
        S = rule.function.scores(S, (m0, m1), run)
    if rule.alibi_slopes is not None:
        visibility = tp.mask.visibility
        p = visibility.row_positions(m0, m1)[:, None]
        distance = (p - visibility.key_positions(run.start, run.stop)).abs().to(S.dtype)
        S.addcmul_(rule.alibi_slopes, distance, value=-1.0)
    if rule.bias is not None:
        S.add_(bias_tile(rule.bias, m0, m1, run))
    if rule.relative_bias is not None:
        for columns, distance in adjacent_columns(tp.mask.visibility, (m0, m1), run):
            S[..., columns].add_(relative_tile(rule.relative_bias, distance, m1 - m0))
    if run.visible is not None and rule.function is not None:
        S.masked_fill_(~run.visible, -INFINITY)  # the function may give NaN there
    elif run.visible is not None:  # adding is faster than masked_fill_ with a broadcast
        S.add_(torch.zeros_like(run.visible, dtype=S.dtype).masked_fill_(~run.visible, -INFINITY))
    return S, ScoreSlope(slope, capped) if want_slope else None


def capped(tp: TileProblem, S: Tensor) -> Tensor:
    """Scaled products after the softcap, which leaves -inf."""
    cap = tp.score.options.softcap
    return torch.where(S == -INFINITY, S, torch.tanh(S / cap) * cap) if cap > 0 else S


def exp_(x: Tensor) -> Tensor:
    """exp in place, by exp2, which PyTorch computes three times as fast on a CPU.

    Results that would be subnormal, or would give subnormal products, become 0. They are far below
    a rounding of any sum that they are added to, and CPUs compute with them many times slower.
    """
    flush = math.log2(torch.finfo(x.dtype).tiny / torch.finfo(x.dtype).eps)
    return torch.threshold_(x.mul_(LOG2_E), flush, -INFINITY).exp2_()


def is_large(L: Tensor) -> Tensor:
    """Which log-sum-exps are so large that rounding them has changed exp(S - L)."""
    return (L.abs() >= LARGE_LSE) & L.isfinite()


def lost_log_sums(tp: TileProblem, Q: Tensor, L: Tensor, m0: int, m1: int) -> Tensor | None:
    """log of the row sums of exp(S - L), (batch, heads, rows, 1), where L is large; 0 elsewhere.
    None if no L is large.

    L = m + log(l) is rounded by a part of its size. At -1e9 it is m, and exp(S - L) would be 1
    for each of l equal keys. Masks that add huge negative numbers make such rows.
    """
    large = is_large(L)
    if not large.any():
        return None
    l = torch.zeros_like(L) if tp.sink is None else torch.exp(tp.sink[:, None, None] - L)
    for run in tp.mask.key_runs(m0, m1, tp.BLOCK_N):
        K, _ = keys_and_values(tp, m0, m1, run)
        S, _ = scores(tp, Q @ K.mT, m0, m1, run)
        l += exp_(S.sub_(L)).sum(-1, keepdim=True)
    return torch.where(large & (l > 0), l, 1.0).log_()


def relative_exponentials(S: Tensor, L: Tensor, log_sums: Tensor | None) -> Tensor:
    """P = exp(S - L), in place, with row sums of 1 where `lost_log_sums` gives them."""
    S.sub_(L)
    return exp_(S if log_sums is None else S.sub_(log_sums))


def first_statistics(tp: TileProblem, rows: int) -> tuple[Tensor, Tensor]:
    """m and l before the first key. A sink is a key of logit `sink` whose value is zero, which
    comes first.
    """
    batch, heads = tp.Q.shape[:2]
    m = tp.Q.new_full((batch, heads, rows, 1), -INFINITY)
    l = tp.Q.new_zeros(batch, heads, rows, 1)
    if tp.sink is not None:
        m.copy_(tp.sink[:, None, None])
        l.fill_(1.0)
    return m, l


def sink_gradient(sink: Tensor, L: Tensor, delta: Tensor) -> Tensor:
    """(heads,): the sink is a key with P = exp(sink - L) and dP = 0."""
    L = L.masked_fill(L == -INFINITY, INFINITY)  # padding, and a sink of -inf
    P = torch.exp(sink[:, None] - L)
    return -(P * delta).sum(dim=(0, 2))


def bias_tile(bias: Tensor, m0: int, m1: int, run: KeyRun) -> Tensor:
    """The part of `bias` (or of its gradient) for a tile; broadcast dimensions keep size 1."""
    rows = slice(m0, m1) if bias.shape[2] > 1 else slice(None)
    keys = slice(run.start, run.stop) if bias.shape[3] > 1 else slice(None)
    return bias[:, :, rows, keys]


def add_reduced(dbias: Tensor, dS: Tensor, m0: int, m1: int, run: KeyRun) -> None:
    """Add dS to the gradient of the bias, summed over the dimensions that were broadcast."""
    target = bias_tile(dbias, m0, m1, run)
    target += dS.sum_to_size(target.shape)


def fold(x: Tensor, K: Tensor) -> Tensor:
    """(batch, heads, rows, n) -> (batch, kv_heads, group * rows, n): a group's heads share a key
    head.
    """
    batch, kv_heads = K.shape[:2]
    return x.reshape(batch, kv_heads, -1, x.shape[-1])


def unfold(x: Tensor, Q: Tensor) -> Tensor:
    """The inverse of `fold`."""
    batch, heads = Q.shape[:2]
    return x.view(batch, heads, -1, x.shape[-1])
