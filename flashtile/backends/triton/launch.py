"""Runs a problem on the GPU: allocates the outputs and launches the planned kernels.

Each `*_launch` function describes one kernel launch without making it: see `gpu/launch.py`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gpu.hardware import multiprocessors
from ...gpu.launch import Launch, run
from ...gpu.relaunch import run_all
from ...gpu.rows import ALIGNMENT, Rows, contiguous, is_aligned, rows_of
from ...lru import memoised
from ...ops.merge.kernel import merge_launch
from ...problem import AttentionProblem, Operands, lse_shape
from .. import Gradients
from .arguments import NO_LISTS, NUMBERS, Lists, bias_of, common_of
from .backward_pass import delta_kernel, key_gradient_kernel, query_gradient_kernel
from .bias_gradient import bias_gradient_kernel
from .block_lists import list_tiles_kernel
from .forward_pass import forward_kernel
from .plan import KernelPlan, plan
from .score_matrix import probabilities_kernel
from .splits import splits_of

# Tiles that one step of `list_tiles_kernel` classifies.
LIST_CHUNK = 128


def forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of a problem."""

    def describe(given: Any, made: Any) -> list[Launch]:
        return forward_launches(problem, Operands(*given), *made)

    made = forward_buffers(problem, operands)
    memory = operands.workspace
    call = problem, None if memory is None else memory.data_ptr() % ALIGNMENT
    given = operands._replace(workspace=None)  # the buffers may be in it
    run_all("triton forward", call, given, made, describe)
    return made[0], made[1]


def backward(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """Gradients of a problem; every one is summed in float32 in one fixed order."""
    if operands.page_table is not None or operands.cache_batch_idx is not None:
        return _backward_of_cache(problem, operands, out, lse, dout, dlse)
    return _backward(problem, operands, out, lse.contiguous(), dout, dlse, operands.k.dtype)


def _backward(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    key_dtype: torch.dtype,
) -> Gradients:
    def describe(given: Any, made: Any) -> list[Launch]:
        *tensors, out, lse, dout, dlse = given
        made = BackwardBuffers(*made)
        return backward_launches(problem, Operands(*tensors), out, lse, dout, dlse, made)

    made = backward_buffers(problem, operands, lse, key_dtype)
    given = (*operands, out, lse, dout, dlse)
    run_all("triton backward", (problem, key_dtype), given, made, describe)
    sink = operands.sink
    dsink = None if sink is None else _sink_gradient(sink, lse, made.delta)
    return Gradients(made.dq, made.dk, made.dv, made.dbias, dsink)


def probabilities(problem: AttentionProblem, operands: Operands, lse: Tensor) -> Tensor:
    """Softmax probabilities (batch, heads, M, N) in q's dtype, negative where dropped; 0 outside of
    the mask."""
    shape = (problem.B, problem.Hq, problem.M, problem.N)
    probs = operands.q.new_zeros(shape)
    run([probabilities_launch(problem, operands, lse.contiguous(), probs)], operands.q)
    return probs


def forward_buffers(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, ...]:
    """(out, lse), and if the KV loop is split, (out, lse) of its parts."""
    aligned, tokens = is_aligned(operands.k, operands.v), operands.q.shape[:-2].numel()
    splits = _splits(problem, aligned, operands.q.device, tokens)
    results = _outputs(problem, operands, splits)
    return results if splits == 1 else (*results, *_parts(problem, operands, splits))


@memoised(4096)
def _splits(problem: AttentionProblem, aligned: bool, device: torch.device, tokens: int) -> int:
    return splits_of(problem, plan(problem, aligned).split.config, multiprocessors(device), tokens)


def forward_launches(
    problem: AttentionProblem, operands: Operands, out: Tensor, lse: Tensor, *parts: Tensor
) -> list[Launch]:
    """The launches that fill `forward_buffers`."""
    planned = plan(problem, is_aligned(operands.k, operands.v))
    kernel_plan = planned.split if parts else planned.forward
    config = kernel_plan.config
    written = (parts[0][0], parts[1]) if parts else (out, lse)
    common = common_of(problem, operands)
    launches = []
    lists = NO_LISTS
    if problem.block_tile is not None:
        lists, launch = lists_launch(problem, operands, common, kernel_plan, by_keys=False)
        launches.append(launch)
    rows_per_query = config.GROUP if config.IS_PACKED_GROUP else 1
    programs = -(-problem.M * rows_per_query // config.BLOCK_M)
    programs *= problem.B * problem.Hq // rows_per_query
    k, v = operands.k, operands.v
    if config.PAIR == 2:
        k, v = k.view(torch.int16), v.view(torch.int16)
    arguments = common | {
        "q": rows_of(operands.q),
        "k": rows_of(k),
        "v": rows_of(v),
        "out": rows_of(written[0]),
        "lse_ptr": written[1],
        "sink_ptr": contiguous(operands.sink),
        "lists": lists,
        "cfg": config,
    }
    grid = (programs, parts[0].shape[0]) if parts else (programs,)
    how = kernel_plan.warps, kernel_plan.stages, config.IS_CHAINED
    launches.append(Launch(forward_kernel, grid, arguments, *how))
    if parts:
        launches.append(merge_launch(parts[0], parts[1], out, lse, config.IS_CHAINED))
    return launches


def _outputs(problem: AttentionProblem, operands: Operands, splits: int) -> tuple[Tensor, Tensor]:
    """(out, lse) to write to; merging parts writes every row, else rows that belong to no sequence
    are written by no program."""
    q = operands.q
    shape = (*q.shape[:-1], problem.Dv)
    if problem.layout == "dense" or splits > 1:
        # Sizes one by one: PyTorch takes half as long to read them as it takes for a tuple.
        return q.new_empty(*shape), q.new_empty(*lse_shape(operands), dtype=torch.float32)
    lse = torch.full(lse_shape(operands), -torch.inf, dtype=torch.float32, device=q.device)
    return q.new_zeros(shape), lse


def _parts(problem: AttentionProblem, operands: Operands, splits: int) -> tuple[Tensor, Tensor]:
    """What the programs of a split KV loop write to, in float32, in the caller's workspace if there
    is one; a row that no program writes has weight 0."""
    q = operands.q
    out_shape = (splits, *q.shape[:-1], problem.Dv)
    shape = (splits, *lse_shape(operands))
    if operands.workspace is None:
        out = torch.empty(out_shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    else:
        sizes = (math.prod(out_shape), math.prod(shape))
        numbers = operands.workspace[: 4 * sum(sizes)].view(torch.float32)
        flat_out, flat_lse = numbers.split(sizes)
        out, lse = flat_out.view(out_shape), flat_lse.view(shape)
    if problem.layout != "dense":
        lse.fill_(-torch.inf)
    return out, lse


class BackwardBuffers(NamedTuple):
    """What the kernels of a backward write to."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    delta: Tensor


def backward_buffers(
    problem: AttentionProblem, operands: Operands, lse: Tensor, key_dtype: torch.dtype
) -> BackwardBuffers:
    """Memory for the gradients, dk and dv in `key_dtype`, and for delta."""
    q, k, v, bias = operands[:4]
    # Rows that belong to no sequence, or are past a used length, are written by no program.
    partial = problem.layout != "dense" or problem.has_lengths
    make = torch.zeros if partial or 0 in (problem.M, problem.N) else torch.empty
    dbias = None
    if bias is not None and problem.bias_needs_grad:
        dbias = torch.zeros(bias.shape, dtype=bias.dtype, device=q.device)
    return BackwardBuffers(
        make(q.shape, dtype=q.dtype, device=q.device),
        make(k.shape, dtype=key_dtype, device=q.device),
        make(v.shape, dtype=key_dtype, device=q.device),
        dbias,
        torch.empty_like(lse),
    )


def backward_launches(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    made: BackwardBuffers,
) -> list[Launch]:
    """The launches that fill the gradients; `lse` is contiguous."""
    q, k, v = operands[:3]
    planned = plan(problem, is_aligned(q, k, v, dout))
    common = common_of(problem, operands)
    launches = [delta_launch(problem, out, dout, dlse, made.delta, planned.queries)]
    shared = {
        "q": rows_of(q),
        "k": rows_of(k),
        "v": rows_of(v),
        "dout": rows_of(dout),
        "lse_ptr": lse,
        "delta_ptr": made.delta,
        **common,
    }
    passes: list[tuple[Any, KernelPlan, dict[str, Any]]] = [
        (key_gradient_kernel, planned.keys, {"HAS_DK": True, "HAS_DV": planned.values is None}),
        (query_gradient_kernel, planned.queries, {"dq": rows_of(made.dq)}),
    ]
    if planned.values is not None:
        passes.insert(1, (key_gradient_kernel, planned.values, {"HAS_DK": False, "HAS_DV": True}))
    for kernel, kernel_plan, own in passes:
        config, by_keys = kernel_plan.config, kernel is key_gradient_kernel
        own["lists"] = NO_LISTS
        if problem.block_tile is not None:
            own["lists"], launch = lists_launch(problem, operands, common, kernel_plan, by_keys)
            launches.append(launch)
        if by_keys:
            own |= {"dk": rows_of(made.dk), "dv": rows_of(made.dv)}
            programs = -(-problem.N // config.BLOCK_N) * problem.B * problem.Hk
        else:
            programs = -(-problem.M // config.BLOCK_M) * problem.B * problem.Hq
        arguments = {**shared, **own, "cfg": config}
        launches.append(
            Launch(kernel, (programs,), arguments, kernel_plan.warps, kernel_plan.stages)
        )
    if made.dbias is not None:
        launches.append(bias_launch(problem, made.dbias, shared, planned.scores))
    return launches


def delta_launch(
    problem: AttentionProblem,
    out: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    delta: Tensor,
    kernel_plan: KernelPlan,
) -> Launch:
    """rowsum(dO * O) - dlse of every row, packed or not."""
    sequences = problem.B if out.dim() == 4 else 1
    rows = out.shape[-3]
    config = kernel_plan.config
    arguments = {
        "out": rows_of(out),
        "dout": rows_of(dout),
        "dlse_ptr": None if dlse is None else dlse.contiguous(),
        "delta_ptr": delta,
        "rows_total": rows,
        "heads": problem.Hq,
        "cfg": config,
    }
    grid = (sequences * problem.Hq, -(-rows // config.BLOCK_M))
    return Launch(delta_kernel, grid, arguments, 4, 1)


def lists_launch(
    problem: AttentionProblem,
    operands: Operands,
    common: dict[str, Any],
    kernel_plan: KernelPlan,
    by_keys: bool,
) -> tuple[Lists, Launch]:
    """The lists of tiles that a kernel of `kernel_plan` visits."""
    assert operands.tile_kinds is not None
    config = kernel_plan.config
    batch, heads = operands.tile_kinds.shape[:2]
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
    arguments = {
        **{name: common[name] for name in ("at", "block_data", *NUMBERS)},
        "lists": lists,
        "cfg": config,
        "BY_KEYS": by_keys,
        "CHUNK": LIST_CHUNK,
    }
    return lists, Launch(list_tiles_kernel, (batch * heads, own), arguments, 4, 1)


def bias_launch(
    problem: AttentionProblem, dbias: Tensor, shared: dict[str, Any], kernel_plan: KernelPlan
) -> Launch:
    """The gradient of the bias, in the bias's own shape."""
    batch, heads, rows, keys = dbias.shape
    config = kernel_plan.config
    arguments = shared | {
        "dbias": bias_of(dbias),
        "IS_BATCH_SHARED": batch == 1,
        "IS_HEAD_SHARED": heads == 1,
        "IS_ROW_SHARED": rows == 1,
        "IS_KEY_SHARED": keys == 1,
        "cfg": config,
    }
    grid = (batch * heads, -(-rows // config.BLOCK_M), -(-keys // config.BLOCK_N))
    return Launch(bias_gradient_kernel, grid, arguments, kernel_plan.warps, kernel_plan.stages)


def probabilities_launch(
    problem: AttentionProblem, operands: Operands, lse: Tensor, probs: Tensor
) -> Launch:
    """Fill `probs` (B, Hq, M, N) where something is visible."""
    kernel_plan = plan(problem, False).scores
    config = kernel_plan.config
    batch, head, row, key = probs.stride()
    arguments = {
        "q": rows_of(operands.q),
        "k": rows_of(operands.k),
        "probs": Rows(probs, batch, row, head, key),
        "lse_ptr": lse,
        "cfg": config,
        **common_of(problem, operands),
    }
    m_tiles, n_tiles = -(-problem.M // config.BLOCK_M), -(-problem.N // config.BLOCK_N)
    grid = (problem.B * problem.Hq, m_tiles, n_tiles)
    return Launch(probabilities_kernel, grid, arguments, kernel_plan.warps, kernel_plan.stages)


def _backward_of_cache(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """Sequences may share pages or cache rows: gather them, differentiate, and add up what was
    shared."""
    k, v = operands.k, operands.v
    if operands.page_table is not None:
        source = operands.page_table.long().clamp(0, k.shape[0] - 1)  # (B, pages per sequence)
    else:
        assert operands.cache_batch_idx is not None
        source = operands.cache_batch_idx.long().clamp(0, k.shape[0] - 1)[:, None]
    gathered = operands._replace(
        k=k[source].flatten(1, 2),  # (B, N, Hk, D)
        v=v[source].flatten(1, 2),
        page_table=None,
        cache_batch_idx=None,
    )
    gradients = _backward(
        problem._replace(page_size=0), gathered, out, lse.contiguous(), dout, dlse, torch.float32
    )

    def add_up(gradient: Tensor, x: Tensor) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        parts = gradient.unflatten(1, (source.shape[1], x.shape[1]))
        return total.index_put_((source,), parts, accumulate=True).to(x.dtype)

    return gradients._replace(dk=add_up(gradients.dk, k), dv=add_up(gradients.dv, v))


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(Hq,): the sink is a key with P = exp(sink - lse) and dP = 0; padding rows (lse -inf) have
    none."""
    heads = sink.float()[:, None]
    parts = (torch.exp(heads - lse) * delta).masked_fill(lse == -torch.inf, 0.0)
    over = (1,) if lse.dim() == 2 else (0, 2)
    return -parts.sum(over).to(sink.dtype)
