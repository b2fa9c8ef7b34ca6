"""The gradient of the entropy of each row, by PyTorch's own operations on any device, one tile at a
time: some queries of a segment with all keys that they see.

With P = exp(S - L), the entropy is H = -sum P log P, and its derivative by a score -P (log P + H).
That is also the derivative of -P (log P + H - 1) where L and H are constants, which PyTorch finds
for the operands. A call may have only some keys of a row; L and H are of all.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.func import vjp

from ...problem import AttentionProblem, Operands, lse_dtype
from .derivatives import NAMES, Tensors, device_of_indices, segments_and_tiles
from .launch import tile_problem
from .plan import Plan
from .segments import Segment
from .tiles import INFINITY, fold, keys_and_values, scores


def entropy_gradient(
    problem: AttentionProblem, operands: Operands, lse: Tensor, entropy: Tensor, dentropy: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of the operands, in the dtype of the log-sum-exp, from that of the entropy."""
    dtype = lse_dtype(operands.q.dtype)
    given = zip(NAMES, operands, strict=False)
    x = {name: tensor.to(dtype) for name, tensor in given if tensor is not None}
    total = {name: torch.zeros_like(tensor) for name, tensor in x.items()}
    with device_of_indices(operands):
        for segment, tiles in segments_and_tiles(problem, operands):
            for m0, m1 in tiles:
                # (batch, heads, rows, 1)
                L, H, dH = (
                    segment.rows(t)[:, :, m0:m1, None].to(dtype) for t in (lse, entropy, dentropy)
                )
                tile = partial(_antiderivative, problem, operands, segment, (m0, m1), L, H)
                (gradients,) = vjp(tile, x)[1](-dH)
                for name, gradient in gradients.items():
                    total[name] += gradient
    return tuple(total.get(name) for name in NAMES)


def _antiderivative(
    problem: AttentionProblem,
    operands: Operands,
    segment: Segment,
    rows: tuple[int, int],
    L: Tensor,
    H: Tensor,
    x: Tensors,
) -> Tensor:
    """The sums of P (log P + H - 1) over the keys, (batch, heads, rows, 1)."""
    plan = Plan("plain", L.dtype, 1, max(problem.N, 1), ())
    tp = tile_problem(problem, operands._replace(**x), segment, plan)
    m0, m1 = rows
    Q = fold(tp.Q[:, :, m0:m1] * tp.score.options.softmax_scale, tp.K)
    parts = [L[..., :0]]
    if tp.sink is not None:
        parts.append(tp.sink[:, None, None].expand_as(L))
    for run in tp.mask.key_runs(m0, m1, tp.BLOCK_N):
        K, _ = keys_and_values(tp, m0, m1, run)
        parts.append(scores(tp, Q @ K.mT, m0, m1, run)[0])
    # (batch, heads, rows, keys), log P
    T = torch.cat(parts, -1) - L.masked_fill(L == -INFINITY, INFINITY)
    if not problem.is_partial and T.shape[-1] > 0:  # rounding a large L has lost a factor
        lost = T.detach().logsumexp(-1, keepdim=True)
        T = T - lost.masked_fill(lost == -INFINITY, 0.0)
    finite = T.masked_fill(T == -INFINITY, 0.0)
    return (torch.exp(T) * (finite + H - 1)).sum(-1, keepdim=True)
