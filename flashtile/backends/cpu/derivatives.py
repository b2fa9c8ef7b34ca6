"""Derivatives of derivatives, and derivatives in forward mode, by PyTorch's own operations.

A tile here is some queries of a segment with all keys that they see. PyTorch differentiates it as
it is defined: the scores of `tiles.scores`, a softmax and a product with V. So every option, and
every order and mode of differentiation, is a composition of `torch.func.vjp` with itself, on any
device. Only one tile of scores exists at a time: memory is linear in the lengths.

The differentiable operands are a dict by name, `x`; gradients and tangents have the same names.
"""

from __future__ import annotations

from collections.abc import Callable
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
from .launch import tile_problem
from .plan import Plan
from .segments import Segment, segments
from .tiles import INFINITY, TileProblem, fold, keys_and_values, scores, unfold

Tensors = dict[str, Tensor]
Optional = tuple[Tensor | None, ...]  # one for each differentiable operand
Cotangents = tuple[Tensor, ...]  # of out, and of lse if somebody differentiates it
Tile = Callable[[Tensors], Cotangents]  # from x to the call's results, 0 in the rows of other tiles
T = TypeVar("T")

ROWS = 64  # of a tile, at least
GPU_SCORES = 1 << 24  # of a tile on a GPU, if they are no fewer rows: it waits for the host
NAMES = Operands._fields[:DIFFERENTIABLE]


def tangents(problem: AttentionProblem, operands: Operands, moved: Optional) -> Cotangents:
    """The tangents of out and lse, from those of the operands, `moved`."""
    directions = _by_name(operands, moved)
    x = _by_name(operands, operands)
    start = {name: x[name] for name in directions}

    def of_tile(tile: Tile) -> Cotangents:
        return _pushed(lambda y: tile(x | y), (start,), (directions,))

    out, lse = _sum(of_tile, problem, operands, 2)
    return out.to(operands.q.dtype), lse


def gradient_tangents(
    problem: AttentionProblem,
    operands: Operands,
    cotangents: Cotangents,
    moved: Optional,
    moved_cotangents: Cotangents,
) -> Optional:
    """The tangents of the first derivative, from those of the operands and of the cotangents."""
    directions = _by_name(operands, moved)
    x = _by_name(operands, operands)
    start = {name: x[name] for name in directions}, _in_dtype(operands, cotangents)

    def of_tile(tile: Tile) -> Tensors:
        first = partial(_first_derivative, tile, x)
        return _pushed(first, start, (directions, _in_dtype(operands, moved_cotangents)))

    return _by_operand(operands, _sum(of_tile, problem, operands, len(cotangents)))


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


def _first_derivative(tile: Tile, fixed: Tensors, x: Tensors, cotangents: Cotangents) -> Tensors:
    """The gradients of all operands; `x` are those of which it is a function."""
    (gradients,) = vjp(tile, fixed | x)[1](cotangents)
    return gradients


def _pushed(function: Callable[..., T], start: tuple[Any, ...], directions: tuple[Any, ...]) -> T:
    """The derivative of `function` along `directions`: that of its pull-back, which is linear.
    PyTorch does not nest its own forward mode.
    """
    result, pull, *_ = vjp(function, *start)
    (moved,) = vjp(pull, tree_map(torch.zeros_like, result))[1](directions)
    return moved


def _by_name(operands: Operands, tensors: Optional) -> Tensors:
    """Those of the differentiable operands, or of their tangents, that there are."""
    dtype = lse_dtype(operands.q.dtype)
    return {n: x.to(dtype) for n, x in zip(NAMES, tensors, strict=False) if x is not None}


def _by_operand(operands: Operands, x: Tensors) -> Optional:
    """`x` in the order and the dtypes of the operands."""
    named = zip(NAMES, operands, strict=False)
    return tuple(None if y is None else x[name].to(y.dtype) for name, y in named)


def _in_dtype(operands: Operands, cotangents: Cotangents) -> Cotangents:
    return tuple(x.to(lse_dtype(operands.q.dtype)) for x in cotangents)


def _sum(of_tile: Callable[[Tile], T], problem: AttentionProblem, operands: Operands, n: int) -> T:
    """The sum over the tiles, of which each has the first `n` of (out, lse)."""
    if operands.q.dtype in FLOAT8:
        raise NotImplementedError(
            f"q: got {dtype_name(operands.q.dtype)}, of which there are neither higher derivatives "
            "nor those in forward mode; expected float64, float32, bfloat16 or float16"
        )
    with operands.q.device:  # of index tensors
        total = of_tile(lambda x: _zeros(operands, x["q"])[:n])
        for segment in segments(problem, operands):
            count = len(range(problem.B)[segment.batch]) * len(range(problem.Hq)[segment.heads])
            of_row = max(count * segment.mask.visibility.N, 1)
            step = max(ROWS, GPU_SCORES // of_row if operands.q.is_cuda else 0)
            for rows in segment.mask.query_tiles(step):
                tile = partial(_tile, problem, operands, segment, rows, n)
                total = tree_map(torch.add, total, of_tile(tile))
    return total


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
