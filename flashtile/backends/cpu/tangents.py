"""Forward mode: the tangents of O and L, in the tiles of `tiles.py`.

A tangent is the derivative along a direction of the inputs. With dS those of the scores and P the
probabilities, which the stored log-sum-exp L gives again,

    mu = rowsum(P * dS),    dO = (P * dS) V + P dV - mu O,    dL = mu,

so one loop over the keys is enough, and only one tile of scores exists at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import tiles
from .distances import adjacent_columns
from .distances import bias_tile as relative_tile
from .segments import KeyRun
from .tiles import ScoreSlope, TileProblem, bias_tile, fold, keys_and_values, unfold

VALUES_ONLY = {"v"}


def forward(
    tp: TileProblem, moved: TileProblem, names: set[str], O: Tensor, L: Tensor
) -> tuple[Tensor, Tensor]:
    """dO (batch, heads, M, Dv) and dL (batch, heads, M); 0 in rows that see no key.

    Args:
        moved: `tp` with tangents instead of the operands `names`; the others are constant.
        O, L: (batch, heads, M, Dv) and (batch, heads, M), from the forward.
    """
    dO, dL = torch.zeros_like(O), torch.zeros_like(L)
    L = L.masked_fill(L == -tiles.INFINITY, tiles.INFINITY)  # rows without a key: P = 0
    for m0, m1 in tp.mask.query_tiles(tp.BLOCK_M):
        Q, dQ = (fold(x.Q[:, :, m0:m1] * tp.score.options.softmax_scale, tp.K) for x in (tp, moved))
        L_tile = L[:, :, m0:m1, None]
        log_sums = tiles.lost_log_sums(tp, Q, L_tile, m0, m1)
        dO_tile = Q.new_zeros(*Q.shape[:-1], tp.V.shape[-1])
        mu = torch.zeros_like(L_tile)
        if tp.sink is not None and moved.sink is not None and "sink" in names:
            S = tp.sink[:, None, None].expand_as(mu).contiguous()  # of a key whose value is zero
            mu = tiles.relative_exponentials(S, L_tile, log_sums) * moved.sink[:, None, None]
        for run in tp.mask.key_runs(m0, m1, tp.BLOCK_N):
            K, V = keys_and_values(tp, m0, m1, run)
            dK, dV = keys_and_values(moved, m0, m1, run)
            S, slope = tiles.scores(tp, Q @ K.mT, m0, m1, run, want_slope=True)
            assert slope is not None
            P = tiles.relative_exponentials(S, L_tile, log_sums)
            factor = None
            if tp.dropout is not None:  # which leaves mu, a derivative of L, as it is
                factor = tp.dropout.kept(m0, m1, run).to(P.dtype).mul_(1.0 / tp.keep)
            if names != VALUES_ONLY:
                dQK = dQ @ K.mT if "q" in names else Q.new_zeros(*Q.shape[:-1], K.shape[-2])
                if "k" in names:
                    dQK += Q @ dK.mT
                dS = score_tangents(tp, moved, names, unfold(dQK, tp.Q), slope, m0, m1, run)
                dS.mul_(P)
                mu += dS.sum(-1, keepdim=True)
                dO_tile += fold(dS if factor is None else dS.mul_(factor), tp.K) @ V
            if "v" in names:
                dO_tile += fold(P if factor is None else P.mul_(factor), tp.K) @ dV
        dO[:, :, m0:m1] = unfold(dO_tile, tp.Q).addcmul_(mu, O[:, :, m0:m1], value=-1.0)
        dL[:, :, m0:m1] = mu.squeeze(-1)
    return dO, dL


def score_tangents(
    tp: TileProblem,
    moved: TileProblem,
    names: set[str],
    dQK: Tensor,
    slope: ScoreSlope,
    m0: int,
    m1: int,
    run: KeyRun,
) -> Tensor:
    """dS (batch, heads, rows, keys) of a tile from the tangents of the scaled products, which it
    overwrites, and the slope that `tiles.scores` returns.
    """
    dS, rule = dQK, moved.score
    if slope.softcap is not None:
        dS.mul_(slope.softcap)
    if slope.capped is not None and tp.score.function is not None and rule.function is not None:
        dvalues = rule.function.values if "captured" in names else None
        dS = tp.score.function.tangent(slope.capped, dS, dvalues, (m0, m1), run)
    if rule.alibi_slopes is not None and "alibi_slopes" in names:
        visibility = tp.mask.visibility
        p = visibility.row_positions(m0, m1)[:, None]
        distance = (p - visibility.key_positions(run.start, run.stop)).abs().to(dS.dtype)
        dS.addcmul_(rule.alibi_slopes, distance, value=-1.0)
    if rule.bias is not None and "bias" in names:
        dS.add_(bias_tile(rule.bias, m0, m1, run))
    if rule.relative_bias is not None and "relative_bias" in names:
        for columns, distance in adjacent_columns(tp.mask.visibility, (m0, m1), run):
            dS[..., columns].add_(relative_tile(rule.relative_bias, distance, m1 - m0))
    return dS
