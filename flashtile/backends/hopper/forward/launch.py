"""Run a problem on the GPU: allocate the outputs, describe the tensors and launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....gpu.hardware import multiprocessors
from ....gpu.launch import Launch
from ....gpu.memory import filled, uninitialised
from ....gpu.relaunch import allocate_and_run_all, prepared_call
from ....gpu.rows import at_boundary
from ....masks import as_kernel_number
from ....problem import AttentionProblem, Operands, lse_shape, output_dtype
from ... import Run, Tensors
from ..shared.block_lists import BlockLists, lists_by_queries
from ..shared.launch import descriptor, readable, sequences_of, tile_counter
from ..shared.softmax import Pointers
from .kernel import forward_kernel
from .plan import CONSUMER_ROWS, KernelConfig, plan, swizzle_of


def forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of a 16-bit problem."""
    return run_forward(problem, operands, plan(problem), forward_launch)


def run_forward(
    problem: AttentionProblem,
    operands: Operands,
    config: KernelConfig,
    launch_of: Callable[..., Launch],
) -> tuple[Tensor, Tensor]:
    """(out, lse) from the launch that `launch_of` describes, which is like `forward_launch`."""
    if problem.M == 0 or 0 in operands.q.shape:
        with torch.cuda.device_of(operands.q):
            return outputs(operands, config)()

    lists = lists_of(problem, config, operands)

    def allocator() -> Callable[[], Any]:
        new_outputs, device = outputs(operands, config), operands.q.device
        return lambda: (*new_outputs(), tile_counter(device))

    def describe(given: Any, made: Any) -> list[Launch]:
        tensors, listed = given[:OPERANDS], given[OPERANDS:]
        out, lse, counter = made
        programs = multiprocessors(out.device)
        launch = launch_of(problem, config, Operands(*tensors), out, lse, programs, counter)
        if lists is not None:
            launch.arguments["blocks"] = lists.with_tensors(*listed)
        return [launch]

    given = operands if lists is None else (*operands, *lists.tensors)
    kind = config if lists is None else (config, lists.steps)
    out, lse, _ = allocate_and_run_all(PASS, problem, given, allocator, describe, lambda: kind)
    return out, lse


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
    if prepared is None:
        return None

    def run(tensors: Tensors) -> tuple[Tensor, Tensor]:
        out, lse, _ = prepared.run(tensors)
        return out, lse

    return run


def outputs(operands: Operands, config: KernelConfig) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that allocates (out, lse)."""
    q = operands.q
    shape, dtype = (*q.shape[:-1], config.DV), output_dtype(q.dtype)
    of_lse = lse_shape(operands), torch.float32
    if config.IS_RAGGED:  # programs do not write rows that belong to no sequence
        out = filled(shape, dtype, 0, q.device)
        lse = filled(*of_lse, -torch.inf, q.device)
    else:
        out, lse = uninitialised(shape, dtype, q.device), uninitialised(*of_lse, q.device)
    return lambda: (out(), lse())


def forward_launch(
    problem: AttentionProblem,
    config: KernelConfig,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    programs: int,
    counter: Tensor,
) -> Launch:
    """The launch that fills `out` and `lse`; `counter` is two zeros."""
    q, k, v = (readable(x) for x in operands[:3])
    slopes = operands.alibi_slopes
    arguments = {
        **descriptors(q, k, v, readable(out), config),
        **common_arguments(problem, config, operands, out, lse, counter),
        "pointers": Pointers(at_boundary(slopes), at_boundary(operands.sink)),
        "blocks": None,
        "chunk": as_kernel_number(problem.options.attention_chunk),
        "alibi_batch": 0 if slopes is None or slopes.dim() == 1 else slopes.shape[1],
    }
    return Launch(forward_kernel, (min(programs, arguments["tiles"]),), arguments)


def common_arguments(
    problem: AttentionProblem,
    config: KernelConfig,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    counter: Tensor,
) -> dict[str, Any]:
    """The arguments that the 16-bit and the float8 kernel share."""
    options = problem.options
    return {
        "out_ptr": out,
        "lse_ptr": lse,
        "counter_ptr": counter,
        "at": sequences_of(operands),
        "B": problem.B,
        "M": problem.M,
        "N": problem.N,
        "total_q": operands.q.shape[0],
        "total_k": operands.k.shape[0],
        "heads": problem.Hq,
        "group": problem.group,
        "swizzle": swizzle_of(problem),
        "tiles": -(-problem.M // config.BLOCK_M) * problem.B * problem.Hq,
        "left": as_kernel_number(options.window_left),
        "right": as_kernel_number(options.window_right),
        "scale": options.softmax_scale,
        "softcap": options.softcap,
        "cfg": config,
    }


def descriptors(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, config: KernelConfig
) -> dict[str, TensorDescriptor | None]:
    """Descriptors for tiles of the first columns and for tails; None if there is no tail."""
    of_keys = {"desc": config.BLOCK_D, "tail_desc": config.TAIL_D}
    of_values = {"desc": config.BLOCK_DV, "tail_desc": config.TAIL_DV}
    found = {}
    for part in ("desc", "tail_desc"):
        for name, x, rows, columns in (
            ("q", q, CONSUMER_ROWS, of_keys[part]),
            ("k", k, config.BLOCK_N, of_keys[part]),
            ("v", v, config.BLOCK_N, of_values[part]),
            ("o", out, CONSUMER_ROWS, of_values[part]),
        ):
            found[f"{name}_{part}"] = descriptor(x, rows, columns) if columns else None
    return found
