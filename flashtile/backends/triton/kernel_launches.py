"""The kernel launches of a pass, described without making them.

`gpu/launch_cache.py` asks for them on the first calls of a kind, and tests compile them for other
GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gpu import hardware
from ...gpu.intrinsics import IS_INTERPRETED
from ...gpu.launch import Launch
from ...gpu.rows import (
    HeadRows,
    at_boundary,
    common_alignment,
    fields_of,
    has_aligned_rows,
    row_arguments,
    with_adjacent_elements,
    with_aligned_rows,
)
from ...gpu.score_source import GRADIENT, SCORE, function_of, source_of
from ...ops.merge.kernel import merge_launch, parts_arguments
from ...problem import AttentionProblem, NewTokens, Operands, captured_needs_grad
from .arguments import NO_BIAS, NO_LISTS, NO_NEW, Lists, bias_of, common_of, new_of
from .backward_pass import delta_kernel, key_gradient_kernel, query_gradient_kernel
from .captured_source import CAPTURED, SUMS, captured_source, kept_tiles
from .column_sum_pass import column_sum_kernel
from .forward_pass import forward_kernel, merge_in_order_kernel
from .forward_tangent import forward_tangent_kernel
from .listed_keys import (
    listed_forward_kernel,
    listed_key_gradient_kernel,
    listed_query_gradient_kernel,
    queries_of_runs,
)
from .masks import list_tiles_kernel
from .plan import KernelConfig, KernelPlan, Plan, listed_plan, plan
from .score_gradients import (
    bias_gradient_kernel,
    captured_gradient_kernel,
    distance_gradient_kernel,
    probabilities_kernel,
    row_sums_kernel,
)
from .short_sequences import short_backward_kernel, short_forward_kernel
from .unpack_source import unpack_source

# Tiles that one step of `list_tiles_kernel` classifies.
LIST_CHUNK = 128
SPAN_LIST_CHUNK = 32  # of which it reads the intervals of all rows
OPERANDS = len(Operands._fields)


class BackwardBuffers(NamedTuple):
    """What the kernels of a backward write to."""

    dq: Any  # tensors, all three None if only the gradients of what scores read are computed
    dk: Any
    dv: Any
    # As `lse`; None if no kernel reads them.
    delta: Tensor | None = None
    pivot: Tensor | None = None  # or twice as large: see `backward_pass.delta_kernel`
    dbias: Tensor | None = None  # of short sequences, dS, which `launch.py` adds up
    distance_sums: Tensor | None = None  # see `distance_gradient_kernel`
    dcaptured: Tensor | None = None  # float32, zeros


def forward_launches(problem: AttentionProblem, given: Any, made: Any) -> list[Launch]:
    """The launches of a forward.

    Args:
        given: the operands, then those of `NewTokens` if the problem is `appending`.
        made: what the launches fill, as `launch.forward_buffers` makes it.
    """
    operands, new = Operands(*given[:OPERANDS]), given[OPERANDS:]
    out, lse, *parts = made  # the lse with what `store_statistics` stores behind it
    written = (parts[0][0], parts[1]) if parts else (out, lse)
    q, k, v = map(with_adjacent_elements, operands[:3])
    if problem.has_key_index:
        return [listed_forward_launch(problem, operands, out, lse)]
    planned = plan_with_functions(problem, has_aligned_rows(q, k, v))
    kernel_plan = planned.split if parts else planned.forward
    config = kernel_plan.config
    if problem.options.k_unpack:
        config = replace(config, **unpack_functions(problem, config, k, v))
    common = common_of(problem, operands)
    if planned.short is not None and not parts:
        arguments = {
            **common,
            **row_arguments(q=q, k=k, v=v, out=out),
            "lse_ptr": lse,
            "sink_ptr": at_boundary(operands.sink),
        }
        programs = problem.B * problem.Hq
        return [_planned(short_forward_kernel, (programs,), arguments, planned.short)]
    launches = []
    lists = NO_LISTS
    if problem.block_tile is not None:
        lists, launch = lists_launch(problem, operands, common, kernel_plan, by_keys=False)
        launches.append(launch)
    rows_per_query = config.GROUP if config.IS_PACKED_GROUP else 1
    programs = -(-problem.M * rows_per_query // config.BLOCK_M)
    programs *= problem.B * problem.Hq // rows_per_query
    if config.HAS_FLOAT8_KEYS and config.PAIR == 2:
        k, v = k.view(torch.int16), v.view(torch.int16)
    appended = new_of(NewTokens(*new), operands.k, operands.v) if new else NO_NEW
    arguments = common | appended
    arguments |= {
        **row_arguments(q=q, k=k, v=v, out=written[0]),
        "lse_ptr": written[1],
        "sink_ptr": at_boundary(operands.sink),
        "lists": lists,
        "cfg": config,
    }
    grid = (programs, parts[0].shape[0]) if parts else (programs,)
    how = kernel_plan.warps, kernel_plan.stages, config.IS_CHAINED, kernel_plan.registers
    launches.append(Launch(forward_kernel, grid, arguments, *how))
    if parts and config.IS_INVARIANT:
        scale = arguments["score_data"].drop_scale
        launches.append(merge_in_order_launch(parts[0], parts[1], out, lse, scale, config))
    elif parts:
        launches.append(merge_launch(parts[0], parts[1], out, lse, config.IS_CHAINED))
    return launches


def merge_in_order_launch(
    out_parts: Tensor, lse_parts: Tensor, out: Tensor, lse: Tensor, scale: float, config: Any
) -> Launch:
    """The launch that merges parts, which are not normalised, in the order of their keys."""
    arguments = {
        **parts_arguments(out_parts, lse_parts, out, lse),
        "scale": scale,
        "BLOCK_DV": config.BLOCK_DV,
        "cfg": config,
    }
    grid = (out.shape[:-1].numel(),)
    is_early = config.IS_CHAINED
    return Launch(merge_in_order_kernel, grid, arguments, 1, 1, is_early=is_early)


def backward_launches(problem: AttentionProblem, given: Any, made: Any) -> list[Launch]:
    """The launches of a backward.

    Args:
        given: the operands, then out, lse (contiguous), dout and dlse.
        made: what the launches fill, as `launch.backward_buffers` makes it.
    """
    *tensors, out, lse, dout, dlse = given
    operands, made = Operands(*tensors), BackwardBuffers(*made)
    q, k, v = map(with_adjacent_elements, operands[:3])
    out, dout = with_aligned_rows(out), with_aligned_rows(dout)
    planned = plan_with_functions(problem, has_aligned_rows(q, k, v))
    common = common_of(problem, operands)
    shared = {
        **row_arguments(q=q, k=k, v=v, dout=dout),
        "pivot_ptr": made.pivot,
        "delta_ptr": made.delta,
        **common,
    }
    if planned.short is not None and made.dq is not None:
        arguments = {
            **shared,
            **row_arguments(dq=made.dq, dk=made.dk, dv=made.dv),
            "ds_ptr": made.dbias,
            "lse_ptr": lse,
            "dlse_ptr": None if dlse is None else dlse.contiguous(),
            "sink_ptr": at_boundary(operands.sink),
        }
        programs = problem.B * problem.Hk
        launches = [_planned(short_backward_kernel, (programs,), arguments, planned.short)]
        if made.distance_sums is not None:
            launches.append(distance_launch(problem, made.distance_sums, shared, planned.bands))
        return launches
    launches = [delta_launch(problem, out, lse, dout, dlse, made, planned.queries)]
    if planned.scores.config.HAS_LARGE_SCORES and not problem.is_partial:
        sink = at_boundary(operands.sink)
        launches.append(row_sums_launch(problem, q, k, sink, made, common, planned.scores))
    passes: list[tuple[Any, KernelPlan, dict[str, Any]]] = [
        (key_gradient_kernel, planned.keys, {"HAS_DK": True, "HAS_DV": planned.values is None}),
        (query_gradient_kernel, planned.queries, {}),
    ]
    if planned.values is not None:
        passes.insert(1, (key_gradient_kernel, planned.values, {"HAS_DK": False, "HAS_DV": True}))
    for kernel, kernel_plan, own in passes if made.dq is not None else []:
        config, by_keys = kernel_plan.config, kernel is key_gradient_kernel
        own["lists"] = NO_LISTS
        if problem.block_tile is not None or (problem.spans and by_keys):
            own["lists"], launch = lists_launch(problem, operands, common, kernel_plan, by_keys)
            launches.append(launch)
        if by_keys:
            own |= row_arguments(dk=made.dk, dv=made.dv)
            programs = -(-problem.N // config.BLOCK_N) * problem.B * problem.Hk
        else:
            own |= row_arguments(dq=made.dq)
            own["IS_ADDED"] = problem.is_partial and not problem.has_whole_queries
            programs = -(-problem.M // config.BLOCK_M) * problem.B * problem.Hq
        launches.append(_planned(kernel, (programs,), shared | own, kernel_plan))
    if made.dbias is not None:
        launches.append(bias_launch(problem, made.dbias, shared, planned.bands))
    if made.distance_sums is not None:
        launches.append(distance_launch(problem, made.distance_sums, shared, planned.bands))
    if made.dcaptured is not None:
        launches.append(captured_launch(problem, made.dcaptured, shared, planned.bands))
    return launches


def listed_forward_launch(
    problem: AttentionProblem, operands: Operands, out: Tensor, lse: Tensor
) -> Launch:
    """The forward over a list of keys for each query."""
    q, k, v = map(with_adjacent_elements, operands[:3])
    kernel_plan = listed_plan(problem, has_aligned_rows(q, k, v)).forward
    arguments = {
        **row_arguments(q=q, k=k, v=v, out=out),
        "lse_ptr": lse,
        "sink_ptr": at_boundary(operands.sink),
    }
    return _listed_launch(listed_forward_kernel, problem, operands, arguments, kernel_plan)


def listed_backward_launches(
    problem: AttentionProblem,
    operands: Operands,
    results: tuple[Tensor, Tensor, Tensor, Tensor | None],
    made: BackwardBuffers,
) -> list[Launch]:
    """The backward over a list of keys for each query, whose entries PyTorch sorts by key if
    dK and dV have a kernel of their own. `results`: out, lse, dout and dlse.
    """
    out, lse, dout, dlse = results
    q, k, v = map(with_adjacent_elements, operands[:3])
    out, dout = with_aligned_rows(out), with_aligned_rows(dout)
    planned = listed_plan(problem, has_aligned_rows(q, k, v))
    launches = [delta_launch(problem, out, lse, dout, dlse, made, planned.queries)]
    shared = {
        **row_arguments(q=q, k=k, v=v, dout=dout, dk=made.dk, dv=made.dv),
        "pivot_ptr": made.pivot,
        "delta_ptr": made.delta,
    }
    arguments = shared | row_arguments(dq=made.dq)
    arguments["HAS_KEY_GRADIENTS"] = planned.keys is None
    kernel = listed_query_gradient_kernel
    launches.append(_listed_launch(kernel, problem, operands, arguments, planned.queries))
    if planned.keys is None:
        return launches
    assert operands.key_index is not None
    entries = queries_of_runs(problem, operands)
    arguments = {
        **shared,
        **dict(zip(("rows_ptr", "runs_ptr", "starts_ptr"), entries, strict=True)),
        "list_heads": operands.key_index.shape[2],
        **common_of(problem, operands),
        "RUN": problem.options.key_run,
    }
    programs = -(-problem.N // planned.keys.config.BLOCK_N) * problem.B * problem.Hk
    launches.append(_planned(listed_key_gradient_kernel, (programs,), arguments, planned.keys))
    return launches


def _listed_launch(
    kernel: Any,
    problem: AttentionProblem,
    operands: Operands,
    arguments: dict[str, Any],
    kernel_plan: KernelPlan,
) -> Launch:
    """A program for each query, key head and part of its group."""
    index, config = operands.key_index, kernel_plan.config
    assert index is not None
    index = with_adjacent_elements(index)
    shared = (n == 1 for n in index.shape)
    batch, row, head, _ = (0 if s else n for s, n in zip(shared, index.stride(), strict=True))
    arguments |= {
        **fields_of(index=HeadRows(index, batch, row, head)),
        "top": index.shape[3],
        **common_of(problem, operands),
        "RUN": problem.options.key_run,
    }
    programs = problem.B * problem.M * problem.Hk * -(-config.GROUP // config.BLOCK_M)
    return _planned(kernel, (programs,), arguments, kernel_plan)


def _planned(
    kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], kernel_plan: KernelPlan
) -> Launch:
    """A launch with the tiles, warps and stages of its plan, and those of the arguments that the
    kernel takes.
    """
    config, warps, stages, registers = kernel_plan
    arguments = {name: config if name == "cfg" else arguments[name] for name in kernel.arg_names}
    return Launch(kernel, grid, arguments, warps, stages, registers=registers)


def delta_launch(
    problem: AttentionProblem,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    made: BackwardBuffers,
    kernel_plan: KernelPlan,
) -> Launch:
    """rowsum(dO * O) - dlse and the log-sum-exp in base 2 of every row, packed or not."""
    sequences = problem.B if out.dim() == 4 else 1
    rows = out.shape[-3]
    config = kernel_plan.config
    arguments = {
        **row_arguments(out=out, dout=dout),
        "lse_ptr": lse,
        "dlse_ptr": None if dlse is None else dlse.contiguous(),
        "delta_ptr": made.delta,
        "pivot_ptr": made.pivot,
        "rows_total": rows,
        "heads": problem.Hq,
        "BLOCK": config.BLOCK_M,
        "DV": config.DV,
        "BLOCK_DV": config.BLOCK_DV,
        "ALIGNMENT": config.OUT_ALIGNMENT,
        "HAS_LARGE_SCORES": config.HAS_LARGE_SCORES,
        "PRECISION": config.PRECISION,
    }
    grid = (sequences * problem.Hq, -(-rows // config.BLOCK_M))
    return Launch(delta_kernel, grid, arguments, 4, 1)


def row_sums_launch(
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    sink: Tensor | None,
    made: BackwardBuffers,
    common: dict[str, Any],
    kernel_plan: KernelPlan,
) -> Launch:
    """The row sums that large log-sum-exps have lost; not for a part of the keys."""
    arguments = {
        **row_arguments(q=q, k=k),
        "pivot_ptr": made.pivot,
        "delta_ptr": made.delta,
        "sink_ptr": sink,
        **common,
    }
    grid = (problem.B * problem.Hq, -(-problem.M // kernel_plan.config.BLOCK_M))
    return _planned(row_sums_kernel, grid, arguments, kernel_plan)


def lists_launch(
    problem: AttentionProblem,
    operands: Operands,
    common: dict[str, Any],
    kernel_plan: KernelPlan,
    by_keys: bool,
) -> tuple[Lists, Launch]:
    """The lists of tiles that a kernel of `kernel_plan` visits."""
    config = kernel_plan.config
    masks = [x.shape for x in (operands.tile_kinds, operands.span_starts) if x is not None]
    batch, heads = max(x[0] for x in masks), max(x[1] for x in masks)
    if problem.layout != "dense" or problem.has_lengths:
        batch = problem.B
    m_tiles, n_tiles = -(-problem.M // config.BLOCK_M), -(-problem.N // config.BLOCK_N)
    own, other = (n_tiles, m_tiles) if by_keys else (m_tiles, n_tiles)
    device = operands.q.device
    count = batch * heads * own
    lists = Lists(
        counts=torch.empty(count, 2, dtype=torch.int32, device=device),
        tiles=torch.empty(count, other, dtype=torch.int32, device=device),
        has_batch=int(batch > 1),
        has_heads=int(heads > 1),
    )
    arguments = common | {
        "lists": lists,
        "IS_BY_KEYS": by_keys,
        "CHUNK": SPAN_LIST_CHUNK if problem.spans else LIST_CHUNK,
    }
    listing = KernelPlan(config, warps=4, stages=1)
    return lists, _planned(list_tiles_kernel, (batch * heads, own), arguments, listing)


def bias_launch(
    problem: AttentionProblem, dbias: Tensor, shared: dict[str, Any], kernel_plan: KernelPlan
) -> Launch:
    """The gradient of the bias, in the bias's own shape."""
    batch, heads, rows, keys = dbias.shape
    config = kernel_plan.config
    # Tiles need not be square, and two of so many rows fit. Triton 3.6 compiles tiles of 32 x 32 in
    # float32 to wrong sums on sm_90, for packed sequences with head dims 5 and 32.
    if kernel_plan.stages > 1 or config.BLOCK_M == config.BLOCK_N == 32:
        config = replace(config, BLOCK_M=2 * config.BLOCK_M)
        kernel_plan = kernel_plan._replace(config=config)
    arguments = shared | {
        "dbias": bias_of(dbias, problem.N),
        "IS_BATCH_SHARED": batch == 1,
        "IS_HEAD_SHARED": heads == 1,
        "IS_ROW_SHARED": rows == 1,
        "IS_KEY_SHARED": keys == 1,
    }
    grid = (batch * heads, -(-rows // config.BLOCK_M), -(-keys // config.BLOCK_N))
    return _planned(bias_gradient_kernel, grid, arguments, kernel_plan)


def distance_launch(
    problem: AttentionProblem, sums: Tensor, shared: dict[str, Any], kernel_plan: KernelPlan
) -> Launch:
    """The sums of dS over scores of equal distance, of each sequence and head."""
    return _launch_of_bands(
        distance_gradient_kernel, problem, shared | {"sums_ptr": sums}, kernel_plan
    )


def captured_launch(
    problem: AttentionProblem, dcaptured: Tensor, shared: dict[str, Any], kernel_plan: KernelPlan
) -> Launch:
    """The gradients of what the score function captures."""
    arguments = shared | {"dcaptured_ptr": dcaptured}
    return _launch_of_bands(captured_gradient_kernel, problem, arguments, kernel_plan)


def _launch_of_bands(
    kernel: Any, problem: AttentionProblem, arguments: dict[str, Any], kernel_plan: KernelPlan
) -> Launch:
    """A program for each band of square tiles, of each sequence and head."""
    config = kernel_plan.config
    side = min(config.BLOCK_M, config.BLOCK_N)
    square = kernel_plan._replace(config=replace(config, BLOCK_M=side, BLOCK_N=side))
    bands = -(-problem.M // side) + -(-problem.N // side) - 1
    grid = (problem.B * problem.Hq, bands if problem.M and problem.N else 0)
    return _planned(kernel, grid, arguments, square)


def probabilities_launch(
    problem: AttentionProblem, operands: Operands, lse: Tensor, probs: Tensor
) -> Launch:
    """Fill `probs` (B, Hq, M, N) where something is visible."""
    q, k = map(with_adjacent_elements, operands[:2])
    kernel_plan = plan_with_functions(problem, has_aligned_rows(q, k)).scores
    config = kernel_plan.config
    arguments = {
        **row_arguments(q=q, k=k),
        "probs_ptr": probs,
        "lse_ptr": lse,
        **common_of(problem, operands),
    }
    m_tiles, n_tiles = -(-problem.M // config.BLOCK_M), -(-problem.N // config.BLOCK_N)
    grid = (problem.B * problem.Hq, m_tiles, n_tiles)
    return _planned(probabilities_kernel, grid, arguments, kernel_plan)


def tangent_launches(problem: AttentionProblem, given: Any, made: Any) -> list[Launch]:
    """The launches of forward mode.

    Args:
        given: the operands, the tangents of q, k, v, bias and sink, then out and lse, contiguous.
        made: the tangents of out and lse.
    """
    operands = Operands(*given[:OPERANDS])
    tq, tk, tv, tbias, tsink, out, lse = given[OPERANDS:]
    q, k, v = map(with_adjacent_elements, operands[:3])
    along = {"tq": tq, "tk": tk, "tv": tv}
    along = {name: None if x is None else with_aligned_rows(x) for name, x in along.items()}
    aligned = has_aligned_rows(q, k, v, *(x for x in along.values() if x is not None))
    kernel_plan = plan_with_functions(problem, aligned).queries
    config = kernel_plan.config
    if config.HAS_WGMMA and config.BLOCK_D == config.BLOCK_DV == 64:
        # 0.9 of the time of dQ's tile
        kernel_plan = KernelPlan(replace(config, BLOCK_M=64), warps=4, stages=3)
    elif config.BLOCK_D > 64:  # shared memory: twice as many tensors are in flight as in dQ
        most = 2 if config.BLOCK_D <= 128 and q.element_size() == 2 else 1
        kernel_plan = kernel_plan._replace(stages=min(kernel_plan.stages, most))
    common = common_of(problem, operands)
    launches, lists = [], NO_LISTS
    if problem.block_tile is not None:
        lists, launch = lists_launch(problem, operands, common, kernel_plan, by_keys=False)
        launches.append(launch)
    arguments = {
        **row_arguments(q=q, k=k, v=v, out=out, **along, tout=made[0]),
        "lse_ptr": lse,
        "tlse_ptr": made[1],
        "sink_ptr": at_boundary(operands.sink),
        "tsink_ptr": at_boundary(tsink),
        **common,
        "tbias": NO_BIAS if tbias is None else bias_of(tbias, problem.N),
        "lists": lists,
        "HAS_SCORES": any(x is not None for x in (tq, tk, tbias, tsink)),
    }
    programs = -(-problem.M // kernel_plan.config.BLOCK_M) * problem.B * problem.Hq
    return [*launches, _planned(forward_tangent_kernel, (programs,), arguments, kernel_plan)]


def column_sum_launch(
    problem: AttentionProblem,
    operands: Operands,
    lse: Tensor,
    lost: Tensor | None,
    column_sum: Tensor,
) -> Launch:
    """Add up the probabilities of each key; `lost` is what rounding took from `lse`."""
    q, k = map(with_adjacent_elements, operands[:2])
    planned = plan_with_functions(problem, has_aligned_rows(q, k))
    chosen = planned.scores
    if problem.dtype != torch.float32 and problem.D <= 128:
        chosen = chosen._replace(warps=4, stages=2)
        if planned.queries.config.HAS_WGMMA:
            # Each thread keeps its sums. Several programs share a multiprocessor: one multiplies
            # while others compute exponentials.
            config = replace(chosen.config, BLOCK_M=64, BLOCK_N=64, HAS_DESCRIPTORS=True)
            chosen = chosen._replace(config=config, stages=3)
            options = problem.options
            is_windowed = options.window_left is not None
            is_plain = not (problem.has_own_mask or options.score_mod or is_windowed)
            if config.BLOCK_D > 64 and is_plain:
                # Twice the keys, because every program reads all queries. Others would spill.
                config = replace(config, BLOCK_N=128)
                chosen = chosen._replace(config=config, stages=2, registers=168)
    arguments = {
        **row_arguments(q=q, k=k),
        **common_of(problem, operands),
        "sums_ptr": column_sum,
        "lse_ptr": lse,
        "lost_ptr": lost,
    }
    grid = (-(-problem.N // chosen.config.BLOCK_N), problem.B * problem.Hq)
    return _planned(column_sum_kernel, grid, arguments, chosen)


# Score functions as functions of Triton, made from their programs.


def unpack_functions(
    problem: AttentionProblem, config: KernelConfig, k: Tensor, v: Tensor
) -> dict[str, Any]:
    """The functions of a kernel that unpack the rows of a cache format, by their names in
    `KernelConfig`.
    """
    options, pair, D = problem.options, config.PAIR, config.D
    alignment = min(common_alignment(k), common_alignment(v))
    has_lanes = not (IS_INTERPRETED or hardware.is_rocm())

    def function(text: str, elements: range, padded: int, pair: int, is_scaled: bool) -> Any:
        how = problem.dtype, padded // pair, alignment, has_lanes, is_scaled
        return function_of(unpack_source(text, elements, pair, *how))

    columns, tail = range(D), range(D, D + config.TAIL_D)
    # Weights in float16 would lose what small scales take of them.
    is_scaled = problem.dtype != torch.float16
    return {
        "ROW_ALIGNMENT": alignment,
        "UNPACK_KEYS": function(options.k_unpack, columns, config.BLOCK_D, pair, True),
        "UNPACK_TAIL": function(options.k_unpack, tail, config.BLOCK_TAIL, 1, False)
        if tail
        else None,
        "UNPACK_VALUES": function(
            options.v_unpack, range(config.DV), config.BLOCK_DV, pair, is_scaled
        ),
    }


def plan_with_functions(problem: AttentionProblem, aligned: bool) -> Plan:
    """The plan of a call; its kernels call the score function, those of the backward also its
    derivative.
    """
    planned, options = plan(problem, aligned), problem.options
    if not options.score_mod:
        return planned
    forward: dict[str, Any] = {"SCORE_MOD": function_of(source_of(options.score_mod, SCORE))}
    backward = dict(forward)
    if options.score_mod_gradient:
        backward["SCORE_GRADIENT"] = function_of(source_of(options.score_mod_gradient, GRADIENT))
    bands = dict(forward)
    if captured_needs_grad(options):
        given = options.score_mod_gradient
        by_difference = problem.runs == 0
        for name, kind in (("CAPTURED_GRADIENT", CAPTURED), ("CAPTURED_SUMS", SUMS)):
            bands[name] = function_of(captured_source(given, kind, by_difference))
        bands["CAPTURED_KEPT"] = kept_tiles(given, by_difference)

    def calling(kernel_plan: KernelPlan, functions: dict[str, Any]) -> KernelPlan:
        return kernel_plan._replace(config=replace(kernel_plan.config, **functions))

    return Plan(
        forward=calling(planned.forward, forward),
        split=calling(planned.split, forward),
        keys=calling(planned.keys, backward),
        queries=calling(planned.queries, backward),
        values=None if planned.values is None else calling(planned.values, backward),
        scores=calling(planned.scores, forward),
        bands=calling(planned.bands, bands),
    )
