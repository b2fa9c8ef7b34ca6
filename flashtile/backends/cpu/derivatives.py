"""Derivatives in forward mode, and derivatives of derivatives, by PyTorch's own operations on any
device.

The first derivative in forward mode is the loop of `tangents.py`. For all others, a tile is some
queries of a segment with all keys that they see. PyTorch differentiates it as it is defined: the
scores of `tiles.scores`, a softmax and a product with V. So every option, and every order and mode
of differentiation, is a composition of `torch.func.vjp` with itself. Only one tile of scores exists
at a time: memory is linear in the lengths.

The differentiable operands are a dict by name, `x`; gradients and tangents have the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

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
from . import tangents as in_tiles
from .launch import tile_problem
from .plan import PLAIN_BLOCK_N, Plan
from .score_function import pushed
from .segments import Segment, segments
from .tiles import INFINITY, TileProblem, fold, keys_and_values, scores, unfold

Tensors = dict[str, Tensor]
Optional = tuple[Tensor | None, ...]  # one for each differentiable operand
Cotangents = tuple[Tensor, ...]  # of out, and of lse if somebody differentiates it
Tile = Callable[[Tensors], Cotangents]  # from x to the call's results, 0 in the rows of other tiles
T = TypeVar("T")

ROWS, TANGENT_ROWS = 64, 128  # of a tile, at least
GPU_SCORES = 1 << 24  # of a tile on a GPU, if they are no fewer rows: it waits for the host
NAMES = Operands._fields[:DIFFERENTIABLE]


def tangents(
    problem: AttentionProblem, operands: Operands, out: Tensor, lse: Tensor, moved: Optional
) -> Cotangents:
    """The tangents of out and lse, from those of the operands, `moved`."""
    directions = _by_name(operands, moved)
    along = operands._replace(**directions)
    dtype = lse_dtype(operands.q.dtype)
    keys = max(problem.N, 1) if operands.q.is_cuda else PLAIN_BLOCK_N
    dout, dlse = torch.zeros_like(out), torch.zeros_like(lse)
    with operands.q.device:  # of index tensors
        for segment, rows in _segments(problem, operands, TANGENT_ROWS):
            plan = Plan("plain", dtype, rows, keys, ())
            tp, tp_along = (tile_problem(problem, x, segment, plan) for x in (operands, along))
            O, L = segment.queries(out).to(dtype), segment.rows(lse).to(dtype)
            dO, dL = in_tiles.forward(tp, tp_along, set(directions), O, L)
            segment.queries(dout).copy_(dO)
            segment.rows(dlse).copy_(dL)
    return dout, dlse


def tangents_derivative(
    problem: AttentionProblem, operands: Operands, moved: Optional, cotangents: Cotangents
) -> tuple[Optional, Optional]:
    """The gradients of the operands and of `moved`, from the `cotangents` of `tangents`.

    Tangents are linear in `moved`: their gradients are those of the first derivative. Those of the
    operands are its derivative along `moved`, because second derivatives are symmetric.
    """
    still = tuple(map(torch.zeros_like, cotangents))
    first, second = _along(problem, operands, cotangents, moved, still)
    return _by_operand(operands, second), _by_operand(moved, first)


def gradient_tangents(
    problem: AttentionProblem,
    operands: Operands,
    cotangents: Cotangents,
    moved: Optional,
    moved_cotangents: Cotangents,
) -> Optional:
    """The tangents of the first derivative, from those of the operands and of the cotangents."""
    return _by_operand(operands, _along(problem, operands, cotangents, moved, moved_cotangents)[1])


def second_derivative(
    problem: AttentionProblem, operands: Operands, cotangents: Cotangents, dgradients: Optional
) -> tuple[Optional, Cotangents]:
    """The gradients of the operands and of the cotangents, from those of the first derivative."""
    wanted = _by_name(operands, dgradients)
    x = _by_name(operands, operands)
    wanted = {name: torch.zeros_like(y) for name, y in x.items()} | wanted

    def of_tile(tile: Tile) -> tuple[Tensors, Cotangents]:
        first = partial(_first_derivative, tile, {})
        return vjp(first, x, _in_dtype(operands, cotangents))[1](wanted)

    dx, dcotangents = _sum(of_tile, problem, operands, len(cotangents))
    pairs = zip(dcotangents, cotangents, strict=True)
    return _by_operand(operands, dx), tuple(d.to(c.dtype) for d, c in pairs)


def _along(
    problem: AttentionProblem,
    operands: Operands,
    cotangents: Cotangents,
    moved: Optional,
    moved_cotangents: Cotangents,
) -> tuple[Tensors, Tensors]:
    """The first derivative and its tangents, by name."""
    directions = _by_name(operands, moved)
    x = _by_name(operands, operands)
    start = {name: x[name] for name in directions}, _in_dtype(operands, cotangents)

    def of_tile(tile: Tile) -> tuple[Tensors, Tensors]:
        first = partial(_first_derivative, tile, x)
        return pushed(first, start, (directions, _in_dtype(operands, moved_cotangents)))

    return _sum(of_tile, problem, operands, len(cotangents))


def _first_derivative(tile: Tile, fixed: Tensors, x: Tensors, cotangents: Cotangents) -> Tensors:
    """The gradients of all operands; `x` are those of which it is a function."""
    (gradients,) = vjp(tile, fixed | x)[1](cotangents)
    return gradients


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
    with operands.q.device:  # of index tensors
        total = of_tile(lambda x: _zeros(operands, x["q"])[:n])
        for segment, step in _segments(problem, operands, ROWS):
            for rows in segment.mask.query_tiles(step):
                tile = partial(_tile, problem, operands, segment, rows, n)
                total = tree_map(torch.add, total, of_tile(tile))
    return total


def _segments(
    problem: AttentionProblem, operands: Operands, rows: int
) -> Iterator[tuple[Segment, int]]:
    """The segments of a call, each with the rows of a tile: more than `rows` on a GPU."""
    if operands.q.dtype in FLOAT8:
        raise NotImplementedError(
            f"q: got {dtype_name(operands.q.dtype)}, of which there are neither higher derivatives "
            "nor those in forward mode; expected float64, float32, bfloat16 or float16"
        )
    for segment in segments(problem, operands):
        count = len(range(problem.B)[segment.batch]) * len(range(problem.Hq)[segment.heads])
        of_row = max(count * segment.mask.visibility.N, 1)
        yield segment, max(rows, GPU_SCORES // of_row if operands.q.is_cuda else 0)


def _zeros(operands: Operands, like: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros of the shapes of out and lse."""
    q, v = operands.q, operands.v
    return like.new_zeros(*q.shape[:-1], v.shape[-1]), like.new_zeros(lse_shape(operands))


def _tile(
    problem: AttentionProblem,
    operands: Operands,
    segment: Segment,
    rows: tuple[int, int],
    n: int,
    x: Tensors,
) -> Cotangents:
    """The rows of a tile in tensors of the whole call."""
    plan = Plan("plain", lse_dtype(operands.q.dtype), 1, max(problem.N, 1), ())
    tp = tile_problem(problem, operands._replace(**x), segment, plan)
    O, L = attend(tp, *rows)
    out, lse = _zeros(operands, O)
    segment.queries(out)[:, :, slice(*rows)] = O
    segment.rows(lse)[:, :, slice(*rows)] = L
    return (out, lse)[:n]


def attend(tp: TileProblem, m0: int, m1: int) -> tuple[Tensor, Tensor]:
    """O (batch, heads, rows, Dv) and L (batch, heads, rows) by the definition. A row that sees no
    key has O = 0 and L = 0 (with a sink: the sink).
    """
    shape = *tp.Q.shape[:2], m1 - m0
    Q = fold(tp.Q[:, :, m0:m1] * tp.score.options.softmax_scale, tp.K)
    S_parts, V_parts, kept = [], [], []
    if tp.sink is not None:  # a key whose value is zero
        S_parts.append(tp.sink[:, None, None].expand(*shape, 1))
        V_parts.append(tp.V.new_zeros(*tp.V.shape[:2], 1, tp.V.shape[-1]))
        kept.append(torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(*shape, 1))
    for run in tp.mask.key_runs(m0, m1, tp.BLOCK_N):
        K, V = keys_and_values(tp, m0, m1, run)
        S_parts.append(scores(tp, Q @ K.mT, m0, m1, run)[0])
        V_parts.append(V)
        if tp.dropout is not None:
            kept.append(tp.dropout.kept(m0, m1, run))
    if not S_parts:
        return Q.new_zeros(*shape, tp.V.shape[-1]), Q.new_zeros(shape)
    S = torch.cat(S_parts, -1)  # (batch, heads, rows, keys)
    dead = (S == -INFINITY).all(-1, keepdim=True)
    S = S.masked_fill(dead, 0.0)
    m = S.detach().amax(-1, keepdim=True)  # not exp(S - L), which loses l beside a huge m
    P = torch.exp(S - m)
    l = P.sum(-1, keepdim=True)
    L = (m + torch.log(l)).squeeze(-1)
    P = P / l
    if tp.dropout is not None:
        P = P * torch.cat(kept, -1) / tp.keep
    O = unfold(fold(P, tp.K) @ torch.cat(V_parts, -2), tp.Q)
    return O.masked_fill(dead, 0.0), L.masked_fill(dead[..., 0], 0.0)
