"""Masks as spans: the kernels that list the blocks of queries that each tile of keys visits, before
the backward.

After the kernel that marks the keys that no query sees, one kernel reads the intervals of each
block of queries and stores their extremes, and the next makes the lists from the extremes. In the
forward one kernel does both (`shared/span_lists.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ....gpu.intrinsics import let_next_kernel_start, wait_for_earlier_kernels
from ....gpu.launch import Launch
from ....masks import as_kernel_number
from ....problem import AttentionProblem, Operands
from ..shared.schedule import NUMBERS
from ..shared.span_lists import (
    CHUNK,
    STRIDES,
    Rules,
    SpanData,
    SpanLists,
    marks,
    masks_of,
    steps_of,
    store_intervals,
    strides,
    unseen_keys_launch,
)


class SpanBuffers(NamedTuple):
    """What these kernels write, all of it int32; `batch` and `heads` as in `SpanLists`."""

    counts: Tensor  # (batch, heads, tiles of keys, 2): full blocks of queries, and blocks in all
    entries: Tensor  # (batch, heads, tiles of keys, blocks): blocks of queries
    intervals: Tensor  # (batch, heads, blocks, R, 2, BLOCK_M): visible keys [start, stop)
    unseen: Tensor  # see `SpanLists`
    extremes: Tensor  # (batch, heads, blocks, R, 4): see `store_intervals`


def span_buffers(
    problem: AttentionProblem, operands: Operands, BLOCK_M: int, BLOCK_N: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of the fields of `SpanBuffers`, by their names in `Buffers`."""
    masks, R = masks_of(problem, operands), problem.spans
    tiles, blocks = -(-problem.N // BLOCK_N), -(-problem.M // BLOCK_M)
    of_lists = (tiles, 2), (tiles, blocks), (blocks, R, 2, BLOCK_M)
    shapes = *of_lists, (marks(problem),), (blocks, R, 4)
    names = (f"span_{name}" for name in SpanBuffers._fields)
    return {name: (*masks, *x) for name, x in zip(names, shapes, strict=True)}


def lists_of_buffers(problem: AttentionProblem, operands: Operands, made: SpanBuffers) -> SpanLists:
    """The lists as the backward kernel takes them."""
    return SpanLists(*made[:4], *steps_of(problem, operands))


def span_launches(
    problem: AttentionProblem, operands: Operands, made: SpanBuffers, common: dict[str, Any]
) -> list[Launch]:
    """The launches that write the lists; `common` are arguments of all kernels."""
    config = common["cfg"]
    options = problem.options
    batch, heads, tiles, blocks = made.entries.shape
    arguments = {
        **strides(operands),
        "starts_ptr": operands.span_starts,
        "stops_ptr": operands.span_stops,
        "made": made,
        "M": problem.M,
        "N": problem.N,
        "left": as_kernel_number(options.window_left),
        "right": as_kernel_number(options.window_right),
        "chunk": as_kernel_number(options.attention_chunk),
        "heads": heads,
        "cfg": config,
    }
    of_lists = {"made": made, "M": problem.M, "cfg": config}
    masks = batch * heads
    return [
        unseen_keys_launch(problem, operands, made.unseen, common),
        Launch(span_rows_kernel, (masks, blocks), arguments),
        Launch(query_lists_kernel, (masks, tiles), of_lists, is_early=True),
    ]


@triton.jit(do_not_specialize=[*NUMBERS, *STRIDES])
def span_rows_kernel(
    starts_ptr, stops_ptr, made, M, N, left, right, chunk,
    starts_batch, starts_head, starts_row, starts_interval,
    stops_batch, stops_head, stops_row, stops_interval,
    heads, cfg: tl.constexpr,
):  # fmt: skip
    """Store the intervals of one block of queries and their extremes; `heads` have masks of their
    own.
    """
    SPANS: tl.constexpr = cfg.SPANS
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    let_next_kernel_start()
    b, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    block = tl.program_id(1)
    number = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + block
    spans = SpanData(
        starts_ptr, starts_batch, starts_head, starts_row, starts_interval,
        stops_ptr, stops_batch, stops_head, stops_row, stops_interval, None, 0, 0,
    )  # fmt: skip
    to = made.intervals + number * (SPANS * 2 * BLOCK_M)
    rules = Rules(left, right, chunk)
    extremes = store_intervals(spans, to, b, h, block, 0, M, N, rules, BLOCK_M, cfg)
    for r in tl.static_range(SPANS):
        of_interval = extremes[r]
        for i in tl.static_range(4):
            tl.store(made.extremes + (number * SPANS + r) * 4 + i, of_interval[i])


@triton.jit(do_not_specialize=["M"])
def query_lists_kernel(made, M, cfg: tl.constexpr):
    """Write the list of one tile of keys."""
    let_next_kernel_start()
    wait_for_earlier_kernels()
    tile, blocks = tl.program_id(1), tl.cdiv(M, cfg.BLOCK_M)
    mask = tl.program_id(0).to(tl.int64)
    number = mask * tl.num_programs(1) + tile
    n0 = tile * cfg.BLOCK_N
    full_count = tile * 0
    count = tile * 0
    for first in range(0, blocks, CHUNK):
        block, full, partial = seeing(first, mask, n0, blocks, made, cfg)
        full_count += tl.sum(full.to(tl.int32), 0)
        count += tl.sum((full | partial).to(tl.int32), 0)
    # Visited from the end: the blocks to mask, then the full ones, both upwards.
    entries = made.entries + number * blocks
    next_full = full_count
    next_partial = count
    for first in range(0, blocks, CHUNK):
        block, full, partial = seeing(first, mask, n0, blocks, made, cfg)
        tl.store(entries + (next_full - tl.cumsum(full.to(tl.int32), 0)), block, mask=full)
        tl.store(entries + (next_partial - tl.cumsum(partial.to(tl.int32), 0)), block, mask=partial)
        next_full -= tl.sum(full.to(tl.int32), 0)
        next_partial -= tl.sum(partial.to(tl.int32), 0)
    tl.store(made.counts + 2 * number, full_count)
    tl.store(made.counts + 2 * number + 1, count)


@triton.jit
def seeing(first, mask, n0, blocks, made, cfg: tl.constexpr):
    """CHUNK blocks of queries from block `first`, which of them see all keys of the tile from `n0`,
    and which only some.
    """
    SPANS: tl.constexpr = cfg.SPANS
    block = first + tl.arange(0, CHUNK)
    inside = block < blocks
    n1 = n0 + cfg.BLOCK_N
    seen = block < 0
    full = block < 0
    for r in tl.static_range(SPANS):
        from_ptr = made.extremes + ((mask * blocks + block) * SPANS + r) * 4
        least_start = tl.load(from_ptr, mask=inside, other=0)
        least_stop = tl.load(from_ptr + 1, mask=inside, other=0)
        greatest_start = tl.load(from_ptr + 2, mask=inside, other=0)
        greatest_stop = tl.load(from_ptr + 3, mask=inside, other=0)
        seen = seen | ((least_start < n1) & (greatest_stop > n0))
        full = full | ((greatest_start <= n0) & (least_stop >= n1))
    seen = seen & inside
    full = full & seen
    return block, full, seen & (full == 0)
