"""Statistics of the probabilities: the rows' largest capped scores and entropies, and the sums of
the columns. A tile here is some queries of a segment with all keys that they see; PyTorch
differentiates the entropy of a tile, on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vjp

from ...problem import AttentionProblem, Operands, lse_dtype
from .derivatives import NAMES, segments_and_tiles
from .launch import tile_problem
from .plan import Plan
from .segments import KeyRun, Segment
from .tiles import INFINITY, TileProblem, fold, keys_and_values, scores, unfold


def measure(
    problem: AttentionProblem,
    operands: Operands,
    lse: Tensor,
    of_rows: bool,
    of_columns: bool,
    row_max: Tensor,
    entropies: Tensor,
    column_sum: Tensor,
) -> None:
    """Write the statistics of the rows into `row_max` and `entropies`, which are shaped as the
    log-sum-exp, and add the probabilities of each key to `column_sum`. `lse` is not needed here.
    """
    for segment, tp, (m0, m1) in _tiles(problem, operands):
        keys = scores_of_rows(tp, m0, m1)
        P, H = softmax(keys.S)
        if of_rows:
            segment.rows(entropies)[:, :, m0:m1] = H
            segment.rows(row_max)[:, :, m0:m1] = _largest_capped(tp, m0, m1, keys)
        if of_columns:
            sums = _without_sink(tp, P).sum(-2)
            for run, part in zip(keys.runs, _by_run(sums, keys.runs), strict=True):
                segment.columns(column_sum)[:, :, run.start : run.stop] += part


def entropy_gradient(
    problem: AttentionProblem, operands: Operands, dentropy: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of the operands, from that of the entropy of each row."""
    dtype = lse_dtype(operands.q.dtype)
    given = zip(NAMES, operands, strict=False)
    x = {name: tensor.to(dtype) for name, tensor in given if tensor is not None}
    total = {name: torch.zeros_like(tensor) for name, tensor in x.items()}
    with operands.q.device:  # of index tensors
        for segment, _, (m0, m1) in _tiles(problem, operands):

            def entropy(
                tensors: dict[str, Tensor], segment: Segment = segment, m0: int = m0, m1: int = m1
            ) -> Tensor:
                tp = _tile_problem(problem, operands._replace(**tensors), segment)
                return softmax(scores_of_rows(tp, m0, m1).S)[1]

            dH = segment.rows(dentropy)[:, :, m0:m1].to(dtype)
            (gradients,) = vjp(entropy, x)[1](dH)
            for name, gradient in gradients.items():
                total[name] += gradient
    pairs = zip(NAMES, operands, strict=False)
    return tuple(None if y is None else total[name].to(y.dtype) for name, y in pairs)


def _tiles(
    problem: AttentionProblem, operands: Operands
) -> Iterator[tuple[Segment, TileProblem, tuple[int, int]]]:
    """Each segment, and the rows ``[m0, m1)`` of each of its tiles."""
    for segment, tiles in segments_and_tiles(problem, operands):
        tp = _tile_problem(problem, operands, segment)
        for rows in tiles:
            yield segment, tp, rows


def _tile_problem(problem: AttentionProblem, operands: Operands, segment: Segment) -> TileProblem:
    plan = Plan("plain", lse_dtype(operands.q.dtype), 1, max(problem.N, 1), ())
    return tile_problem(problem, operands, segment, plan)


class ScoresOfRows(NamedTuple):
    """All scores that some queries of a segment see, from left to right."""

    S: Tensor  # (batch, heads, rows, keys), after a column of the sink if there is one
    runs: list[KeyRun]


def scores_of_rows(tp: TileProblem, m0: int, m1: int) -> ScoresOfRows:
    """The scores of the queries ``[m0, m1)``."""
    shape = *tp.Q.shape[:2], m1 - m0
    Q = fold(tp.Q[:, :, m0:m1] * tp.score.options.softmax_scale, tp.K)
    parts = [Q.new_empty(*shape, 0)]
    if tp.sink is not None:
        parts.append(tp.sink[:, None, None].expand(*shape, 1))
    runs = list(tp.mask.key_runs(m0, m1, tp.BLOCK_N))
    for run in runs:
        K, _ = keys_and_values(tp, m0, m1, run)
        parts.append(scores(tp, Q @ K.mT, m0, m1, run)[0])
    return ScoresOfRows(torch.cat(parts, -1), runs)


def softmax(S: Tensor) -> tuple[Tensor, Tensor]:
    """P of scores (..., keys), and the entropy H of each row; zeros for a row without a score above
    -inf.
    """
    if S.shape[-1] == 0:
        return S, S.sum(-1)
    dead = (S == -INFINITY).all(-1, keepdim=True)
    S = S.masked_fill(dead, 0.0)
    T = S - S.detach().amax(-1, keepdim=True)  # not S - L, which loses log l beside a huge S
    P = torch.exp(T)
    l = P.sum(-1, keepdim=True)
    P = (P / l).masked_fill(dead, 0.0)
    # -sum P log P, where log P = T - log l, and 0 log 0 is 0
    H = torch.log(l).squeeze(-1) - (P * T.masked_fill(T == -INFINITY, 0.0)).sum(-1)
    return P, H.masked_fill(dead.squeeze(-1), 0.0)


def _largest_capped(tp: TileProblem, m0: int, m1: int, keys: ScoresOfRows) -> Tensor:
    """The largest visible score of each row, scaled and capped: (batch, heads, rows)."""
    options = tp.score.options
    largest = tp.Q.new_full((*tp.Q.shape[:2], m1 - m0), -INFINITY)
    Q = fold(tp.Q[:, :, m0:m1] * options.softmax_scale, tp.K)
    S_of_runs = _by_run(_without_sink(tp, keys.S), keys.runs)
    for run, S in zip(keys.runs, S_of_runs, strict=True):
        K, _ = keys_and_values(tp, m0, m1, run)
        scaled = unfold(Q @ K.mT, tp.Q).masked_fill(S == -INFINITY, -INFINITY)
        largest = torch.maximum(largest, scaled.amax(-1))
    if options.softcap > 0:  # which is monotonic
        capped = torch.tanh(largest / options.softcap) * options.softcap
        largest = torch.where(largest == -INFINITY, largest, capped)
    return largest


def _without_sink(tp: TileProblem, columns: Tensor) -> Tensor:
    return columns if tp.sink is None else columns[..., 1:]


def _by_run(columns: Tensor, runs: list[KeyRun]) -> tuple[Tensor, ...]:
    return columns.split([run.stop - run.start for run in runs], -1) if runs else ()
