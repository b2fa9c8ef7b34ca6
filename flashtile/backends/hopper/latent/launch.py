"""Run a decoding step over latent keys: allocate the output and the parts, and launch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ....backend_interface import Results, Run, Tensors
from ....gpu.hardware import multiprocessors
from ....gpu.launch import Launch
from ....gpu.launch_cache import allocate_and_run_all, prepared_call
from ....gpu.memory import NewTensor, Scratch, uninitialised
from ....gpu.rows import at_boundary
from ....ops.merge.kernel import merge_launch
from ....problem import AttentionProblem, Operands, lse_shape
from ..shared.launch import descriptor, readable
from .kernel import latent_kernel
from .plan import HALF, KEYS, ROWS, TAIL, VALUES, LatentConfig, latent_parts

PASS = "hopper latents"
OPERANDS = len(Operands._fields)


def forward(problem: AttentionProblem, operands: Operands, into: Results | None = None) -> Results:
    """(out, lse) of a decoding step, copied to the tensors `into` if given."""
    parts = latent_parts(problem, multiprocessors(operands.q.device))

    def describe(given: Tensors, made: Tensors) -> list[Launch]:
        of_call = Operands(*given[:OPERANDS])  # type: ignore[arg-type]  # its fields
        return latent_launches(problem, of_call, parts, made)

    allocators = partial(_allocators, operands, parts)
    made = allocate_and_run_all(PASS, problem, operands, allocators, describe, lambda: None)
    if into is None:
        return made[0], made[1]
    for target, x in zip(into, made[:2], strict=True):
        target.copy_(x)
    return into


def prepared_forward(problem: AttentionProblem, tensors: Tensors) -> Run | None:
    """`forward` of calls like one that has been made; None if that one was not prepared."""
    prepared = prepared_call(PASS, problem, tensors)
    return None if prepared is None else prepared.run


def _allocators(operands: Operands, parts: int) -> list[NewTensor]:
    """What makes out, lse, and the memory of several parts."""
    q = operands.q
    shape = (*q.shape[:-1], VALUES)
    found = [
        uninitialised(shape, q.dtype, q.device),
        uninitialised(lse_shape(operands), torch.float32, q.device),
    ]
    return [*found, scratch_of(operands, parts).allocate] if parts > 1 else found


def scratch_of(operands: Operands, parts: int) -> Scratch:
    """The memory of (out, lse) of all parts."""
    shape = (parts, *operands.q.shape[:-1], VALUES)
    kinds = {"out": (shape, torch.float32), "lse": ((parts, *lse_shape(operands)), torch.float32)}
    return Scratch(kinds, operands.q.device)


def latent_launches(
    problem: AttentionProblem, operands: Operands, parts: int, made: Any
) -> list[Launch]:
    """The launch that fills out and lse, the first of what `_allocators` made; or those of the
    parts, and the merge of them.
    """
    out, lse, *scratch = made
    written = out, lse
    if scratch:
        found = scratch_of(operands, parts).parts(scratch[0])
        written = found["out"], found["lse"]
    q, k, table = readable(operands.q), readable(operands.k), at_boundary(operands.page_table)
    batch, row, head, _ = q.stride()
    arguments = {
        "q_ptr": q,
        "q_batch": batch,
        "q_row": row,
        "q_head": head,
        "k_desc": descriptor(k, KEYS, HALF),
        "tail_desc": descriptor(k, KEYS, TAIL),
        "out_ptr": written[0],
        "lse_ptr": written[1],
        "seqused_q_ptr": at_boundary(operands.seqused_q),
        "seqused_k_ptr": at_boundary(operands.seqused_k),
        "page_table_ptr": table,
        "B": problem.B,
        "M": problem.M,
        "N": problem.N,
        "total_k": k.shape[0],
        "page_columns": 0 if table is None else table.shape[1],
        "heads": problem.Hq,
        "scale": problem.options.softmax_scale,
        "cfg": LatentConfig(problem.page_size, problem.options.window_right is not None),
    }
    grid = problem.B * -(-problem.M * problem.Hq // ROWS), parts
    # Triton would ask for 256 registers a thread, which no thread can have.
    launches = [Launch(latent_kernel, grid, arguments, warps=4, registers=248)]
    if scratch:
        launches.append(merge_launch(*written, out, lse, is_early=True))
    return launches
