"""Merge partial attention results of the same queries over different keys: `formula.py` on a GPU.

Source: flash-decoding; FlashAttention-2, section 3.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...gpu.intrinsics import LN2, LOG2E, rows_base, wait_for_earlier_kernels
from ...gpu.launch import Launch
from ...gpu.launch_cache import allocate_and_run_all
from ...gpu.memory import NewTensor, uninitialised
from ...gpu.rows import Rows, rows_of


class Parts(NamedTuple):
    """Head rows of every part of a split-KV call: the strides of `Rows`, and that of the parts."""

    ptr: Tensor
    part: int
    batch: int
    row: int
    head: int
    dim: int


# Elements that one program loads in a step: features of a head times parts.
PROGRAM_ELEMENTS = 4096
# Bounds of the parts that one step merges: few values, so that few kernels are compiled.
FEWEST_PARTS, MOST_PARTS = 32, 256


@triton.jit(do_not_specialize=["splits", "rows", "heads"])
def merge_kernel(
    out_parts, lse_parts, out, lse, splits, rows, heads,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr, IS_EARLY: tl.constexpr,
    HAS_LOG_SUMS: tl.constexpr,
):  # fmt: skip
    """Merge some features of one row of one head, PARTS parts at a time.

    The order is fixed, so results are bitwise reproducible. The output of a part that saw no key is
    ignored.

    HAS_LOG_SUMS: the log-sum-exp of a part is a sum of two numbers, `splits` parts apart.
    """
    if IS_EARLY:
        wait_for_earlier_kernels()
    program = tl.program_id(0)
    h = program % heads
    row = program // heads % rows
    b = program // heads // rows
    lse_base = rows_base(lse_parts, b, row, h)
    out_base = rows_base(out_parts, b, row, h)
    # (BLOCK_DV,)
    dims = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    row_max = tl.full([], -float("inf"), tl.float32)
    row_sum = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for first in range(0, splits, PARTS):
        # (PARTS,)
        part = (first + tl.arange(0, PARTS)).to(tl.int64)
        exists = part < splits
        lse_part = tl.load(lse_base + part * lse_parts.part, mask=exists, other=-float("inf"))
        # (PARTS, BLOCK_DV), loaded before the weights are known, to wait for memory only once
        offs = part[:, None] * out_parts.part + (dims * out_parts.dim)[None, :]
        inside = exists[:, None] & (dims < DV)[None, :]
        out_part = tl.load(out_base + offs, mask=inside, other=0.0).to(tl.float32)
        new_max = tl.maximum(row_max, tl.max(lse_part, 0))
        finite = tl.where(new_max == -float("inf"), 0.0, new_max)  # -inf - -inf would be NaN
        # Subtracted first, because the log-sum-exp may be as large as -1e38.
        weight = tl.math.exp2((lse_part - finite) * LOG2E)
        if HAS_LOG_SUMS:
            log_sums = lse_base + (splits + part) * lse_parts.part
            weight *= tl.math.exp2(tl.load(log_sums, mask=exists, other=0.0) * LOG2E)
        rescale = tl.math.exp2((row_max - finite) * LOG2E)
        row_sum = row_sum * rescale + tl.sum(weight, 0)
        weighted = tl.where((weight > 0.0)[:, None], out_part * weight[:, None], 0.0)
        acc = acc * rescale + tl.sum(weighted, 0)
        row_max = new_max

    seen = row_sum != 0.0  # NaN was seen
    safe_sum = tl.where(seen, row_sum, 1.0)
    if tl.program_id(1) == 0:
        lse_value = tl.where(seen, row_max + tl.math.log2(safe_sum) * LN2, -float("inf"))
        tl.store(rows_base(lse, b, row, h), lse_value)
    result = acc / safe_sum
    out_ptr = rows_base(out, b, row, h) + dims * out.dim
    tl.store(out_ptr, result.to(out.ptr.dtype.element_ty), mask=dims < DV)


def merge_launch(
    out_parts: Tensor, lse_parts: Tensor, out: Tensor, lse: Tensor, is_early: bool = False
) -> Launch:
    """The launch that merges the parts into `out` and `lse`.

    Args:
        out_parts: (parts, batch, rows, heads, head_dim) or (parts, rows, heads, head_dim).
        lse_parts: (parts, batch, heads, rows) or (parts, heads, rows), float32; or twice as many,
            the row maxima of all parts and then the logarithms of their sums.
        out, lse: shaped like one part; `lse` float32.
        is_early: launch the kernel while the kernel that computes the parts still runs.
    """
    splits, head_dim = out_parts.shape[0], out_parts.shape[-1]
    parts_a_step = min(MOST_PARTS, max(FEWEST_PARTS, triton.next_power_of_2(splits)))
    block_dim = min(triton.next_power_of_2(head_dim), max(16, PROGRAM_ELEMENTS // parts_a_step))
    arguments = {
        **parts_arguments(out_parts, lse_parts, out, lse),
        "DV": head_dim,
        "BLOCK_DV": block_dim,
        "PARTS": parts_a_step,
        "IS_EARLY": is_early,
        "HAS_LOG_SUMS": lse_parts.shape[0] > splits,
    }
    grid = (out.shape[:-1].numel(), -(-head_dim // block_dim))
    return Launch(merge_kernel, grid, arguments, 4, 1, is_early=is_early)


def parts_arguments(
    out_parts: Tensor, lse_parts: Tensor, out: Tensor, lse: Tensor
) -> dict[str, Any]:
    """The arguments of a kernel that merges the parts of `merge_launch`."""
    if out.dim() == 3:
        out_parts, lse_parts, out, lse = (
            out_parts[:, None],
            lse_parts[:, None],
            out[None],
            lse[None],
        )
    part, of_batch, of_head, of_row = lse_parts.stride()
    batch_stride, head_stride, row_stride = lse.stride()
    return {
        "out_parts": Parts(out_parts, *out_parts.stride()),
        "lse_parts": Parts(lse_parts, part, of_batch, of_row, of_head, 0),
        "out": rows_of(out),
        "lse": Rows(lse, batch_stride, row_stride, head_stride, 0),
        "splits": out_parts.shape[0],
        "rows": out.shape[1],
        "heads": out.shape[2],
    }


def merge_parts(out_parts: Tensor, lse_parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`formula.merge_parts` for float32 log-sum-exps (parts, ..., rows, heads)."""

    def allocators() -> list[NewTensor]:
        return [
            uninitialised(x.shape[1:], made, x.device)
            for x, made in ((out_parts, dtype), (lse_parts, torch.float32))
        ]

    def describe(given: Any, made: Any) -> list[Launch]:
        (out_parts, lse_parts), (out, lse) = given, made
        return [merge_launch(out_parts, lse_parts.transpose(-1, -2), out, lse.transpose(-1, -2))]

    given = (out_parts, lse_parts)
    out, lse = allocate_and_run_all("merge", dtype, given, allocators, describe, lambda: None)
    return out, lse
