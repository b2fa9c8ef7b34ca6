"""Runs a problem on the GPU: allocates the outputs, describes the tensors and launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....gpu.hardware import multiprocessors
from ....gpu.launch import Launch
from ....gpu.relaunch import run_all
from ....masks import as_kernel_number
from ....problem import AttentionProblem, Operands, lse_shape
from ..shared.launch import descriptor, readable, tile_counter
from ..shared.schedule import Sequences
from ..shared.softmax import Pointers
from .kernel import forward_kernel
from .plan import CONSUMER_ROWS, KernelConfig, plan, section_of


def forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of a problem."""
    config = plan(problem)
    out, lse = outputs(problem, operands, config)
    if problem.M == 0 or 0 in operands.q.shape:
        return out, lse

    def describe(given: Any, made: Any) -> list[Launch]:
        out, lse, counter = made
        programs = multiprocessors(out.device)
        return [forward_launch(problem, Operands(*given), out, lse, programs, counter)]

    made = out, lse, tile_counter(operands.q.device)
    run_all("hopper forward", problem, operands, made, describe, config)
    return out, lse


def outputs(
    problem: AttentionProblem, operands: Operands, config: KernelConfig
) -> tuple[Tensor, Tensor]:
    """(out, lse) to write to."""
    q = operands.q
    shape = (*q.shape[:-1], problem.Dv)
    if config.IS_RAGGED:  # rows that belong to no sequence are written by no program
        lse = torch.full(lse_shape(operands), -torch.inf, dtype=torch.float32, device=q.device)
        return q.new_zeros(shape), lse
    # Sizes one by one: PyTorch takes half as long to read them as it takes for a tuple.
    return q.new_empty(*shape), q.new_empty(*lse_shape(operands), dtype=torch.float32)


def forward_launch(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    programs: int,
    counter: Tensor,
) -> Launch:
    """The launch that fills `out` and `lse`; `counter` is two zeros."""
    config, options = plan(problem), problem.options
    q, k, v = (readable(x) for x in operands[:3])
    tiles = -(-problem.M // config.BLOCK_M) * problem.B * problem.Hq
    slopes = operands.alibi_slopes
    arguments = {
        **descriptors(q, k, v, readable(out), config),
        "out_ptr": out,
        "lse_ptr": lse,
        "counter": counter,
        "at": Sequences(
            operands.cu_seqlens_q,
            operands.cu_seqlens_k,
            operands.seqused_q,
            operands.seqused_k,
        ),
        "pointers": Pointers(None if slopes is None else slopes.contiguous(), operands.sink),
        "B": problem.B,
        "M": problem.M,
        "N": problem.N,
        "total_q": operands.q.shape[0],
        "total_k": operands.k.shape[0],
        "heads": problem.Hq,
        "group": problem.group,
        "section": section_of(problem),
        "tiles": tiles,
        "left": as_kernel_number(options.window_left),
        "right": as_kernel_number(options.window_right),
        "chunk": as_kernel_number(options.attention_chunk),
        "alibi_batch": 0 if slopes is None or slopes.dim() == 1 else slopes.shape[1],
        "scale": options.softmax_scale,
        "softcap": options.softcap,
        "cfg": config,
    }
    return Launch(forward_kernel, (min(programs, tiles),), arguments)


def descriptors(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, config: KernelConfig
) -> dict[str, TensorDescriptor | None]:
    """The tensors in tiles of their first columns, and in tiles of the rest where there is one."""
    of_keys = {"tiles": config.BLOCK_D, "rests": config.REST_D}
    of_values = {"tiles": config.BLOCK_DV, "rests": config.REST_DV}
    found = {}
    for part in ("tiles", "rests"):
        for name, x, rows, columns in (
            ("q", q, CONSUMER_ROWS, of_keys[part]),
            ("k", k, config.BLOCK_N, of_keys[part]),
            ("v", v, config.BLOCK_N, of_values[part]),
            ("o", out, CONSUMER_ROWS, of_values[part]),
        ):
            found[f"{name}_{part}"] = descriptor(x, rows, columns) if columns else None
    return found
