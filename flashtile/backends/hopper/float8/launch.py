"""Run a float8 problem on the GPU: describe K and V in the order in which the kernel reads them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....gpu.launch import Launch
from ....problem import AttentionProblem, Operands
from ..forward.launch import common_arguments, run_forward
from ..forward.plan import CONSUMER_ROWS
from ..shared.launch import descriptor, in_boxes, readable, with_functions
from .kernel import KEY_GROUP, Scales, float8_kernel
from .plan import Float8Config, float8_plan

GROUP = KEY_GROUP.value


def forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, ...]:
    """(out, lse) of a float8 problem."""
    return run_forward(problem, operands, config_of(problem, operands), float8_launch)


def config_of(problem: AttentionProblem, operands: Operands) -> Float8Config:
    """The plan of a call: per-block scales have three dimensions."""
    scales = (operands.q_descale, operands.k_descale, operands.v_descale)
    planned = float8_plan(problem, any(x is not None and x.dim() == 3 for x in scales))
    return with_functions(planned, problem.options)


def float8_launch(
    problem: AttentionProblem,
    config: Float8Config,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    programs: int,
    counter: Tensor,
    tiles: Tensor | None,
) -> Launch:
    """The launch that fills `out` and `lse`; see `forward_launch`."""
    q, k, v = operands[:3]
    k = readable_keys(k, operands.cu_seqlens_k, config.BLOCK_D)
    v = readable_values(v, operands.cu_seqlens_k)
    groups, batch_groups, head_step = group_descriptor(k, config)
    scales = (operands.q_descale, operands.k_descale, operands.v_descale)
    arguments: dict[str, Any] = {
        "q_desc": descriptor(readable(q), CONSUMER_ROWS, config.BLOCK_D),
        "k_desc": groups,
        "v_desc": value_descriptor(v, config),
        "o_desc": descriptor(readable(out), CONSUMER_ROWS, config.BLOCK_DV),
        **common_arguments(problem, config, operands, out, lse, counter, tiles),
        "scales": Scales(*(None if x is None else x.float().contiguous() for x in scales)),
        "batch_groups": batch_groups,
        "head_step": head_step,
    }
    grid = (min(programs, arguments["tiles"]),)
    return Launch(float8_kernel, grid, arguments, is_early=config.IS_RAGGED)


def readable_keys(k: Tensor, cu_seqlens: Tensor | None, columns: int) -> Tensor:
    """`k` (batch, rows, heads, columns) if it has whole groups of rows, or a copy that has them.

    TMA reads the rows of all heads as one long row, so only zeros may follow the row of a head.
    Every sequence starts a new group.
    """
    if cu_seqlens is not None:
        return grouped(k, cu_seqlens, columns)
    B, N, _, D = k.shape
    *steps, dim = k.stride()
    batch, row, head = steps
    aligned = dim == 1 and not any(s % 16 or s <= 0 for s in (row, head))
    whole = columns == D and N > 0 and N % GROUP == 0
    if aligned and whole and k.data_ptr() % 16 == 0 and (B == 1 or batch % (GROUP * row) == 0):
        return k
    rows = max(-(-N // GROUP), 1) * GROUP
    return F.pad(k.view(torch.uint8), (0, columns - D, 0, 0, 0, rows - N)).view(k.dtype)


def grouped(x: Tensor, cu_seqlens: Tensor, columns: int) -> Tensor:
    """Copy packed K or V (total, heads, dim) to (1, rows, heads, columns). Sequence b starts at
    group ``cu_seqlens[b] // GROUP + b``, which is after the end of the previous sequence.
    """
    total, heads, D = x.shape
    sequences = cu_seqlens.shape[0] - 1
    rows = (total // GROUP + sequences + 1) * GROUP
    found = torch.zeros(rows, heads, columns, dtype=torch.uint8, device=x.device)
    token = torch.arange(total, device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    start = cu_seqlens.long()[sequence.clamp(max=sequences)]
    row = token - start + (start // GROUP + sequence) * GROUP
    found[row.clamp(0, rows - 1), :, :D] = x.view(torch.uint8)
    return found.view(x.dtype)[None]


def group_descriptor(k: Tensor, config: Float8Config) -> tuple[TensorDescriptor, int, int]:
    """K as (groups, 2, 4, 2, adjacent heads), the number of groups of a batch, and the stride of a
    head.
    """
    B, N, heads, _ = k.shape
    batch, row, head, _ = k.stride()
    batch_groups = batch // (GROUP * row) if B > 1 else N // GROUP
    groups = (B - 1) * batch_groups + N // GROUP
    shape = [groups, 2, 4, 2, (heads - 1) * head + config.BLOCK_D]
    strides = [GROUP * row, 2 * row, 4 * row, row, 1]
    box = [config.BLOCK_N // GROUP, 2, 4, 2, config.BLOCK_D]
    return in_boxes(k, shape, strides, box), batch_groups, head


def readable_values(v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """`v` (batch, rows, heads, dim) if its keys are adjacent in rows that start at multiples of 16
    bytes, or a copy that meets this.

    TMA reads only from multiples of 16 bytes, so every sequence starts a new group.
    """
    if cu_seqlens is not None:
        v = grouped(v, cu_seqlens, v.shape[-1])
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
    v = v.movedim(1, -1)
    return in_boxes(v, list(v.shape), list(v.stride()), [1, 1, config.BLOCK_DV, config.BLOCK_N])
