"""Joining the parts of attention whose keys were split over programs: `merge.py` on a GPU.

Every part is normalised over its own keys and says how much they weigh by its log-sum-exp, so the
whole is the parts' mean weighted by ``exp(lse_part - lse)`` (flash-decoding; FlashAttention-2,
section 3.1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import Parts, Rows, rows_of
from .kernel_launch import Launch, run
from .tiles import LN2, LOG2E, rows_base

# Numbers that one step of a program joins: so many parts of a head as make these.
NUMBERS_A_STEP = 2048


@triton.jit(do_not_specialize=["splits", "rows", "heads"])
def combine_kernel(
    out_parts, lse_parts, out, lse, splits, rows, heads,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One row of one head: PARTS parts at a time, in their order, so that results repeat bit for
    bit. A part that saw no key may hold anything in its output."""
    program = tl.program_id(0)
    h = program % heads
    row = program // heads % rows
    b = program // heads // rows
    lse_base = rows_base(lse_parts, b, row, h)
    out_base = rows_base(out_parts, b, row, h)
    dims = tl.arange(0, BLOCK_DV)[None, :]

    # (PARTS,)
    largest = tl.full([PARTS], -float("inf"), tl.float32)
    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        place = part.to(tl.int64) * lse_parts.part
        lse_log2 = tl.load(lse_base + place, mask=part < splits, other=-float("inf"))
        largest = tl.maximum(largest, lse_log2 * LOG2E)
    pivot = tl.max(largest, 0)
    pivot = tl.where(pivot == -float("inf"), 0.0, pivot)  # -inf - -inf would be NaN

    weights = tl.zeros([PARTS], tl.float32)
    # (PARTS, BLOCK_DV)
    acc = tl.zeros([PARTS, BLOCK_DV], tl.float32)
    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        place = part.to(tl.int64) * lse_parts.part
        lse_part = tl.load(lse_base + place, mask=part < splits, other=-float("inf"))
        weight = tl.math.exp2(lse_part * LOG2E - pivot)
        weights += weight
        place = part.to(tl.int64)[:, None] * out_parts.part + dims * out_parts.dim
        inside = (weight > 0.0)[:, None] & (dims < DV)
        out_part = tl.load(out_base + place, mask=inside, other=0.0).to(tl.float32)
        acc += out_part * weight[:, None]

    total = tl.sum(weights, 0)
    seen = total > 0.0
    safe_total = tl.where(seen, total, 1.0)
    lse_value = tl.where(seen, (pivot + tl.math.log2(safe_total)) * LN2, -float("inf"))
    tl.store(rows_base(lse, b, row, h), lse_value)
    # (BLOCK_DV,)
    result = tl.sum(acc, 0) / safe_total
    dims = tl.arange(0, BLOCK_DV)
    place = rows_base(out, b, row, h) + dims * out.dim
    tl.store(place, result.to(out.ptr.dtype.element_ty), mask=dims < DV)


def combine_launch(out_parts: Tensor, lse_parts: Tensor, out: Tensor, lse: Tensor) -> Launch:
    """Fill `out` and `lse` with what the parts make together.

    Args:
        out_parts: (parts, batch, rows, heads, head_dim) or (parts, rows, heads, head_dim).
        lse_parts: (parts, batch, heads, rows) or (parts, heads, rows), float32.
        out, lse: shaped as a part, `lse` float32.
    """
    if out.dim() == 3:
        parts, rest, joined, joined_lse = (
            out_parts[:, None],
            lse_parts[:, None],
            out[None],
            lse[None],
        )
        return combine_launch(parts, rest, joined, joined_lse)
    splits, batch, rows, heads, head_dim = out_parts.shape
    part, of_batch, of_head, of_row = lse_parts.stride()
    batch_stride, head_stride, row_stride = lse.stride()
    block_dim = max(16, triton.next_power_of_2(head_dim))
    arguments = {
        "out_parts": Parts(out_parts, *out_parts.stride()),
        "lse_parts": Parts(lse_parts, part, of_batch, of_row, of_head, 0),
        "out": rows_of(out),
        "lse": Rows(lse, batch_stride, row_stride, head_stride, 0),
        "splits": splits,
        "rows": rows,
        "heads": heads,
        "DV": head_dim,
        "BLOCK_DV": block_dim,
        "PARTS": min(32, max(2, NUMBERS_A_STEP // block_dim)),
    }
    return Launch(combine_kernel, (batch * rows * heads,), arguments, 4, 1)


def combine(out_parts: Tensor, lse_parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`merge.flash_attn_combine` of checked tensors, whose log-sum-exps are (parts, ..., rows,
    heads)."""
    out = torch.empty(out_parts.shape[1:], dtype=dtype, device=out_parts.device)
    lse = torch.empty(lse_parts.shape[1:], dtype=torch.float32, device=out_parts.device)
    launch = combine_launch(out_parts, lse_parts.transpose(-1, -2), out, lse.transpose(-1, -2))
    run([launch], out_parts)
    return out, lse
