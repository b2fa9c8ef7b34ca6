"""Run the backward on the GPU: allocate buffers, describe the tensors, launch three kernels, and a
fourth one if several programs share a tile of keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....backend_interface import Gradients, RunBackward, Tensors
from ....dropout import first_kept, keep_rate
from ....gpu.hardware import gpu_of
from ....gpu.launch import Launch
from ....gpu.launch_cache import allocate_and_run_all, prepared_call
from ....gpu.memory import NewTensor, Scratch, filled, uninitialised
from ....gpu.rows import at_boundary, is_aligned
from ....masks import as_kernel_number
from ....problem import AttentionProblem, Operands
from ..forward.plan import CONSUMER_ROWS
from ..shared.block_lists import BlockLists, lists_by_keys
from ..shared.launch import (
    descriptor,
    descriptor_of_sequences,
    readable,
    sequences_of,
    with_functions,
)
from ..shared.schedule import most_tiles
from ..shared.softmax import Pointers
from ..shared.span_lists import (
    SpanBuffers,
    SpanLists,
    lists_of_buffers,
    span_buffers,
    span_launches,
    steps_of,
)
from .dq import (
    PIECE_ROWS,
    add_parts_kernel,
    delta_kernel,
    piece_columns,
    pieces_of,
    round_kernel,
    rows_of_piece,
)
from .kernel import KeyGradients, backward_kernel
from .plan import BackwardConfig, Order, backward_plan, leaves_keys_unseen, order_of, phases_of
from .schedule import (
    KeyOrder,
    OrderReciprocals,
    PhaseReciprocals,
    order_reciprocals,
    phase_reciprocals,
    phased_programs,
)

# What a backward allocates: gradients, and scratch for its kernels


class Buffers(NamedTuple):
    """The tensors that the kernels of a backward write to."""

    dq: Tensor  # of a partial problem, the caller's
    dk: Tensor
    dv: Tensor
    workspace: Tensor  # dq in float32
    lse_log2: Tensor  # see `delta_kernel`
    minus_delta: Tensor
    semaphores: Tensor | None = None  # the dQ semaphores, for ordered additions
    counter: Tensor | None = None  # see `KeyOrder`
    tiles: Tensor | None = None
    dk_parts: Tensor | None = None  # see `dq.store_part`
    dv_parts: Tensor | None = None
    span_counts: Tensor | None = None  # see `SpanBuffers`, as the next four
    span_entries: Tensor | None = None
    span_intervals: Tensor | None = None
    span_unseen: Tensor | None = None
    span_extremes: Tensor | None = None

    @property
    def of_spans(self) -> SpanBuffers | None:
        """What the kernels that list the blocks of spans write to, if there are any."""
        return None if self.span_counts is None else SpanBuffers._make(self[-5:])


class Allocation(NamedTuple):
    """What a backward allocates, all at once: the gradients, scratch and rows that it fills."""

    gradients: tuple[NewTensor, NewTensor, NewTensor]  # dq of a partial problem is empty
    scratch: Scratch
    rows: dict[str, NewTensor]  # buffers that do not start uninitialised

    @property
    def allocators(self) -> list[NewTensor]:
        """The functions that allocate it."""
        return [*self.gradients, self.scratch.allocate, *self.rows.values()]

    def buffers(self) -> Buffers:
        """New buffers."""
        return self.named(tuple(allocate() for allocate in self.allocators))

    def named(self, made: tuple[Tensor, ...]) -> Buffers:
        """What `allocators` have made, by name."""
        dq, dk, dv, scratch, *rows = made
        return Buffers(
            dq, dk, dv, **self.scratch.parts(scratch), **dict(zip(self.rows, rows, strict=True))
        )


def order_of_call(problem: AttentionProblem, operands: Operands) -> Order:
    """The order of the programs of a call, on its GPU."""
    return order_of(problem, operands.k.shape[0], gpu_of(operands.k.device))


def config_of(problem: AttentionProblem, operands: Operands) -> BackwardConfig:
    """The compile-time constants of a call, whose kernel calls the score function."""
    config = backward_plan(problem, order_of_call(problem, operands).parts > 1)
    return with_functions(config, problem.options)


def allocation(problem: AttentionProblem, operands: Operands) -> Allocation:
    """What the backward of a call allocates."""
    config = config_of(problem, operands)
    q, k, v = operands[:3]
    empty = partial(uninitialised, device=q.device)
    zeros = partial(filled, value=0, device=q.device)
    of_keys = zeros if leaves_keys_unseen(problem) else empty
    dtype = torch.float32 if config.IS_PARTIAL else q.dtype
    dq = empty((0,) if config.IS_DQ_ADDED else q.shape, q.dtype)
    gradients = dq, of_keys(k.shape, dtype), of_keys(v.shape, dtype)
    blocks = problem.Hq * workspace_blocks(problem, operands, config)
    lines = blocks * config.BLOCK_M * config.DQ_COLUMNS // 256
    shapes: dict[str, tuple[int, ...]] = {"workspace": (lines, 256)}
    rows = {}
    if problem.layout != "dense" and operands.sink is not None:
        of_rows = (blocks, config.BLOCK_M), torch.float32
        rows["lse_log2"] = filled(*of_rows, torch.inf, q.device)  # rows of no sequence have P = 0
        rows["minus_delta"] = zeros(*of_rows)
    else:
        shapes |= dict.fromkeys(("lse_log2", "minus_delta"), (blocks, config.BLOCK_M))
    if config.IS_PARTED:
        sums = problem.Hk * key_blocks(problem, operands, config)
        sums *= order_of_call(problem, operands).parts
        shapes["dk_parts"] = sums, config.BLOCK_N * (config.BLOCK_D + config.TAIL_D)
        shapes["dv_parts"] = sums, config.BLOCK_N * (config.BLOCK_DV + config.TAIL_DV)
    of_integers: dict[str, tuple[int, ...]] = {}
    if config.IS_ORDERED:
        of_integers |= {"semaphores": (blocks * config.ADDERS,), "counter": (1,)}
    if config.IS_PERSISTENT:
        of_integers["counter"] = (1,)
    if config.IS_PACKED:
        of_integers["tiles"] = key_tiles(problem, operands, config), 2
    if config.SPANS > 0:
        of_integers |= span_buffers(problem, operands, config.BLOCK_M, config.BLOCK_N)
    kinds = {name: (shape, torch.float32) for name, shape in shapes.items()}
    kinds |= {name: (shape, torch.int32) for name, shape in of_integers.items()}
    return Allocation(gradients, Scratch(kinds, q.device), rows)


def workspace_blocks(problem: AttentionProblem, operands: Operands, config: BackwardConfig) -> int:
    """Blocks of rows of one head; see `schedule.blocks_before`."""
    if problem.layout == "dense":
        return problem.B * -(-problem.M // config.BLOCK_M)
    return operands.q.shape[0] // config.BLOCK_M + problem.B


def key_blocks(problem: AttentionProblem, operands: Operands, config: BackwardConfig) -> int:
    """Tiles of keys of one head in the sums of the parts; see `schedule.blocks_before`."""
    if problem.layout == "dense":
        return problem.B * -(-problem.N // config.BLOCK_N)
    return operands.k.shape[0] // config.BLOCK_N + problem.B


def key_tiles(problem: AttentionProblem, operands: Operands, config: BackwardConfig) -> int:
    """The most tiles of keys of one head."""
    if problem.layout == "dense":
        return problem.B * -(-problem.N // config.BLOCK_N)
    return most_tiles(operands.k.shape[0], problem.B, problem.N, config.BLOCK_N)


# The launches


OPERANDS = len(Operands._fields)


def backward(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    add_to: Tensor | None = None,
) -> Gradients:
    """Gradients of a problem; dq of a partial one is added to `add_to`, unless it has whole
    queries.
    """
    is_added = problem.is_partial and not problem.has_whole_queries
    if 0 in operands.q.shape:  # no queries
        dsink = None if operands.sink is None else torch.zeros_like(operands.sink)
        dtype = torch.float32 if problem.is_partial else None
        dk, dv = (torch.zeros_like(x, dtype=dtype) for x in operands[1:3])
        dq = torch.zeros_like(operands.q, dtype=torch.float32 if is_added else None)
        return Gradients(dq if add_to is None else add_to, dk, dv, None, dsink)

    sums = add_to
    if is_added and (add_to is None or not is_aligned(add_to)):
        sums = torch.zeros(operands.q.shape, dtype=torch.float32, device=operands.q.device)
    given = (*operands, out, lse, dout, dlse, sums)
    prepared = prepared_call(PASS, problem, given)
    if prepared is None:
        found = run_backward(problem, operands, out, lse, dout, dlse, sums)
    else:
        found = gradients(problem, operands, prepared.run(given))
    if sums is None:
        return found
    if add_to is not None and add_to is not sums:
        sums = add_to.add_(sums)
    return found._replace(dq=sums)


def prepared_backward(problem: AttentionProblem, tensors: Tensors) -> RunBackward | None:
    """`backward` of calls like an earlier one, whose operands, out, lse, dout and dlse were
    `tensors`; None if that one was not prepared, as is true of a problem whose dq is added.
    """
    prepared = prepared_call(PASS, problem, (*tensors, None))
    if prepared is None:
        return None
    operands = Operands(*tensors[:OPERANDS])  # type: ignore[arg-type]  # its fields
    memory = allocation(problem, operands)

    def run(tensors: Tensors) -> Gradients:
        made = prepared.run((*tensors, None))
        sink = tensors[SINK]
        if sink is None:  # in half the time of the tuple's own function
            return tuple.__new__(Gradients, (*made[:3], None, None, None, None, None))
        return with_sink(sink, memory.named(made))

    return run


PASS = "hopper backward"
SINK = Operands._fields.index("sink")


def gradients(problem: AttentionProblem, operands: Operands, made: tuple[Tensor, ...]) -> Gradients:
    """The gradients of what a backward has filled."""
    if operands.sink is None:
        return Gradients(made[0], made[1], made[2])
    return with_sink(operands.sink, allocation(problem, operands).named(made))


def with_sink(sink: Tensor, made: Buffers) -> Gradients:
    """The gradients, with that of the sink."""
    dsink = sink_gradient(sink, made.lse_log2, made.minus_delta)
    return Gradients(made.dq, made.dk, made.dv, None, dsink)


def run_backward(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    dq: Tensor | None,
) -> Gradients:
    """The gradients of a call that was not prepared; `dout` is copied if TMA cannot read it. That
    of the queries of a partial problem is added to the tensor `dq`.
    """
    config, memory = config_of(problem, operands), allocation(problem, operands)
    lists = lists_of(problem, config, operands)

    def describe(given: Any, made: Any) -> list[Launch]:
        tensors, (out, lse, dout, dlse, dq, *listed) = given[:OPERANDS], given[OPERANDS:]
        own_lists = None if lists is None else lists.with_tensors(*listed)
        results = memory.named(made)
        if dq is not None:
            results = results._replace(dq=dq)
        return backward_launches(
            problem, Operands(*tensors), out, lse, dout, dlse, results, own_lists
        )

    listed = () if lists is None else lists.tensors
    given = (*operands, out, lse, readable(dout), dlse, dq, *listed)
    kind: Any = config
    if lists is not None:
        kind = config, lists.steps
    elif problem.spans > 0:
        kind = config, steps_of(problem, operands)
    made = allocate_and_run_all(
        PASS, problem, given, lambda: memory.allocators, describe, lambda: kind
    )
    return gradients(problem, operands, made)


def lists_of(
    problem: AttentionProblem, config: BackwardConfig, operands: Operands
) -> BlockLists | None:
    """The lists of a call's block mask, if it has one."""
    if not config.HAS_BLOCK_MASK:
        return None
    tile, swizzle = (config.BLOCK_M, config.BLOCK_N), order_of_call(problem, operands).swizzle
    return lists_by_keys(problem, operands, *tile, swizzle, config.IS_ORDERED)


def lists_of_spans(
    problem: AttentionProblem, operands: Operands, made: Buffers
) -> SpanLists | None:
    """The lists of a call's spans, if it has some."""
    of_spans = made.of_spans
    return None if of_spans is None else lists_of_buffers(problem, operands, of_spans)


def backward_launches(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    made: Buffers,
    lists: BlockLists | None,
) -> list[Launch]:
    """The launches that fill the gradients; `dout` is readable, and `lists` are of a block mask.
    Those of spans are made first.
    """
    config = config_of(problem, operands)
    common = {
        "at": sequences_of(operands),
        "B": problem.B,
        "M": problem.M,
        "total_q": operands.q.shape[0],
        "blocks": workspace_blocks(problem, operands, config),
        "cfg": config,
    }
    before = common | {
        "semaphores_ptr": made.semaphores,
        "order": KeyOrder(made.counter, made.tiles),
        "N": problem.N,
        "total_k": operands.k.shape[0],
    }
    launches, of_spans = [], made.of_spans
    if of_spans is not None:
        launches = span_launches(problem, operands, of_spans, before)
    launches += [
        delta_launch(problem, operands, out, lse, dout, dlse, made, before),
        key_launch(problem, operands, dout, made, lists, before),
        round_launch(problem, operands, made, common),
    ]
    if config.IS_PARTED:
        launches.append(add_parts_launch(problem, operands, made, common))
    return launches


def delta_launch(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    made: Buffers,
    common: dict[str, Any],
) -> Launch:
    """The launch that computes the statistics of all rows and clears the workspace."""
    config = common["cfg"]
    out = readable(out)
    parts, swizzle = order_of_call(problem, operands)
    arguments = {
        "out_ptr": out,
        "dout_ptr": dout,
        **dict(zip(("o_batch", "o_row", "o_head"), row_strides(out), strict=True)),
        **dict(zip(("do_batch", "do_row", "do_head"), row_strides(dout), strict=True)),
        "lse_ptr": lse.contiguous(),
        "dlse_ptr": None if dlse is None else dlse.contiguous(),
        "lse_log2_ptr": made.lse_log2,
        "minus_delta_ptr": made.minus_delta,
        "workspace_ptr": made.workspace,
        "dq_ptr": made.dq,
        "dk_ptr": made.dk,
        "dv_ptr": made.dv,
        "entries": key_tiles(problem, operands, config),
        "together": max(swizzle // (problem.Hk * parts), 1),
        "heads": problem.Hq,
        "group": problem.group,
        "keep": keep_rate(problem.options.dropout_p) if config.HAS_DROPOUT else None,
        "sink_ptr": at_boundary(operands.sink) if config.HAS_DEAD_ROWS else None,
        **common,
    }
    return Launch(delta_kernel, row_grid(problem, operands, config), arguments)


def key_launch(
    problem: AttentionProblem,
    operands: Operands,
    dout: Tensor,
    made: Buffers,
    lists: BlockLists | None,
    common: dict[str, Any],
) -> Launch:
    """The launch that computes dk, dv, and the sum for dq."""
    config, options = common["cfg"], problem.options
    parts, swizzle = order_of_call(problem, operands)
    plain = (made.dk_parts, made.dv_parts) if config.IS_PARTED else (made.dk, made.dv)
    heads, tiles = problem.Hk * parts, -(-problem.N // config.BLOCK_N)
    reciprocals: OrderReciprocals | PhaseReciprocals
    if config.HAS_PHASES:
        together = problem.B * heads
        phases, swizzle = phases_of(tiles, together, swizzle)
        programs = phased_programs(tiles, together, phases, swizzle)
        reciprocals = phase_reciprocals(tiles, heads, phases, swizzle)
    else:
        programs = key_tiles(problem, operands, config) * heads
        reciprocals = order_reciprocals(tiles, problem.B, heads, swizzle)
    persistent = programs
    if config.IS_PERSISTENT:
        most = gpu_of(operands.k.device).multiprocessors - problem.reserved_processors
        persistent = min(programs, max(most, 1))
    slopes = operands.alibi_slopes
    arguments = {
        **descriptors(operands, dout, made, config),
        "lse_desc": plain_descriptor(made.lse_log2, 1),
        "delta_desc": plain_descriptor(made.minus_delta, 1),
        **workspace_arguments(made.workspace, config),
        "plain": KeyGradients(*plain),
        "pointers": Pointers(
            at_boundary(slopes),
            None,
            at_boundary(operands.rng_state),
            at_boundary(operands.captured),
            at_boundary(operands.captured_integers),
        ),
        "heads": problem.Hk,
        "group": problem.group,
        "swizzle": swizzle,
        "reciprocals": reciprocals,
        "parts": parts if config.IS_PARTED else None,
        "tiles": programs if config.IS_PERSISTENT else None,
        "left": as_kernel_number(options.window_left),
        "right": as_kernel_number(options.window_right),
        "chunk": as_kernel_number(options.attention_chunk),
        "lists": lists_of_spans(problem, operands, made) or lists,
        "alibi_batch": 0 if slopes is None or slopes.dim() == 1 else slopes.shape[1],
        "scale": options.softmax_scale,
        "softcap": options.softcap,
        "first_kept": first_kept(options.dropout_p) if config.HAS_DROPOUT else None,
        **common,
    }
    return Launch(backward_kernel, (persistent,), arguments, is_early=True)


def descriptors(
    operands: Operands, dout: Tensor, made: Buffers, config: BackwardConfig
) -> dict[str, TensorDescriptor | None]:
    """Descriptors for tiles of the first columns and for tails; None if there is no tail, and for
    dk and dv in float32, which TMA does not store.
    """
    found: dict[str, TensorDescriptor | None] = {}
    of_keys, of_values = (config.BLOCK_D, config.TAIL_D), (config.BLOCK_DV, config.TAIL_DV)
    describe = descriptor_of_sequences if config.IS_PACKED else descriptor
    for name, x, rows, (columns, tail) in (
        ("q", readable(operands.q), config.BLOCK_M, of_keys),
        ("k", readable(operands.k), config.BLOCK_N, of_keys),
        ("v", readable(operands.v), config.BLOCK_N, of_values),
        ("dout", dout, config.BLOCK_M, of_values),
        ("dk", readable(made.dk), CONSUMER_ROWS, of_keys),
        ("dv", readable(made.dv), CONSUMER_ROWS, of_values),
    ):
        for part, size in (("desc", columns), ("tail_desc", tail)):
            is_there = size and x.dtype == operands.q.dtype
            found[f"{name}_{part}"] = describe(x, rows, size) if is_there else None
    return found


def round_launch(
    problem: AttentionProblem, operands: Operands, made: Buffers, common: dict[str, Any]
) -> Launch:
    """The launch that rounds the sum to dq."""
    batch, row, head = row_strides(made.dq)
    arguments = {
        "workspace_ptr": made.workspace,
        "dq_ptr": made.dq,
        "dq_batch": batch,
        "dq_row": row,
        "dq_head": head,
        "heads": problem.Hq,
        "scale": problem.options.softmax_scale,
        **common,
    }
    grid = row_grid(problem, operands, common["cfg"])
    return Launch(round_kernel, grid, arguments, is_early=True)


def add_parts_launch(
    problem: AttentionProblem, operands: Operands, made: Buffers, common: dict[str, Any]
) -> Launch:
    """The launch that adds the parts and rounds the sums to dk and dv."""
    config = common["cfg"]
    arguments = {
        "dk_parts_ptr": made.dk_parts,
        "dv_parts_ptr": made.dv_parts,
        "dk_ptr": made.dk,
        "dv_ptr": made.dv,
        **dict(zip(("dk_batch", "dk_row", "dk_head"), row_strides(made.dk), strict=True)),
        **dict(zip(("dv_batch", "dv_row", "dv_head"), row_strides(made.dv), strict=True)),
        "at": common["at"],
        "N": problem.N,
        "total_k": operands.k.shape[0],
        "heads": problem.Hk,
        "blocks": key_blocks(problem, operands, config),
        "parts": order_of_call(problem, operands).parts,
        "scale": problem.options.softmax_scale,
        "cfg": config,
    }
    tiles = -(-problem.N // config.BLOCK_N)
    pieces = pieces_of(config.BLOCK_N, config.BLOCK_D, config.TAIL_D)
    pieces += pieces_of(config.BLOCK_N, config.BLOCK_DV, config.TAIL_DV)
    return Launch(add_parts_kernel, (problem.B * problem.Hk, tiles, pieces), arguments)


def row_grid(
    problem: AttentionProblem, operands: Operands, config: BackwardConfig
) -> tuple[int, int]:
    """A program for every block of rows of every head."""
    if problem.layout != "dense":
        return workspace_blocks(problem, operands, config) * problem.Hq, 1
    return problem.B * problem.Hq * -(-problem.M // config.BLOCK_M), 1


def row_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of (batch, row, head); packed rows have one batch."""
    batch = x.stride(0) if x.dim() == 4 else 0
    return batch, x.stride(-3), x.stride(-2)


def workspace_arguments(workspace: Tensor, config: BackwardConfig) -> dict[str, Any]:
    """The workspace as a pointer, or in boxes of one TMA addition: a pair of pieces, or a tail if
    there is one. Above 128 columns: a piece, and separately the columns beyond whole pieces.
    """
    described: Any = workspace
    tail = None
    if config.IS_SPLIT:
        described = plain_descriptor(workspace, PIECE_ROWS.value)
        if rows := rows_of_piece(config.DQ_COLUMNS % 64):
            tail = plain_descriptor(workspace, rows)
    elif not config.HAS_DQ_IN_REGISTERS:
        described = plain_descriptor(
            workspace, rows_of_piece(config.TAIL_D or 2 * piece_columns(config))
        )
    return {"workspace": described, "workspace_tail_desc": tail}


PLAIN = gl.NVMMASharedLayout(0, element_bitwidth=32, rank=2)


def plain_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of float32 `x` (n, columns) in boxes of `rows` whole rows, without a swizzle."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, x.shape[1]], PLAIN)


def sink_gradient(sink: Tensor, lse_log2: Tensor, minus_delta: Tensor) -> Tensor:
    """(Hq,): the sink is a key with P = exp(sink - lse) and dP = 0; in rows that saw no key, only
    the sink has P, and rows of no sequence have delta = 0. With dropout, the factors of both
    statistics cancel (`delta_kernel`).
    """
    heads = sink.shape[0]
    sink_log2 = sink.float()[:, None] * torch.log2(torch.tensor(torch.e)).item()
    lse_log2 = lse_log2.view(heads, -1)
    p = torch.exp2(sink_log2 - lse_log2).masked_fill(lse_log2 == torch.inf, 1.0)
    return (p * minus_delta.view(heads, -1)).sum(1).to(sink.dtype)
