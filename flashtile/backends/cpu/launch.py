"""Run a problem on the CPU: allocate outputs, loop over segments, call the planned kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ...backend_interface import Gradients, Results, SharedGradients
from ...problem import (
    DIFFERENTIABLE,
    AttentionProblem,
    Operands,
    lse_dtype,
    lse_shape,
    needing_gradients,
    output_dtype,
)
from ...score_mod.rows import unpacked
from . import float8, native, tiles, whole_tiles
from .distances import DistanceGradients
from .plan import Plan, plan_backward, plan_forward
from .score_function import TileFunction
from .segments import Indices, Segment, segments


def forward(
    problem: AttentionProblem, operands: Operands, into: Results | None = None
) -> tuple[Tensor, ...]:
    """(out, lse) of a problem and, with `has_statistics`, the largest score and the entropy of each
    row; the strides of all but out may be any.
    """
    plan = plan_forward(problem)
    parts = tuple(segments(problem, operands, plan.kernel == "whole"))
    q = operands.q
    statistics = lse_dtype(q.dtype)
    dtype = statistics if problem.is_partial else output_dtype(q.dtype)
    if (
        into is None and len(parts) == 1 and parts[0].has_all_queries
    ):  # no copy into larger tensors needed
        O, *rows = _segment_forward(problem, operands, parts[0], plan)
        return _as_call(O, dtype), *(x if x.dtype == statistics else x.to(statistics) for x in rows)
    if into is None:  # rows that belong to no segment (padding) keep these values
        out = q.new_zeros(*q.shape[:-1], problem.Dv, dtype=dtype)
        values = (-torch.inf, -torch.inf, 0.0) if problem.has_statistics else (-torch.inf,)
        rows = [torch.full(lse_shape(operands), x, dtype=statistics) for x in values]
    else:
        out, *rows = into
    for segment in parts:
        O, *found = _segment_forward(problem, operands, segment, plan)
        segment.queries(out).copy_(O)
        for total, x in zip(rows, found, strict=True):
            segment.rows(total).copy_(x)
    return out, *rows


def backward(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    add_to: Tensor | None = None,
) -> Gradients:
    """Gradients of a problem, added up in the dtype of `lse`. Those of q, k and v have their
    dtypes, but sums of a partial problem stay sums: dk and dv, and dq unless it has whole queries.
    """
    plan = plan_backward(problem, dlse is not None)
    q, k, v = operands[:3]
    dead = _dead_rows(out, lse, operands.sink)
    if dead is not None:  # they have no gradient, whatever that of their output holds
        dout = dout.masked_fill(dead.transpose(-1, -2).unsqueeze(-1), 0.0)
    results = (out, lse, dout, dlse, dead)
    shared = needing_gradients(operands, problem.options, problem.bias_needs_grad)[3:]
    # Float64 where single numbers can have as many terms as there are scores.
    sum_dtypes = lse.dtype, lse.dtype, torch.float64, torch.float64, torch.float64
    pairs = zip(shared, sum_dtypes, strict=True)
    sums = SharedGradients(*(x if x is None else torch.zeros(x.shape, dtype=t) for x, t in pairs))
    is_sum = problem.is_partial and not problem.has_whole_queries, *[problem.is_partial] * 2
    dtypes = [lse.dtype if s else x.dtype for s, x in zip(is_sum, (q, k, v), strict=True)]
    parts = tuple(segments(problem, operands, plan.kernel == "whole"))
    if (
        add_to is None and len(parts) == 1 and parts[0].is_whole
    ):  # no copy into larger tensors needed
        grads = _segment_backward(problem, operands, parts[0], plan, results, sums)
        dq, dk, dv = map(_as_call, grads, dtypes)
    else:
        dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (k, v))
        dq = torch.zeros(q.shape, dtype=lse.dtype)
        if add_to is not None and add_to.dtype == lse.dtype:
            dq = add_to
        for segment in parts:
            grads = _segment_backward(problem, operands, segment, plan, results, sums)
            segment.queries(dq).add_(grads[0])
            segment.add_to_keys(dk, grads[1])
            segment.add_to_keys(dv, grads[2])
        if add_to is None:
            dq = dq.to(dtypes[0])
        elif add_to is not dq:
            dq = add_to.add_(dq)
        dk, dv = dk.to(dtypes[1]), dv.to(dtypes[2])
    return Gradients(
        dq,
        dk,
        dv,
        *(
            x if problem.is_partial or x is None or operand is None else x.to(operand.dtype)
            for x, operand in zip(sums, operands[3:DIFFERENTIABLE], strict=True)
        ),
    )


def _dead_rows(out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor | None:
    """Which rows see no key, in the shape of `lse`; None if there are none."""
    if sink is None:
        dead = lse == -torch.inf
    else:  # such a row has the sink as its log-sum-exp
        dead = lse == sink.to(lse.dtype).unsqueeze(-1)
    if not dead.any():
        return None
    if sink is not None:  # as has a row whose keys count for nothing
        dead = dead & (out == 0).all(-1).transpose(-1, -2)
    return dead


def check_indices(problem: AttentionProblem, operands: Operands) -> None:
    """Raise IndexError if the score function would read outside of a captured tensor; for calls
    that would have had an effect by then.
    """
    plan = plan_forward(problem)
    for segment in segments(problem, operands):
        function = TileFunction.of(operands, problem.options, segment)
        assert function is not None
        for m0, m1 in segment.mask.query_tiles(plan.BLOCK_M):
            for run in segment.mask.key_runs(m0, m1, plan.BLOCK_N):
                function.read((m0, m1), run)


def probabilities(problem: AttentionProblem, operands: Operands, lse: Tensor) -> Tensor:
    """Softmax probabilities (batch, heads, M, N) in q's dtype, negative where dropped; 0 outside of
    the mask.
    """
    plan = plan_backward(problem, lse_has_grad=True)  # always plain tiles
    shape = (problem.B, problem.Hq, problem.M, problem.N)
    probs = torch.zeros(shape, dtype=output_dtype(problem.dtype))
    for segment in segments(problem, operands):
        visibility = segment.mask.visibility
        tp = tile_problem(problem, operands, segment, plan)
        target = probs[segment.batch, segment.heads, : visibility.M, : visibility.N]
        L = segment.rows(lse).to(plan.compute_dtype)
        for (m0, m1), run, P in tiles.probabilities(tp, L):
            if tp.dropout is not None:
                P.mul_(torch.where(tp.dropout.kept(m0, m1, run), 1.0, -1.0))
            target[:, :, m0:m1, run.start : run.stop] = P
    return probs


def column_sums(problem: AttentionProblem, operands: Operands, lse: Tensor, into: Tensor) -> None:
    """Add up the probabilities of each key, (batch, heads, seq_k) or (heads, total_k)."""
    plan = plan_backward(problem, lse_has_grad=True)  # always plain tiles
    for segment in segments(problem, operands):
        tp, total = tile_problem(problem, operands, segment, plan), segment.columns(into)
        L = segment.rows(lse).to(plan.compute_dtype)
        for _, run, P in tiles.probabilities(tp, L, problem.is_partial):
            total[:, :, run.start : run.stop] += P.sum(-2)


def _as_call(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A segment (batch, heads, length, head_dim) as a call has it, (batch, length, heads, ...)."""
    x = x.transpose(1, 2)
    return x.contiguous() if x.dtype == dtype else x.to(dtype).contiguous()


def _segment_forward(
    problem: AttentionProblem, operands: Operands, segment: Segment, plan: Plan
) -> tuple[Tensor, ...]:
    if plan.kernel == "native":
        sink = None if operands.sink is None else operands.sink[segment.heads]
        O, L = native.forward(_native_problem(problem, operands, segment, plan), sink)
        # Pieces of keys are merged by their L, which may have lost the sizes of the parts.
        is_whole = native.single_piece(segment.mask, plan.BLOCK_M) is not None
        if is_whole or operands.bias is None or not tiles.is_large(L).any():
            return O, L
        plan = plan_backward(problem, lse_has_grad=True)  # always plain tiles
    if plan.kernel == "native whole":
        return whole_tiles.native_forward(_native_problem(problem, operands, segment, plan))
    if plan.kernel == "float8":
        unscaled = operands._replace(q_descale=None, k_descale=None, v_descale=None)
        scales = float8.scales(operands, segment)
        return float8.forward(tile_problem(problem, unscaled, segment, plan), scales)
    tp = tile_problem(problem, operands, segment, plan)
    if plan.kernel == "whole":
        return whole_tiles.forward(tp)
    return tiles.forward(tp, problem.has_statistics)


def _segment_backward(
    problem: AttentionProblem,
    operands: Operands,
    segment: Segment,
    plan: Plan,
    results: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    sums: SharedGradients,
) -> tiles.TileGradients:
    """dq, dk, dv of a segment; adds to `sums`."""
    out, lse, dout = results[:3]
    if operands.bias is not None and tiles.is_large(segment.rows(lse)).any():
        plan = plan_backward(problem, lse_has_grad=True)  # always plain tiles
    if plan.kernel not in ("native", "native whole"):
        return _plain_backward(problem, operands, segment, plan, results, sums)
    given, dtype = _native_problem(problem, operands, segment, plan), plan.compute_dtype
    O, dO, L = segment.queries(out), segment.queries(dout), segment.rows(lse)
    if sums.dsink is not None and operands.sink is not None:
        delta = (O.to(dtype) * dO.to(dtype)).sum(-1)
        sink = operands.sink[segment.heads].to(dtype)
        sums.dsink[segment.heads] += tiles.sink_gradient(sink, L, delta)
    run = native.backward if plan.kernel == "native" else whole_tiles.native_backward
    return run(given, O, L, dO)


def _native_problem(
    problem: AttentionProblem, operands: Operands, segment: Segment, plan: Plan
) -> native.NativeProblem:
    k, v = segment.keys(operands.k), segment.keys(operands.v)
    if problem.options.k_unpack:
        k, v = _unpacked(problem, k, v)
    q, bias = segment.queries(operands.q), operands.bias
    bias = None if bias is None else segment.per_score(bias)
    settings = plan.compute_dtype, segment.mask, problem.options.softmax_scale, plan.BLOCK_M
    return native.NativeProblem(q, k, v, bias, *settings)


def _plain_backward(
    problem: AttentionProblem,
    operands: Operands,
    segment: Segment,
    plan: Plan,
    results: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    sums: SharedGradients,
) -> tiles.TileGradients:
    out, lse, dout, dlse, dead = results
    dtype = plan.compute_dtype
    dO = segment.queries(dout).to(dtype)
    L = segment.rows(lse).to(dtype)
    O, tp = segment.queries(out).to(dtype), tile_problem(problem, operands, segment, plan)
    is_whole = plan.kernel == "whole"
    delta = whole_tiles.row_products(tp, O, dO) if is_whole else (O * dO).sum(-1)
    if dlse is not None:  # dS = P * (dP - delta + dlse)
        delta -= segment.rows(dlse)
        delta.masked_fill_(segment.rows(lse) == -torch.inf, 0.0)  # whatever dlse holds there
    if sums.dsink is not None and operands.sink is not None:
        sink = operands.sink[segment.heads].to(dtype)
        sums.dsink[segment.heads] += tiles.sink_gradient(sink, L, delta)
        if dead is not None:  # rows in which only the sink has P
            delta.masked_fill_(segment.rows(dead), 0.0)
    dbias = None if sums.dbias is None else segment.per_score(sums.dbias)
    given = tp, L, dO, delta, dbias, sums.dcaptured, _distance_gradients(sums, segment)
    if is_whole:
        return whole_tiles.backward(*given)
    return tiles.backward(*given, problem.is_partial)


def _distance_gradients(sums: SharedGradients, segment: Segment) -> DistanceGradients | None:
    """The parts of the sums for a segment's sequences and heads; None if they are not needed."""
    dslopes, dtable = sums.dalibi_slopes, sums.drelative_bias
    if dslopes is None and dtable is None:
        return None
    return DistanceGradients(
        None if dslopes is None else _slopes(dslopes, segment),
        None if dtable is None else dtable[segment.heads],
    )


def _slopes(slopes: Tensor, segment: Segment) -> Tensor:
    """ALiBi's slopes, or their gradients, of a segment: (batch or 1, heads)."""
    if slopes.dim() == 1:
        return slopes[None, segment.heads]
    return slopes[segment.batch, segment.heads]


def tile_problem(
    problem: AttentionProblem, operands: Operands, segment: Segment, plan: Plan
) -> tiles.TileProblem:
    """A segment for the plain tiles: contiguous, in the compute dtype, float8 scales applied."""
    dtype, options = plan.compute_dtype, problem.options
    heads = segment.heads
    slopes, table = operands.alibi_slopes, operands.relative_bias
    if slopes is not None:
        slopes = _slopes(slopes, segment).to(dtype)[:, :, None, None]
    drop = None
    if options.dropout_p > 0:
        assert operands.rng_state is not None
        indices = Indices.of(operands, options, segment)
        drop = tiles.DropoutRule.of(options.dropout_p, operands.rng_state, indices)
    bias = operands.bias
    k, v = segment.keys(operands.k), segment.keys(operands.v)
    if options.k_unpack:
        k, v = _unpacked(problem, k, v)
    return tiles.TileProblem(
        Q=_scaled(segment.queries(operands.q), operands.q_descale, segment, dtype, True),
        K=_scaled(k, operands.k_descale, segment, dtype, False),
        V=_scaled(v, operands.v_descale, segment, dtype, False),
        mask=segment.mask,
        score=tiles.ScoreRule(
            options=options,
            alibi_slopes=slopes,
            bias=None if bias is None else segment.per_score(bias),
            relative_bias=None if table is None else table[heads].to(dtype),
            function=TileFunction.of(operands, options, segment),
        ),
        dropout=drop,
        sink=None if operands.sink is None else operands.sink[heads].to(dtype),
        BLOCK_M=plan.BLOCK_M,
        BLOCK_N=plan.BLOCK_N,
    )


def _unpacked(problem: AttentionProblem, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of packed rows (batch, kv_heads, N, bytes), in the dtype of the queries."""
    options, dtype = problem.options, problem.dtype
    keys = unpacked(options.k_unpack, k, problem.D).to(dtype)
    return keys, unpacked(options.v_unpack, v, problem.Dv).to(dtype)


def _scaled(
    x: Tensor,
    descale: Tensor | None,
    segment: Segment,
    dtype: torch.dtype,
    of_queries: bool,
) -> Tensor:
    """`x` (batch, heads or kv_heads, length, head_dim) contiguous in `dtype`, times its float8
    scales.
    """
    x = x.to(dtype).contiguous()
    if descale is None:
        return x
    factors = float8.query_factors if of_queries else float8.key_factors
    return x * factors(descale, segment).to(dtype)
