"""The memory that a backward allocates: gradients, and scratch for its kernels."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ....gpu.hardware import gpu_of
from ....gpu.memory import NewTensor, Scratch, filled, uninitialised
from ....problem import AttentionProblem, Operands
from ..shared.packing_order import most_tiles
from .order import Order, order_of
from .plan import BackwardConfig, backward_plan, leaves_keys_unseen
from .span_lists import SpanBuffers, span_buffers


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
    dk_parts: Tensor | None = None  # see `part_sums.py`
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
    """The compile-time constants of a call."""
    return backward_plan(problem, order_of_call(problem, operands).parts > 1)


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
