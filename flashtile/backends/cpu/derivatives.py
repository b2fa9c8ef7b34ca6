"""Derivatives in forward mode, and derivatives of derivatives, by PyTorch's own operations on any
device.

A tile here is some queries of a segment with all keys that they see. Only one tile of scores exists
at a time: memory is linear in the lengths. `attend` computes a tile's results f(x) and, with the
tangents w of the operands x, the tangents J w of the results, where J is the derivative of f. All
other derivatives follow from it, in every option:

- the first derivative in forward mode is J w itself;
- the gradients of ``<c, J w>`` are the first derivative J^T c, with respect to w, and, with respect
  to x, the derivative of the first derivative along w, because second derivatives are symmetric.
  PyTorch finds them by one `torch.func.vjp` of `attend`, and differentiates that for third ones.

The differentiable operands are a dict by name, `x`; gradients and tangents have the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import vjp
from torch.utils._pytree import tree_map

from ...problem import (
    DIFFERENTIABLE,
    FLOAT8,
    AttentionProblem,
    Operands,
    dtype_name,
    lse_dtype,
    lse_shape,
)
from .distances import adjacent_columns
from .distances import bias_tile as relative_tile
from .launch import tile_problem
from .plan import PLAIN_BLOCK_M, PLAIN_BLOCK_N, Plan
from .segments import KeyRun, Segment, segments
from .tiles import (
    INFINITY,
    ScoreSlope,
    TileProblem,
    bias_tile,
    fold,
    keys_and_values,
    lost_log_sums,
    relative_exponentials,
    scores,
    unfold,
)

Tensors = dict[str, Tensor]
Optional = tuple[Tensor | None, ...]  # one for each differentiable operand
Cotangents = tuple[Tensor, ...]  # of out, and of lse if somebody differentiates it
Results = tuple[Tensor, Tensor]  # O (batch, heads, rows, Dv), L (batch, heads, rows)
# From operands, tangents and `wants_results` to the call's (out, lse) and their tangents. Rows of
# other tiles are 0.
Tile = Callable[[Tensors, Tensors, bool], tuple[Cotangents, Cotangents]]
T = TypeVar("T")

ROWS = 128  # of a tile, at least
GPU_SCORES = 1 << 24  # of a tile on a GPU, if they are no fewer rows: it waits for the host
NAMES = Operands._fields[:DIFFERENTIABLE]
VALUES = {"v"}  # the only tangents that leave the scores alone


def tangents(
    problem: AttentionProblem, operands: Operands, out: Tensor, lse: Tensor, moved: Optional
) -> Cotangents:
    """The tangents of out and lse, from those of the operands, `moved`."""
    w = _by_name(operands, moved)
    if any(torch._C._functorch.is_legacy_batchedtensor(x) for x in w.values()):
        return _tangents_of_batches(problem, operands, w)
    dout, dlse = torch.zeros_like(out), torch.zeros_like(lse)
    with device_of_indices(operands):
        for segment, tiles in segments_and_tiles(problem, operands, PLAIN_BLOCK_M):
            tp, along = _tile_problems(problem, operands, segment, {}, w)
            if not operands.q.is_cuda:
                tp = tp._replace(BLOCK_N=PLAIN_BLOCK_N)
            if {"q", "k"} <= w.keys():  # dQ K^T + Q dK^T = [dQ, Q] [K, dK]^T
                Q, K = torch.cat((along.Q, tp.Q), -1), torch.cat((tp.K, along.K), -1)
                along = along._replace(Q=Q, K=K)
            O, L = segment.queries(out), segment.rows(lse)
            for m0, m1 in tiles:
                results = O[:, :, m0:m1], L[:, :, m0:m1, None]
                dO, dL = tile_tangents(tp, along, set(w), *results, m0, m1)
                segment.queries(dout)[:, :, m0:m1] = dO
                segment.rows(dlse)[:, :, m0:m1] = dL
    return dout, dlse


def _tangents_of_batches(problem: AttentionProblem, operands: Operands, w: Tensors) -> Cotangents:
    """`tangents` in all directions of a batch, as `torch.autograd.functional.jacobian` makes them.
    PyTorch maps few operations over such a batch, but all derivatives: the transpose of the
    transpose of a linear function is the function.
    """
    x = _by_name(operands, operands)
    zero = {name: torch.zeros_like(x[name]) for name in w}
    zeros = _zeros(operands, x["q"])

    def of_tile(tile: Tile) -> Cotangents:
        def transposed(*c: Tensor) -> Tensors:
            (gradients,) = vjp(lambda w: tile(x, w, False)[1], zero)[1](c)
            return gradients

        return vjp(transposed, *zeros)[1](w)

    out, lse = _sum(of_tile, problem, operands, 2)
    return out.to(operands.q.dtype), lse


def tangents_derivative(
    problem: AttentionProblem, operands: Operands, moved: Optional, cotangents: Cotangents
) -> tuple[Optional, Optional]:
    """The gradients of the operands and of `moved`, from the `cotangents` of `tangents`."""
    x, w = _by_name(operands, operands), _by_name(operands, moved)
    c = _in_dtype(operands, cotangents)

    def of_tile(tile: Tile) -> tuple[Tensors, Tensors]:
        return vjp(lambda x, w: tile(x, w, False)[1], x, w)[1](c)

    dx, dw = _sum(of_tile, problem, operands, len(c))
    return _by_operand(operands, dx), _by_operand(moved, dw)


def gradient_tangents(
    problem: AttentionProblem,
    operands: Operands,
    cotangents: Cotangents,
    moved: Optional,
    moved_cotangents: Cotangents,
) -> Optional:
    """The tangents of the first derivative, from those of the operands and of the cotangents."""
    x, w = _by_name(operands, operands), _by_name(operands, moved)
    c = _in_dtype(operands, moved_cotangents), _in_dtype(operands, cotangents)

    def of_tile(tile: Tile) -> Tensors:
        return vjp(lambda x: tile(x, w, True), x)[1](c)[0]

    return _by_operand(operands, _sum(of_tile, problem, operands, len(cotangents)))


def second_derivative(
    problem: AttentionProblem, operands: Operands, cotangents: Cotangents, dgradients: Optional
) -> tuple[Optional, Cotangents]:
    """The gradients of the operands and of the cotangents, from those of the first derivative."""
    x, w = _by_name(operands, operands), _by_name(operands, dgradients)
    c = _in_dtype(operands, cotangents)

    def of_tile(tile: Tile) -> tuple[Tensors, Cotangents]:
        along, pull, *_ = vjp(lambda x: tile(x, w, False)[1], x)
        return pull(c)[0], along

    dx, dcotangents = _sum(of_tile, problem, operands, len(cotangents))
    pairs = zip(dcotangents, cotangents, strict=True)
    return _by_operand(operands, dx), tuple(d.to(c.dtype) for d, c in pairs)


def _by_name(operands: Operands, tensors: Optional) -> Tensors:
    """Those of the differentiable operands, or of their tangents, that there are."""
    dtype = lse_dtype(operands.q.dtype)
    return {n: x.to(dtype) for n, x in zip(NAMES, tensors, strict=False) if x is not None}


def _by_operand(operands: Optional, x: Tensors) -> Optional:
    """`x` in the order and the dtypes of the operands, or of their tangents."""
    named = zip(NAMES, operands, strict=False)
    return tuple(None if y is None else x[name].to(y.dtype) for name, y in named)


def _in_dtype(operands: Operands, cotangents: Cotangents) -> Cotangents:
    return tuple(x.to(lse_dtype(operands.q.dtype)) for x in cotangents)


def _sum(of_tile: Callable[[Tile], T], problem: AttentionProblem, operands: Operands, n: int) -> T:
    """The sum over the tiles, of which each has the first `n` of (out, lse)."""
    with device_of_indices(operands):
        total = of_tile(lambda x, w, _: (_zeros(operands, x["q"])[:n],) * 2)
        for segment, tiles in segments_and_tiles(problem, operands):
            for rows in tiles:
                tile = partial(_tile, problem, operands, segment, rows, n)
                total = tree_map(torch.add, total, of_tile(tile))
    return total


def device_of_indices(operands: Operands) -> AbstractContextManager[Any]:
    """Where index tensors are made; on a CPU such a context would only slow down all operations."""
    return operands.q.device if operands.q.is_cuda else nullcontext()


def segments_and_tiles(
    problem: AttentionProblem, operands: Operands, rows: int = ROWS
) -> Iterator[tuple[Segment, list[tuple[int, int]]]]:
    """The segments of a call, with their tiles of `rows` queries, or of more on a GPU."""
    if operands.q.dtype in FLOAT8:
        raise NotImplementedError(
            f"q: got {dtype_name(operands.q.dtype)}, of which there are neither higher derivatives "
            "nor those in forward mode; expected float64, float32, bfloat16 or float16"
        )
    for segment in segments(problem, operands):
        count = len(range(problem.B)[segment.batch]) * len(range(problem.Hq)[segment.heads])
        of_row = max(count * segment.mask.visibility.N, 1)
        step = max(rows, GPU_SCORES // of_row if operands.q.is_cuda else 0)
        yield segment, segment.mask.query_tiles(step)


def _zeros(operands: Operands, like: Tensor) -> Results:
    """Zeros of the shapes of out and lse."""
    q, v = operands.q, operands.v
    return like.new_zeros(*q.shape[:-1], v.shape[-1]), like.new_zeros(lse_shape(operands))


def _tile_problems(
    problem: AttentionProblem, operands: Operands, segment: Segment, x: Tensors, w: Tensors
) -> tuple[TileProblem, TileProblem]:
    """A segment with the operands `x`, and the same with tangents instead, where there are any."""
    plan = Plan("plain", lse_dtype(operands.q.dtype), 1, max(problem.N, 1), ())
    tp, along = (
        tile_problem(problem, operands._replace(**tensors), segment, plan) for tensors in (x, x | w)
    )
    return tp, along


def _tile(
    problem: AttentionProblem,
    operands: Operands,
    segment: Segment,
    rows: tuple[int, int],
    n: int,
    x: Tensors,
    w: Tensors,
    wants_results: bool = True,
) -> tuple[Cotangents, Cotangents]:
    """The rows of a tile in tensors of the whole call."""
    tp, along = _tile_problems(problem, operands, segment, x, w)

    def in_call(results: Results) -> Cotangents:
        out, lse = _zeros(operands, results[0])
        segment.queries(out)[:, :, slice(*rows)] = results[0]
        segment.rows(lse)[:, :, slice(*rows)] = results[1]
        return (out, lse)[:n]

    results, moved = attend(tp, along, set(w), *rows, wants_results)
    return in_call(results), in_call(moved)


def attend(
    tp: TileProblem,
    along: TileProblem,
    names: set[str],
    m0: int,
    m1: int,
    wants_results: bool = True,
) -> tuple[Results, Results]:
    """(O, L) of a tile by the definition, and their tangents. A row that sees no key has O = 0 and
    L = 0 (with a sink: the sink).

    With dS the tangents of the scores and mu the row sums of P * dS, which are the tangents of L,
    those of O are (P * (dS - mu)) V + P dV.

    Args:
        along: `tp` with tangents instead of the operands `names`; the others are constant.
        wants_results: whether O is computed; else it is 0.
    """
    sink, dsink = sinks(tp, along, names, m1 - m0)
    parts = list(score_parts(tp, along, names, m0, m1))
    largest = [sink, *(S.amax(-1, keepdim=True) for S, *_ in parts)]
    m = torch.cat(largest, -1).detach().amax(-1, keepdim=True)
    dead = m == -INFINITY
    m = m.masked_fill(dead, 0.0)  # not exp(S - L), which loses l beside a huge m
    P = [torch.exp(S - m) for S, *_ in parts]
    l = (torch.exp(sink - m) + sum(p.sum(-1, keepdim=True) for p in P)).masked_fill(dead, 1.0)
    mu = torch.exp(sink - m) * dsink
    if names != VALUES:
        mu = mu + sum(
            (p * dS).sum(-1, keepdim=True) for p, (_, dS, *_) in zip(P, parts, strict=True)
        )
    mu = mu / l
    O = dO = fold(m.new_zeros(*m.shape[:-1], tp.V.shape[-1]), tp.K)
    for p, (_, dS, V, dV, kept) in zip(P, parts, strict=True):
        p = p if kept is None else p * kept
        if wants_results:
            O = O + fold(p, tp.K) @ V
        if names != VALUES:
            dO = dO + fold(p * (dS - mu), tp.K) @ V
        if "v" in names:
            dO = dO + fold(p, tp.K) @ dV
    results = unfold(O, tp.Q) / l, (m + torch.log(l)).squeeze(-1)
    return results, (unfold(dO, tp.Q) / l, mu.squeeze(-1))


def tile_tangents(
    tp: TileProblem,
    along: TileProblem,
    names: set[str],
    O: Tensor,
    L: Tensor,
    m0: int,
    m1: int,
) -> Results:
    """The tangents of O and L (batch, heads, rows, 1), as `attend` has them, from P = exp(S - L),
    one run of keys at a time, and in place: PyTorch cannot differentiate them. `along` is joined.
    """
    Q = fold(tp.Q[:, :, m0:m1] * tp.score.options.softmax_scale, tp.K)
    L = L.masked_fill(L == -INFINITY, INFINITY)  # rows that see no key: P = exp(S - inf) = 0
    log_sums = lost_log_sums(tp, Q, L, m0, m1)
    sink, dsink = sinks(tp, along, names, m1 - m0)
    mu = relative_exponentials(sink, L, log_sums) * dsink
    dO = Q.new_zeros(*Q.shape[:-1], tp.V.shape[-1])
    for S, dS, V, dV, kept in score_parts(tp, along, names, m0, m1, is_joined=True):
        P = relative_exponentials(S, L, log_sums)
        if names != VALUES:
            dS.mul_(P)
            mu += dS.sum(-1, keepdim=True)
            dO += fold(dS if kept is None else dS.mul_(kept), tp.K) @ V
        if "v" in names:
            dO += fold(P if kept is None else P.mul_(kept), tp.K) @ dV
    return unfold(dO, tp.Q) - mu * O, mu.squeeze(-1)


def sinks(tp: TileProblem, along: TileProblem, names: set[str], rows: int) -> tuple[Tensor, Tensor]:
    """The score of the sink, a key whose value is zero, and its tangent, (batch, heads, rows, 1);
    -inf and 0 without a sink.
    """
    row = tp.Q.new_zeros(*tp.Q.shape[:2], rows, 1)
    if tp.sink is None or along.sink is None:
        return row - INFINITY, row
    dsink = row + along.sink[:, None, None] if "sink" in names else row
    return row + tp.sink[:, None, None], dsink


def score_parts(
    tp: TileProblem, along: TileProblem, names: set[str], m0: int, m1: int, is_joined: bool = False
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]]:
    """S, its tangents dS, V, dV, and dropout's factors of P, for each run of a tile's keys. With
    `is_joined`, `along` has [dQ, Q] and [K, dK] where both have tangents, instead of dQ and dK:
    one product, but derivatives of it are more.
    """
    # Where the bias hides a key, its tangents do not show that.
    pair = tp, along._replace(score=tp.score)
    Q, dQ = (fold(x.Q.narrow(2, m0, m1 - m0) * x.score.options.softmax_scale, x.K) for x in pair)
    for run in tp.mask.key_runs(m0, m1, tp.BLOCK_N):
        (K, V), (dK, dV) = (keys_and_values(x, m0, m1, run) for x in pair)
        S, slope = scores(tp, Q @ K.mT, m0, m1, run, want_slope=True)
        assert slope is not None
        dS = S
        if names != VALUES:
            if {"q", "k"} <= names and not is_joined:
                QK = dQ @ K.mT + Q @ dK.mT
            else:
                QK = dQ @ dK.mT if "q" in names or "k" in names else torch.zeros_like(S)
            dS = unfold(QK, tp.Q)
            dS = score_tangents(tp, along, names, dS, slope, (m0, m1), run)
        kept = None if tp.dropout is None else tp.dropout.kept(m0, m1, run) / tp.keep
        yield S, dS, V, dV, kept


def score_tangents(
    tp: TileProblem,
    along: TileProblem,
    names: set[str],
    dS: Tensor,
    slope: ScoreSlope,
    rows: tuple[int, int],
    run: KeyRun,
) -> Tensor:
    """The tangents of scores, (batch, heads, rows, keys), from those of the scaled products, `dS`,
    and the slope that `tiles.scores` returns.
    """
    rule, of = along.score, tp.score.function
    if slope.softcap is not None:
        dS = dS * slope.softcap
    if slope.capped is not None and of is not None and rule.function is not None:
        dvalues = rule.function.values if "captured" in names else None
        dS = of.tangent(slope.capped, dS, dvalues, rows, run)
    if rule.alibi_slopes is not None and "alibi_slopes" in names:
        visibility = tp.mask.visibility
        p = visibility.row_positions(*rows)[:, None]
        distance = (p - visibility.key_positions(run.start, run.stop)).abs().to(dS.dtype)
        dS = dS - rule.alibi_slopes * distance
    if rule.bias is not None and "bias" in names:
        dS = dS + bias_tile(rule.bias, *rows, run)
    if rule.relative_bias is not None and "relative_bias" in names:
        columns = adjacent_columns(tp.mask.visibility, rows, run)
        count = rows[1] - rows[0]
        dS = dS + torch.cat([relative_tile(rule.relative_bias, d, count) for _, d in columns], -1)
    return dS
