"""Runs a problem on the GPU: allocates the outputs and launches the planned kernels.

Each `*_launch` function describes one kernel launch without making it: see `kernel_launch.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...problem import AttentionProblem, Operands, lse_shape
from .. import Gradients
from . import repeat
from .arguments import (
    NO_LISTS,
    NUMBERS,
    ForwardTensors,
    Lists,
    Rows,
    bias_of,
    common_of,
    forward_tensors,
    is_aligned,
    rows_of,
)
from .backward_pass import delta_kernel, key_gradient_kernel, query_gradient_kernel
from .bias_gradient import bias_gradient_kernel
from .block_lists import list_tiles_kernel
from .combine import CombineTensors, combine_launch, combine_tensors
from .forward_pass import forward_kernel
from .kernel_launch import Launch, run
from .plan import KernelPlan, plan
from .score_matrix import probabilities_kernel
from .splits import splits_of

# Tiles that one step of `list_tiles_kernel` classifies.
LIST_CHUNK = 128


def forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of a problem."""
    key = repeat.forward_key(problem, operands)
    known = repeat.known(key)
    q = operands.q
    if known is not None and q.device.index == torch.cuda.current_device():
        return _forward_again(problem, operands, known)
    out, lse, launches = forward_launches(problem, operands)
    compiled = run(launches, q)
    leading = [len(ForwardTensors._fields), len(CombineTensors._fields)]
    repeat.remember(key, launches, compiled, leading[: len(launches)])
    return out, lse


def _forward_again(
    problem: AttentionProblem, operands: Operands, known: tuple[repeat.Repeat, ...]
) -> tuple[Tensor, Tensor]:
    """The launches of an earlier call, with new tensors."""
    splits = known[0].grid[1]
    out, lse = _outputs(problem, operands, splits)
    if splits == 1:
        known[0].run(forward_tensors(problem, operands, out, lse))
        return out, lse
    parts = _parts(problem, operands, splits)
    known[0].run(forward_tensors(problem, operands, parts[0][0], parts[1]))
    known[1].run(combine_tensors(*parts, out, lse))
    return out, lse


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
    gradients, delta, launches = backward_launches(problem, operands, out, lse, dout, dlse)
    run(launches, operands.q)
    if operands.sink is None:
        return gradients
    return gradients._replace(dsink=_sink_gradient(operands.sink, lse, delta))


def probabilities(problem: AttentionProblem, operands: Operands, lse: Tensor) -> Tensor:
    """Softmax probabilities (batch, heads, M, N) in q's dtype, negative where dropped; 0 outside of
    the mask."""
    shape = (problem.B, problem.Hq, problem.M, problem.N)
    probs = operands.q.new_zeros(shape)
    run([probabilities_launch(problem, operands, lse.contiguous(), probs)], operands.q)
    return probs


def forward_launches(
    problem: AttentionProblem, operands: Operands
) -> tuple[Tensor, Tensor, list[Launch]]:
    """Outputs and the launches that fill them."""
    q, k, v = operands.q, operands.k, operands.v
    planned = plan(problem, is_aligned(k, v))
    splits = splits_of(problem, planned.split.config, processors(q.device))
    kernel_plan = planned.split if splits > 1 else planned.forward
    config = kernel_plan.config
    out, lse = _outputs(problem, operands, splits)
    found = (out, lse) if splits == 1 else _parts(problem, operands, splits)
    written = (found[0] if splits == 1 else found[0][0], found[1])
    common = common_of(problem, operands)
    launches = []
    lists = NO_LISTS
    if problem.block_tile is not None:
        lists, launch = lists_launch(problem, operands, common, kernel_plan, by_keys=False)
        launches.append(launch)
    rows_per_query = config.GROUP if config.IS_PACKED_GROUP else 1
    programs = -(-problem.M * rows_per_query // config.BLOCK_M)
    programs *= problem.B * problem.Hq // rows_per_query
    tensors = forward_tensors(problem, operands, *written)
    arguments = common | tensors._asdict() | {"lists": lists, "cfg": config}
    grid = (programs,) if splits == 1 else (programs, splits)
    launches.append(Launch(forward_kernel, grid, arguments, kernel_plan.warps, kernel_plan.stages))
    if splits > 1:
        launches.append(combine_launch(*found, out, lse, config.LETS_NEXT_START))
    return out, lse, launches


def _outputs(problem: AttentionProblem, operands: Operands, splits: int) -> tuple[Tensor, Tensor]:
    """(out, lse) to write to; joining parts writes every row, else rows that belong to no sequence
    are written by no program."""
    q = operands.q
    shape = (*q.shape[:-1], problem.Dv)
    if problem.layout == "dense" or splits > 1:
        out = q.new_empty(shape)
        return out, torch.empty(lse_shape(operands), dtype=torch.float32, device=q.device)
    lse = torch.full(lse_shape(operands), -torch.inf, dtype=torch.float32, device=q.device)
    return q.new_zeros(shape), lse


def _parts(problem: AttentionProblem, operands: Operands, splits: int) -> tuple[Tensor, Tensor]:
    """What each program of a split walk writes to, in float32; a row that none writes weighs
    nothing."""
    q = operands.q
    shape = (splits, *lse_shape(operands))
    out = torch.empty((splits, *q.shape[:-1], problem.Dv), dtype=torch.float32, device=q.device)
    if problem.layout == "dense":
        return out, torch.empty(shape, dtype=torch.float32, device=q.device)
    return out, torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type == "cpu":  # interpreting, or compiling for a device that is not here
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def backward_launches(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    key_dtype: torch.dtype | None = None,
) -> tuple[Gradients, Tensor, list[Launch]]:
    """Gradients (all but the sink's), delta, and the launches that fill them.

    `key_dtype` is the dtype of dk and dv, by default that of k.
    """
    q, k, v = operands.q, operands.k, operands.v
    planned = plan(problem, is_aligned(q, k, v, dout))
    lse = lse.contiguous()
    delta = torch.empty_like(lse)
    # Rows that belong to no sequence, or lie past a used length, are written by no program.
    partial = problem.layout != "dense" or problem.has_lengths
    make = torch.zeros if partial or 0 in (problem.M, problem.N) else torch.empty
    key_dtype = key_dtype or k.dtype
    dq = make(q.shape, dtype=q.dtype, device=q.device)
    dk = make(k.shape, dtype=key_dtype, device=q.device)
    dv = make(v.shape, dtype=key_dtype, device=q.device)
    common = common_of(problem, operands)
    launches = [delta_launch(problem, out, dout, dlse, delta, planned.queries)]
    shared = {
        "q": rows_of(q),
        "k": rows_of(k),
        "v": rows_of(v),
        "dout": rows_of(dout),
        "lse_ptr": lse,
        "delta_ptr": delta,
        **common,
    }
    passes: list[tuple[Any, KernelPlan, dict[str, Any]]] = [
        (key_gradient_kernel, planned.keys, {"HAS_DK": True, "HAS_DV": planned.values is None}),
        (query_gradient_kernel, planned.queries, {"dq": rows_of(dq)}),
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
            own |= {"dk": rows_of(dk), "dv": rows_of(dv)}
            programs = -(-problem.N // config.BLOCK_N) * problem.B * problem.Hk
        else:
            programs = -(-problem.M // config.BLOCK_M) * problem.B * problem.Hq
        arguments = {**shared, **own, "cfg": config}
        launches.append(
            Launch(kernel, (programs,), arguments, kernel_plan.warps, kernel_plan.stages)
        )
    dbias = None
    if operands.bias is not None and problem.bias_needs_grad:
        dbias = torch.zeros(operands.bias.shape, dtype=operands.bias.dtype, device=q.device)
        launches.append(bias_launch(problem, dbias, shared, planned.scores))
    return Gradients(dq, dk, dv, dbias, None), delta, launches


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
    gradients, delta, launches = backward_launches(
        problem._replace(page_size=0), gathered, out, lse, dout, dlse, torch.float32
    )
    run(launches, operands.q)

    def add_up(gradient: Tensor, x: Tensor) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        parts = gradient.unflatten(1, (source.shape[1], x.shape[1]))
        return total.index_put_((source,), parts, accumulate=True).to(x.dtype)

    dsink = None if operands.sink is None else _sink_gradient(operands.sink, lse, delta)
    return gradients._replace(dk=add_up(gradients.dk, k), dv=add_up(gradients.dv, v), dsink=dsink)


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(Hq,): the sink is a key with P = exp(sink - lse) and dP = 0; padding rows (lse -inf) have
    none."""
    heads = sink.float()[:, None]
    parts = (torch.exp(heads - lse) * delta).masked_fill(lse == -torch.inf, 0.0)
    over = (1,) if lse.dim() == 2 else (0, 2)
    return -parts.sum(over).to(sink.dtype)
