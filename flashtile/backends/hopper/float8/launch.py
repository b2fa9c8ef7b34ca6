"""Runs a float8 problem on the GPU: puts K and V as the kernel reads them, and launches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....gpu.hardware import multiprocessors
from ....gpu.launch import Launch
from ....masks import as_kernel_number
from ....problem import AttentionProblem, Operands, lse_shape, output_dtype
from ..forward.plan import CONSUMER_ROWS, section_of
from ..shared.launch import descriptor, readable, tile_counter
from ..shared.schedule import Sequences
from .consumer import Scales
from .kernel import float8_kernel
from .layouts import KEY_GROUP, shared_rows8
from .plan import Float8Config, float8_plan

GROUP = KEY_GROUP.value


def forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of a problem."""
    device = operands.q.device
    with torch.cuda.device(device):
        out, lse, launch = float8_launch(
            problem, operands, multiprocessors(device), tile_counter(device)
        )
        if launch.grid[0] > 0:
            launch.run()
    return out, lse


def float8_launch(
    problem: AttentionProblem, operands: Operands, programs: int, counter: Tensor
) -> tuple[Tensor, Tensor, Launch]:
    """Outputs and the launch that fills them; `counter` is two zeros."""
    descales = (operands.q_descale, operands.k_descale, operands.v_descale)
    config = float8_plan(problem, any(x is not None and x.dim() == 3 for x in descales))
    options = problem.options
    q, k, v = operands[:3]
    shape, dtype = (*q.shape[:-1], problem.Dv), output_dtype(q.dtype)
    lse = torch.full(lse_shape(operands), -torch.inf, dtype=torch.float32, device=q.device)
    # Rows that belong to no sequence are written by no program.
    out = (q.new_empty if problem.layout == "dense" else q.new_zeros)(shape, dtype=dtype)
    tiles = -(-problem.M // config.BLOCK_M) * problem.B * problem.Hq
    k = readable_keys(k, operands.cu_seqlens_k, config.BLOCK_D)
    groups, batch_groups, head_step = group_descriptor(k, config)
    arguments: dict[str, Any] = {
        "q_tiles": float8_descriptor(readable(q), [1, CONSUMER_ROWS, 1, config.BLOCK_D]),
        "k_groups": groups,
        "v_tiles": value_descriptor(readable_values(v, operands.cu_seqlens_k), config),
        "o_tiles": descriptor(readable(out), CONSUMER_ROWS, config.BLOCK_DV),
        "out_ptr": out,
        "lse_ptr": lse,
        "counter": counter,
        "at": Sequences(
            operands.cu_seqlens_q,
            operands.cu_seqlens_k,
            operands.seqused_q,
            operands.seqused_k,
        ),
        "scales": Scales(*(None if x is None else x.float().contiguous() for x in descales)),
        "batch_groups": batch_groups,
        "head_step": head_step,
        "B": problem.B,
        "M": problem.M,
        "N": problem.N,
        "total_q": q.shape[0],
        "total_k": operands.k.shape[0],
        "heads": problem.Hq,
        "group": problem.group,
        "section": section_of(problem),
        "tiles": tiles,
        "left": as_kernel_number(options.window_left),
        "right": as_kernel_number(options.window_right),
        "scale": options.softmax_scale,
        "softcap": options.softcap,
        "cfg": config,
    }
    return out, lse, Launch(float8_kernel, (min(programs, tiles),), arguments)


def readable_keys(k: Tensor, cu_seqlens: Tensor | None, columns: int) -> Tensor:
    """K (batch, rows, heads, columns) in whole groups of rows, or a copy that has them.

    TMA takes rows of all heads as one long row, so nothing but zeros may follow on a
    row of a head; every sequence starts a group.
    """
    if cu_seqlens is not None:
        return in_groups(k, cu_seqlens, columns)
    B, N, _, D = k.shape
    *steps, dim = k.stride()
    batch, row, head = steps
    aligned = dim == 1 and not any(s % 16 or s <= 0 for s in (row, head))
    whole = columns == D and N > 0 and N % GROUP == 0
    if aligned and whole and k.data_ptr() % 16 == 0 and (B == 1 or batch % (GROUP * row) == 0):
        return k
    rows = max(-(-N // GROUP), 1) * GROUP
    return F.pad(k.view(torch.uint8), (0, columns - D, 0, 0, 0, rows - N)).view(k.dtype)


def in_groups(x: Tensor, cu_seqlens: Tensor, columns: int) -> Tensor:
    """Packed K or V (total, heads, dim) as (1, rows, heads, columns), sequence b from group
    ``cu_seqlens[b] // GROUP + b`` on: there the one before it has ended."""
    total, heads, D = x.shape
    sequences = cu_seqlens.shape[0] - 1
    rows = (total // GROUP + sequences + 1) * GROUP
    found = torch.zeros(rows, heads, columns, dtype=torch.uint8, device=x.device)
    token = torch.arange(total, device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    start = cu_seqlens.long()[sequence.clamp(max=sequences)]
    place = token - start + (start // GROUP + sequence) * GROUP
    found[place.clamp(0, rows - 1), :, :D] = x.view(torch.uint8)
    return found.view(x.dtype)[None]


def group_descriptor(k: Tensor, config: Float8Config) -> tuple[TensorDescriptor, int, int]:
    """K as (groups, 2, 4, 2, all heads side by side), the groups of a batch, the step of a head."""
    B, N, heads, _ = k.shape
    batch, row, head, _ = k.stride()
    batch_groups = batch // (GROUP * row) if B > 1 else N // GROUP
    groups = (B - 1) * batch_groups + N // GROUP
    shape = [groups, 2, 4, 2, (heads - 1) * head + config.BLOCK_D]
    strides = [GROUP * row, 2 * row, 4 * row, row, 1]
    box = [config.BLOCK_N // GROUP, 2, 4, 2, config.BLOCK_D]
    layout = shared_rows8(config.BLOCK_D, 5)
    return TensorDescriptor(k, shape, strides, box, layout), batch_groups, head


def readable_values(v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """V (batch, rows, heads, dim) with its keys adjacent, rows of them at multiples of 16 bytes, or
    a copy.

    TMA also starts at multiples of 16 bytes alone, so every sequence starts a group.
    """
    if cu_seqlens is not None:
        v = in_groups(v, cu_seqlens, v.shape[-1])
    rows = v.shape[1]
    batch, key, head, dim = v.stride()
    aligned = key == 1 and not any(s % 16 or s <= 0 for s in (batch, head, dim))
    if aligned and v.data_ptr() % 16 == 0 and rows > 0:
        return v
    padding = max(-(-rows // 16), 1) * 16 - rows
    by_keys = F.pad(v.view(torch.uint8).movedim(1, -1), (0, padding)).contiguous()
    return by_keys.view(v.dtype)[..., : max(rows, 1)].movedim(-1, 1)


def value_descriptor(v: Tensor, config: Float8Config) -> TensorDescriptor:
    """V as (batch, head, dim, key), in boxes of one head."""
    return float8_descriptor(v.movedim(1, -1), [1, 1, config.BLOCK_DV, config.BLOCK_N])


def float8_descriptor(x: Tensor, box: list[int]) -> TensorDescriptor:
    """`x` of four dimensions, or packed of three, in boxes."""
    shape, strides = list(x.shape), list(x.stride())
    if x.dim() == 3:
        shape, strides = [1, *shape], [shape[0] * strides[0], *strides]
    return TensorDescriptor(x, shape, strides, box, shared_rows8(box[-1], 4))
