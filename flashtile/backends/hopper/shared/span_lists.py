"""Masks as spans (`flashtile.masks.Spans`): the kernels that list the blocks of keys that each tile
of queries visits, before the forward, and the blocks of queries of each tile of keys, before the
backward. With one interval for each row, the forward of a dense batch
does without up to head dim 64 (`schedule.py`).

The mask is data of the call, so the lists are made on the device, for every call. They have the
form of those of a block mask (`block_lists.py`), and the same loops read them. A block is full if
one interval of every row contains it, and partial if it may contain a visible key: it is then
masked by each row's intervals, which this kernel stores with the mask rules applied, one tile after
the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....gpu.intrinsics import let_next_kernel_start, wait_for_earlier_kernels
from ....gpu.launch import Launch
from ....gpu.memory import NewTensor, uninitialised
from ....masks import as_kernel_number
from ....problem import AttentionProblem, Operands
from .schedule import NUMBERS, SPARE_MARKS, Side, rows_of

CHUNK = tl.constexpr(128)  # blocks of keys that are classified at once

STRIDES = (
    "starts_batch", "starts_head", "starts_row", "starts_interval",
    "stops_batch", "stops_head", "stops_row", "stops_interval",
)  # fmt: skip


class SpanLists(NamedTuple):
    """A list for each tile of queries, of `batch` x `heads` masks. `batch` is 1 if all sequences
    share a mask, and `heads` is 1 if all heads do.
    """

    counts: Tensor  # int32 (batch, heads, tiles, 2): full blocks, and blocks in all
    entries: Tensor  # int32 (batch, heads, tiles, blocks): first key of a block
    # int32 (batch, heads, tiles, R, 2, BLOCK_M): visible keys [start, stop) of each row
    intervals: Tensor
    unseen: Tensor  # int32 (batch, heads, N + `SPARE_MARKS`): 1 for keys that no query sees
    batch_step: int  # masks from one sequence to the next, and from one head to the next
    head_step: int


def steps_of(problem: AttentionProblem, operands: Operands) -> tuple[int, int]:
    """`batch_step` and `head_step` of a call's lists."""
    batch, heads = masks_of(problem, operands)
    return (heads if batch > 1 else 0), (1 if heads > 1 else 0)


def masks_of(problem: AttentionProblem, operands: Operands) -> tuple[int, int]:
    """How many sequences and query heads have their own lists. Sequences of different lengths do
    not share one.
    """
    starts = operands.span_starts
    assert starts is not None
    is_shared = problem.layout == "dense" and not problem.has_lengths and starts.shape[0] == 1
    return (1 if is_shared else problem.B), starts.shape[1]


def span_tensors(problem: AttentionProblem, operands: Operands, config: Any) -> list[NewTensor]:
    """What allocates the tensors of `SpanLists`, or only the marks of unseen keys if the forward
    has no lists of spans.
    """
    if problem.spans == 0:
        return []
    masks, device = masks_of(problem, operands), operands.q.device
    unseen = uninitialised((*masks, marks(problem)), torch.int32, device)
    if config.SPANS == 0:
        return [unseen]
    lists = *masks, -(-problem.M // config.BLOCK_M)
    last_sizes = (2,), (-(-problem.N // config.BLOCK_N),), (config.SPANS, 2, config.BLOCK_M)
    of_lists = [uninitialised((*lists, *x), torch.int32, device) for x in last_sizes]
    return [*of_lists, unseen]


def marks(problem: AttentionProblem) -> int:
    """The marks of one mask's keys: see `schedule.Kept`."""
    return problem.N + SPARE_MARKS.value


def span_lists_launch(
    problem: AttentionProblem, operands: Operands, of_forward: dict[str, Any]
) -> Launch:
    """The launch that writes the lists of a forward with these arguments."""
    names = "at", "M", "N", "total_q", "total_k", "left", "right", "chunk", "cfg"
    lists, config = of_forward["blocks"], of_forward["cfg"]
    batch, heads, tiles, _ = lists.counts.shape
    arguments = {
        **{name: of_forward[name] for name in names},
        **strides(operands),
        "starts_ptr": operands.span_starts,
        "stops_ptr": operands.span_stops,
        "lists": lists,
        "heads": heads,
        "ROWS": 1 << (config.BLOCK_M - 1).bit_length(),
    }
    is_early = config.IS_RAGGED
    return Launch(span_lists_kernel, (batch * heads, tiles), arguments, is_early=is_early)


def strides(operands: Operands) -> dict[str, int]:
    """The strides of a call's spans; 0 from one sequence to the next where they share a mask, or
    are packed, and from one head to the next where those share it.
    """
    found = {}
    for name, x in (("starts", operands.span_starts), ("stops", operands.span_stops)):
        assert x is not None
        batch, head, row, interval = x.stride()
        found[f"{name}_batch"] = batch if x.shape[0] > 1 else 0
        found[f"{name}_head"] = head if x.shape[1] > 1 else 0
        found[f"{name}_row"], found[f"{name}_interval"] = row, interval
    return found


def spans_of(
    problem: AttentionProblem, operands: Operands, made: Sequence[Tensor]
) -> SpanLists | SpanData:
    """What the forward reads of a call's spans, with the tensors `made` of `span_tensors`: the
    lists if there are any, or else the intervals.
    """
    steps = steps_of(problem, operands)
    if len(made) > 1:
        return SpanLists._make((*made, *steps))
    tensors = {"starts": operands.span_starts, "stops": operands.span_stops, "unseen": made[0]}
    return SpanData(**tensors, **strides(operands), batch_step=steps[0], head_step=steps[1])


class SpanData(NamedTuple):
    """The spans of a call, with the strides of (batch, head, row, interval)."""

    starts: Any
    starts_batch: Any
    starts_head: Any
    starts_row: Any
    starts_interval: Any
    stops: Any
    stops_batch: Any
    stops_head: Any
    stops_row: Any
    stops_interval: Any
    unseen: Any  # as in `SpanLists`, as are the next two; nothing where lists are made
    batch_step: Any
    head_step: Any


class Rules(NamedTuple):
    """The numbers of the mask rules."""

    left: Any
    right: Any
    chunk: Any


@triton.jit(do_not_specialize=[*NUMBERS, *STRIDES])
def span_lists_kernel(
    starts_ptr, stops_ptr, lists, at, M, N, total_q, total_k, left, right, chunk,
    starts_batch, starts_head, starts_row, starts_interval,
    stops_batch, stops_head, stops_row, stops_interval,
    heads, ROWS: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Write the list of one tile of queries; `heads` have masks of their own. ROWS is BLOCK_M,
    rounded up to a power of two.
    """
    SPANS: tl.constexpr = cfg.SPANS
    let_next_kernel_start()
    if cfg.IS_RAGGED:  # this kernel starts while the one that lists the tiles ends
        wait_for_earlier_kernels()
    b, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    tile = tl.program_id(1)
    start_q, M = rows_of(b, Side(at.cu_seqlens_q, at.seqused_q, total_q, M))
    capacity = tl.cdiv(N, cfg.BLOCK_N)
    _, N = rows_of(b, Side(at.cu_seqlens_k, at.seqused_k, total_k, N))
    number = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tile
    spans = SpanData(
        starts_ptr, starts_batch, starts_head, starts_row, starts_interval,
        stops_ptr, stops_batch, stops_head, stops_row, stops_interval, None, 0, 0,
    )  # fmt: skip
    rules = Rules(left, right, chunk)
    to = lists.intervals + number * (SPANS * 2 * cfg.BLOCK_M)
    extremes = store_intervals(spans, to, b, h, tile, start_q, M, N, rules, ROWS, cfg)
    full_count = tile * 0
    for n in range(0, tl.cdiv(N, cfg.BLOCK_N), CHUNK):
        n0, full, partial = kinds(n, extremes, cfg)
        full_count += tl.sum(full.to(tl.int32), 0)
    # Full blocks, then those to mask. Both are visited from the last key to the first.
    entries = lists.entries + number * capacity
    written = tile * 0
    count = full_count
    for n in range(0, tl.cdiv(N, cfg.BLOCK_N), CHUNK):
        n0, full, partial = kinds(n, extremes, cfg)
        tl.store(entries + (written + tl.cumsum(full.to(tl.int32), 0) - 1), n0, mask=full)
        tl.store(entries + (count + tl.cumsum(partial.to(tl.int32), 0) - 1), n0, mask=partial)
        written += tl.sum(full.to(tl.int32), 0)
        count += tl.sum(partial.to(tl.int32), 0)
    # A tile that sees nothing visits one block, of which it sees nothing.
    tl.store(entries, 0, mask=count == 0)
    tl.store(lists.counts + 2 * number, full_count)
    tl.store(lists.counts + 2 * number + 1, tl.maximum(count, 1))


def unseen_keys_launch(
    problem: AttentionProblem, operands: Operands, unseen: Tensor, of_pass: dict[str, Any]
) -> Launch:
    """The launch that marks the keys that no query sees, for a launch with the arguments
    `of_pass`.
    """
    options = problem.options
    batch, heads, count = unseen.shape
    arguments = {
        **{name: of_pass[name] for name in ("at", "M", "N", "total_q", "total_k", "cfg")},
        **strides(operands),
        "starts_ptr": operands.span_starts,
        "stops_ptr": operands.span_stops,
        "unseen_ptr": unseen,
        "left": as_kernel_number(options.window_left),
        "right": as_kernel_number(options.window_right),
        "chunk": as_kernel_number(options.attention_chunk),
        "heads": heads,
        "group": problem.group if heads > 1 else 1,
        "SPANS": problem.spans,
    }
    return Launch(unseen_keys_kernel, (batch * heads, -(-count // CHUNK.value)), arguments)


@triton.jit(do_not_specialize=[*NUMBERS, *STRIDES])
def unseen_keys_kernel(
    starts_ptr, stops_ptr, unseen_ptr, at, M, N, total_q, total_k, left, right, chunk,
    starts_batch, starts_head, starts_row, starts_interval,
    stops_batch, stops_head, stops_row, stops_interval,
    heads, group, SPANS: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Mark the keys of a block that no query sees of the `group` of heads that shares the keys.

    The rows beside the keys come first: under most masks each key is seen by one of them.
    """
    b, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    offs = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    bound = N
    start_q, M = rows_of(b, Side(at.cu_seqlens_q, at.seqused_q, total_q, M))
    _, N = rows_of(b, Side(at.cu_seqlens_k, at.seqused_k, total_k, N))
    rules = Rules(left, right, chunk)
    hidden = (offs < N).to(tl.int32)
    blocks = tl.cdiv(M, CHUNK)
    beside = tl.minimum(tl.maximum(tl.program_id(1) * CHUNK + M - N, 0) // CHUNK, blocks - 1)
    for step in range(group * blocks):
        if tl.max(hidden, 0) > 0:
            head = (h // group * group + step // blocks).to(tl.int64)
            row = (beside + step) % blocks * CHUNK + tl.arange(0, CHUNK)
            inside = row < M
            first, last = key_range(row + N - M, N, rules, cfg)
            from_row = (start_q + row).to(tl.int64)
            starts = starts_ptr + b.to(tl.int64) * starts_batch + head * starts_head
            stops = stops_ptr + b.to(tl.int64) * stops_batch + head * stops_head
            starts += from_row * starts_row
            stops += from_row * stops_row
            for r in tl.static_range(SPANS):
                # (CHUNK,) queries
                start = tl.load(starts + r * starts_interval, mask=inside, other=0)
                stop = tl.load(stops + r * stops_interval, mask=inside, other=0)
                start = tl.maximum(start, first)
                stop = tl.where(inside, tl.minimum(stop, last), 0)
                # (CHUNK queries, CHUNK keys)
                seen = (offs[None, :] >= start[:, None]) & (offs[None, :] < stop[:, None])
                hidden = tl.where(tl.max(seen.to(tl.int32), 0) > 0, 0, hidden)
    to = unseen_ptr + tl.program_id(0).to(tl.int64) * (bound + SPARE_MARKS)
    tl.store(to + offs, hidden, mask=offs < bound + SPARE_MARKS)


@triton.jit
def store_intervals(
    spans, to, b, h, tile, start_q, M, N, rules, ROWS: tl.constexpr, cfg: tl.constexpr
):  # fmt: skip
    """Store the intervals of the rows of a tile, (SPANS, 2, BLOCK_M), at `to`. Returns the least
    start and stop and the greatest start and stop of all rows, for each interval.
    """
    SPANS: tl.constexpr = cfg.SPANS
    offs = tl.arange(0, ROWS)
    row = tile * cfg.BLOCK_M + offs
    inside = (offs < cfg.BLOCK_M) & (row < M)
    first, last = key_range(row + N - M, N, rules, cfg)
    b, h, row = b.to(tl.int64), h.to(tl.int64), (start_q + row).to(tl.int64)
    starts = spans.starts + b * spans.starts_batch + h * spans.starts_head
    stops = spans.stops + b * spans.stops_batch + h * spans.stops_head
    starts += row * spans.starts_row
    stops += row * spans.stops_row
    extremes = ()
    for r in tl.static_range(SPANS):
        # (ROWS,)
        start = tl.load(starts + r * spans.starts_interval, mask=inside, other=0)
        stop = tl.load(stops + r * spans.stops_interval, mask=inside, other=0)
        start = tl.maximum(start, first)
        stop = tl.minimum(stop, last)
        is_empty = (start >= stop) | (inside == 0)
        start = tl.where(is_empty, N, start)
        stop = tl.where(is_empty, 0, stop)
        tl.store(to + 2 * r * cfg.BLOCK_M + offs, start, mask=offs < cfg.BLOCK_M)
        tl.store(to + (2 * r + 1) * cfg.BLOCK_M + offs, stop, mask=offs < cfg.BLOCK_M)
        of_interval = (
            tl.min(start, 0),
            tl.min(tl.where(inside, stop, N), 0),
            tl.max(tl.where(inside, start, 0), 0),
            tl.max(stop, 0),
        )
        # Triton knows no starred elements; mypy, no tuples of a length that cfg decides.
        extremes = extremes + (of_interval,)  # type: ignore[assignment]  # noqa: RUF005
    return extremes


@triton.jit
def kinds(n, extremes, cfg: tl.constexpr):
    """The first keys of CHUNK blocks from block `n`, which of them are full, and which partial."""
    SPANS: tl.constexpr = cfg.SPANS
    n0 = (n + tl.arange(0, CHUNK)) * cfg.BLOCK_N
    n1 = n0 + cfg.BLOCK_N
    seen = n0 < 0
    full = n0 < 0
    for r in tl.static_range(SPANS):
        least_start, least_stop, greatest_start, greatest_stop = extremes[r]
        seen = seen | ((least_start < n1) & (greatest_stop > n0))
        full = full | ((greatest_start <= n0) & (least_stop >= n1))
    full = full & seen  # rows that do not exist see everything and nothing
    return n0, full, seen & (full == 0)


@triton.jit
def key_range(p, N, rules, cfg: tl.constexpr):
    """`schedule.visible_keys` in plain Triton."""
    start = p * 0
    stop = start + N
    if cfg.HAS_LEFT:
        start = tl.maximum(start, p - rules.left)
    if cfg.HAS_RIGHT:
        stop = tl.minimum(stop, p + rules.right + 1)
    if cfg.HAS_CHUNK:
        remainder = p % rules.chunk
        chunk = p - tl.where(remainder < 0, remainder + rules.chunk, remainder)
        start = tl.maximum(start, chunk)
        stop = tl.minimum(stop, chunk + rules.chunk)
    return start, stop


# Masks as spans: the kernels that list the blocks of queries that each tile of keys visits, before
# the backward.
#
# After the kernel that marks the keys that no query sees, one kernel reads the intervals of each
# block of queries and stores their extremes, and the next makes the lists from the extremes. In the
# forward one kernel does both.


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
        # (CHUNK,)
        least_start = tl.load(from_ptr, mask=inside, other=0)
        least_stop = tl.load(from_ptr + 1, mask=inside, other=0)
        greatest_start = tl.load(from_ptr + 2, mask=inside, other=0)
        greatest_stop = tl.load(from_ptr + 3, mask=inside, other=0)
        seen = seen | ((least_start < n1) & (greatest_stop > n0))
        full = full | ((greatest_start <= n0) & (least_stop >= n1))
    seen = seen & inside
    full = full & seen
    return block, full, seen & (full == 0)
