"""Run a problem on the GPU: allocate the outputs, describe the tensors and launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....backend_interface import Results, Run, Tensors
from ....dropout import first_kept, keep_rate
from ....gpu.hardware import multiprocessors
from ....gpu.launch import Launch
from ....gpu.launch_cache import allocate_and_run_all, prepared_call
from ....gpu.memory import NewTensor, filled, uninitialised
from ....gpu.rows import at_boundary, is_aligned
from ....masks import as_kernel_number
from ....problem import AttentionProblem, Operands, lse_shape, output_dtype
from ..shared.block_lists import BlockLists, lists_by_queries
from ..shared.launch import descriptor, readable, sequences_of, tile_counter, with_functions
from ..shared.schedule import PARTS, most_tiles, tile_list_kernel
from ..shared.softmax import Pointers
from ..shared.span_lists import (
    span_lists_launch,
    span_tensors,
    spans_of,
    steps_of,
    unseen_keys_launch,
)
from .kernel import forward_kernel
from .plan import CONSUMER_ROWS, KernelConfig, plan, swizzle_of


def forward(
    problem: AttentionProblem, operands: Operands, into: Results | None = None
) -> tuple[Tensor, ...]:
    """(out, lse) of a 16-bit problem, written to the tensors `into` if given: by the kernel, or
    copied where it cannot write to them. With `has_statistics`, which has no `into`, also the
    largest score and the entropy of each row.
    """
    config = config_of(problem)
    in_place = into is not None and is_aligned(into[0]) and into[1].is_contiguous()
    has_lists = config.HAS_BLOCK_MASK or config.SPANS > 0
    can_write = config.IS_RAGGED or not has_lists
    if into is None or (in_place and can_write and not config.IS_PARTIAL):
        return run_forward(problem, operands, config, forward_launch, into)
    for target, x in zip(into, forward(problem, operands), strict=True):
        target.copy_(x)
    return into


def run_forward(
    problem: AttentionProblem,
    operands: Operands,
    config: KernelConfig,
    launch_of: Callable[..., Launch],
    into: Results | None = None,
) -> tuple[Tensor, ...]:
    """The `outputs` of the launch that `launch_of` describes, a function like `forward_launch`.
    They are written to the tensors `into` if given, whose rows of no sequence keep what they hold.
    """
    if 0 in operands.q.shape:
        if into is not None:
            return into
        with torch.cuda.device_of(operands.q):
            return tuple(allocate() for allocate in outputs(operands, config))

    lists = lists_of(problem, config, operands)

    def allocators() -> list[NewTensor]:
        new_outputs = outputs(operands, config) if into is None else ()
        new_counter = partial(tile_counter, operands.q.device)
        new_lists = tile_list(problem, config, operands)
        new_spans = span_tensors(problem, operands, config)
        return [*new_outputs, new_counter, *new_lists, *new_spans]

    def describe(given: Any, made: Any) -> list[Launch]:
        tensors, more = given[:OPERANDS], given[OPERANDS:]
        new, (counter, *spans) = made[:own], made[own:]
        tiles = spans.pop(0) if config.IS_RAGGED else None
        out, lse, *rows = new if into is None else more
        of_call = Operands(*tensors)
        programs = max(multiprocessors(out.device) - problem.reserved_processors, 1)
        launch = launch_of(problem, config, of_call, out, lse, programs, counter, tiles, *rows)
        if lists is not None:
            launch.arguments["blocks"] = lists.with_tensors(*more)
        if problem.spans > 0:
            launch.arguments["blocks"] = spans_of(problem, of_call, spans)
        return with_lists(problem, config, of_call, launch, fills=into is None)

    # Outputs that are allocated here.
    own = 0 if into else 2 + config.HAS_STATISTICS + config.HAS_ENTROPY
    name = PASS if into is None else f"{PASS} into given tensors"
    given: Tensors = operands
    if lists is not None:
        given = (*operands, *lists.tensors)
    elif into is not None:  # the caller has made sure that there are no lists
        given = (*operands, *into)
    kind: Any = config
    if lists is not None:
        kind = config, lists.steps
    elif problem.spans > 0:
        kind = config, steps_of(problem, operands)
    made = allocate_and_run_all(name, problem, given, allocators, describe, lambda: kind)
    return into or tuple(made[:own])


def config_of(problem: AttentionProblem) -> KernelConfig:
    """The plan of a call."""
    return with_functions(plan(problem), problem.options)


PASS = "hopper forward"
OPERANDS = len(Operands._fields)


def lists_of(
    problem: AttentionProblem, config: KernelConfig, operands: Operands
) -> BlockLists | None:
    """The lists of a call's block mask, if it has one."""
    if not config.HAS_BLOCK_MASK:
        return None
    return lists_by_queries(problem, operands, config.BLOCK_M, config.BLOCK_N)


def prepared_forward(problem: AttentionProblem, tensors: Tensors) -> Run | None:
    """`run_forward` of calls like one that has been made; None if that one was not prepared."""
    prepared = prepared_call(PASS, problem, tensors)
    return None if prepared is None else prepared.run


def outputs(operands: Operands, config: KernelConfig) -> tuple[NewTensor, ...]:
    """The functions that allocate out, lse and, with HAS_STATISTICS, the statistics of rows."""
    q = operands.q
    dtype = torch.float32 if config.IS_PARTIAL else output_dtype(q.dtype)
    out = uninitialised((*q.shape[:-1], config.DV), dtype, q.device)
    lse = uninitialised(lse_shape(operands), torch.float32, q.device)
    rows = [lse] * (config.HAS_STATISTICS + config.HAS_ENTROPY)
    if config.IS_RAGGED:  # what rows of no sequence have
        values = (-torch.inf, 0.0)[: len(rows)]
        rows = [filled(lse_shape(operands), torch.float32, x, q.device) for x in values]
    return out, lse, *rows


def forward_launch(
    problem: AttentionProblem,
    config: KernelConfig,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    programs: int,
    counter: Tensor,
    tiles: Tensor | None,
    *statistics: Tensor,
) -> Launch:
    """The launch that fills `out`, `lse` and `statistics`; `counter` is two zeros, `tiles` of
    `tile_list`.
    """
    q, k, v = (readable(x) for x in operands[:3])
    slopes, dropout_p = operands.alibi_slopes, problem.options.dropout_p
    arguments = {
        **descriptors(q, k, v, None if config.IS_PARTIAL else readable(out), config),
        **common_arguments(problem, config, operands, out, lse, counter, tiles),
        "pointers": Pointers(
            at_boundary(slopes),
            at_boundary(operands.sink),
            at_boundary(operands.rng_state),
            at_boundary(operands.captured),
            at_boundary(operands.captured_integers),
            *statistics,
        ),
        "blocks": None,
        "chunk": as_kernel_number(problem.options.attention_chunk),
        "alibi_batch": 0 if slopes is None or slopes.dim() == 1 else slopes.shape[1],
        "first_kept": first_kept(dropout_p) if config.HAS_DROPOUT else None,
        "drop_scale": 1.0 / keep_rate(dropout_p) if config.HAS_DROPOUT else None,
    }
    grid = (min(programs, arguments["tiles"]),)
    return Launch(forward_kernel, grid, arguments, is_early=config.IS_RAGGED)


def common_arguments(
    problem: AttentionProblem,
    config: KernelConfig,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    counter: Tensor,
    tiles: Tensor | None,
) -> dict[str, Any]:
    """The arguments that the 16-bit and the float8 kernel share."""
    options = problem.options
    return {
        "out_ptr": out,
        "lse_ptr": lse,
        "counter_ptr": counter,
        "at": sequences_of(operands)._replace(tiles=tiles),
        "B": problem.B,
        "M": problem.M,
        "N": problem.N,
        "total_q": operands.q.shape[0],
        "total_k": operands.k.shape[0]
        if operands.page_table is None
        else operands.page_table.shape[1],
        "heads": problem.Hq,
        "group": problem.group,
        "swizzle": swizzle_of(problem),
        "tiles": entries(problem, config, operands) * problem.Hq,
        "left": as_kernel_number(options.window_left),
        "right": as_kernel_number(options.window_right),
        "scale": options.softmax_scale,
        "softcap": options.softcap,
        "cfg": config,
    }


def entries(problem: AttentionProblem, config: KernelConfig, operands: Operands) -> int:
    """The most tiles of queries of one head."""
    if not config.IS_RAGGED:
        return problem.B * -(-problem.M // config.BLOCK_M)
    rows = problem.B * problem.M if problem.layout == "dense" else operands.q.shape[0]
    return most_tiles(rows, problem.B, problem.M, config.BLOCK_M)


def tile_list(
    problem: AttentionProblem, config: KernelConfig, operands: Operands
) -> list[NewTensor]:
    """What allocates the list of the tiles, see `packing_order`; nothing if there is none."""
    if not config.IS_RAGGED:
        return []
    shape = entries(problem, config, operands), 2
    return [uninitialised(shape, torch.int32, operands.q.device)]


def with_lists(
    problem: AttentionProblem,
    config: KernelConfig,
    operands: Operands,
    launch: Launch,
    fills: bool = True,
) -> list[Launch]:
    """`with_list`, and the launches that mark the keys that no span contains and list blocks."""
    found = with_list(problem, config, launch, fills)
    if problem.spans > 0:
        unseen = launch.arguments["blocks"].unseen
        found.insert(-1, unseen_keys_launch(problem, operands, unseen, launch.arguments))
    if config.SPANS > 0:
        found.insert(-1, span_lists_launch(problem, operands, launch.arguments))
        found[-1] = launch._replace(is_early=True)
    return found


def with_list(
    problem: AttentionProblem, config: KernelConfig, launch: Launch, fills: bool = True
) -> list[Launch]:
    """A launch of the forward, after the one that lists its tiles if sequences can be shorter than
    the tensors; this one also `fills` the rows of no sequence.
    """
    if not config.IS_RAGGED:
        return [launch]
    names = ("out_ptr", "lse_ptr", "at", "B", "M", "N", "total_q", "total_k", "heads")
    arguments = {
        **{name: launch.arguments[name] for name in names},
        **({} if fills else {"out_ptr": None, "lse_ptr": None}),
        "entries": launch.arguments["tiles"] // problem.Hq,
        "together": max(swizzle_of(problem) // problem.Hq, 1),
        "BLOCK_M": config.BLOCK_M,
        "DV": config.DV,
        "IS_PACKED": config.IS_PACKED,
    }
    return [Launch(tile_list_kernel, (problem.B, PARTS.value), arguments), launch]


def descriptors(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, config: KernelConfig
) -> dict[str, TensorDescriptor | None]:
    """Descriptors for tiles of the first columns and for tails; None if there is no tail, and for
    an output in float32, which TMA does not store.
    """
    of_keys = {"desc": config.BLOCK_D, "tail_desc": config.TAIL_D}
    of_values = {"desc": config.BLOCK_DV, "tail_desc": config.TAIL_DV}
    keys = config.PAGE_BOX or config.BLOCK_N
    found: dict[str, TensorDescriptor | None] = {}
    for part in ("desc", "tail_desc"):
        for name, x, rows, columns in (
            ("q", q, CONSUMER_ROWS, of_keys[part]),
            ("k", k, keys, of_keys[part]),
            ("v", v, keys, of_values[part]),
            ("o", out, CONSUMER_ROWS, of_values[part]),
        ):
            found[f"{name}_{part}"] = (
                descriptor(x, rows, columns) if x is not None and columns else None
            )
    return found
