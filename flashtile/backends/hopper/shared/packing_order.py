"""The order of the tiles of a packed batch. The device makes it, since the host knows no lengths.

A list has an entry for each tile of BLOCK rows that exists: its sequence, and its index there. An
entry stands for as many programs as there are heads, times the parts of a tile. The list has room
for the tiles of any batch of that size (`most_tiles`); the entries after the last tile have index
-1.

Long loops come first. A tile loops over the other side of its sequence; the sequence with the
longest other side comes first. The tiles of a sequence follow from the first to the last: under a
causal mask, from the longest loop to the shortest. If several sequences run at the same time
(`together`), their tiles are merged.

Every sequence counts the tiles before its own: neither a sort nor a second launch is needed. Every
entry is written even if the lengths are wrong; tiles that do not fit are dropped from the end.

The kernels write only the rows of sequences. The kernel that makes a list also fills the spare
rows, which belong to no sequence: those before, between and after the sequences. So no launch has
to fill the whole tensor. Most batches have none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

CHUNK = tl.constexpr(256)
FILLED = tl.constexpr(4096)  # elements that a program fills at once
PARTS = tl.constexpr(8)  # programs that share the rows after a sequence


class Side(NamedTuple):
    """The lengths of all sequences, of queries or of keys."""

    cu_seqlens: Any
    seqused: Any
    total: Any  # rows of the tensor
    longest: Any  # bound of the length of a sequence


def most_tiles(total: int, sequences: int, longest: int, block: int) -> int:
    """The most tiles of `block` rows that sequences with `total` rows in all can have."""
    return min(total // block + sequences, sequences * -(-longest // block))


@triton.jit
def rows_of(b, side):
    """First row and number of rows of sequence `b`: `schedule.sequence` in plain Triton."""
    start = b * 0
    count = start + side.longest
    if side.cu_seqlens is not None:
        start = tl.minimum(tl.maximum(tl.load(side.cu_seqlens + b), 0), side.total)
        stop = tl.minimum(tl.load(side.cu_seqlens + b + 1), side.total)
        count = tl.minimum(tl.maximum(stop - start, 0), count)
    if side.seqused is not None:
        count = tl.minimum(tl.maximum(tl.load(side.seqused + b), 0), count)
    return start, count


@triton.jit
def size_of(group, together, B, tiled, other, BLOCK: tl.constexpr):
    """Number of tiles of the sequences of `group`, and the longest loop; 0 and -1 if there is no
    such group.
    """
    tiles = group * 0
    loop = group * 0 - 1
    for k in range(together):
        b = group * together + k
        real = b < B
        _, rows = rows_of(tl.minimum(b, B - 1), tiled)
        _, length = rows_of(tl.minimum(b, B - 1), other)
        tiles += tl.where(real, tl.cdiv(rows, BLOCK), 0)
        loop = tl.maximum(loop, tl.where(real, length, -1))
    return tiles, loop


@triton.jit
def list_tiles(b, list_ptr, length, together, B, tiled, other, BLOCK: tl.constexpr):
    """Write the entries of sequence `b` into a list (length, 2); sequence 0 also writes the entries
    after the last tile. `tiled` and `other` are the sides.
    """
    own = b // together
    _, loop = size_of(own, together, B, tiled, other, BLOCK)
    before = 0 * b  # tiles of the groups before this one
    total = 0 * b
    for start in range(0, tl.cdiv(B, together), CHUNK):
        group = start + tl.arange(0, CHUNK)
        tiles, found = size_of(group, together, B, tiled, other, BLOCK)
        is_before = (found > loop) | ((found == loop) & (group < own))
        before += tl.sum(tl.where(is_before, tiles, 0), 0)
        total += tl.sum(tiles, 0)
    _, rows = rows_of(b, tiled)
    for start in range(0, tl.cdiv(rows, BLOCK), CHUNK):
        n = start + tl.arange(0, CHUNK)
        remaining = rows - n * BLOCK  # tiles with more rows from here on come first
        index = before + 0 * n
        for k in range(together):
            member = own * together + k
            _, count = rows_of(tl.minimum(member, B - 1), tiled)
            more = count - remaining + tl.where(member < b, 1, 0)
            index += tl.where(member < B, tl.cdiv(tl.maximum(more, 0), BLOCK), 0)
        store_entries(list_ptr, index, b, n, (remaining > 0) & (index < length))
    if b == 0:
        for start in range(total, length, CHUNK):
            index = start + tl.arange(0, CHUNK)
            store_entries(list_ptr, index, b, -1, index < length)


@triton.jit
def store_entries(list_ptr, index, b, n, mask):
    """Write (b, n) at each index of the list."""
    tl.store(list_ptr + 2 * index, b + 0 * index, mask=mask)
    tl.store(list_ptr + 2 * index + 1, n + 0 * index, mask=mask)


@triton.jit
def fill_spare_rows(ptr, value, runs, step, width, b, count, part, parts, B, side):
    """Write `value` into the rows from row `count` of sequence `b` to the next sequence, and into
    those before sequence 0.

    `side` has the lengths. The tensor at `ptr`, of one sequence if the batch is dense, consists of
    `runs` runs at multiples of `step`; in each, a row has `width` elements and rows are adjacent.
    `parts` programs share the work.
    """
    start, _ = rows_of(b, side)
    stop = start + side.longest
    if side.cu_seqlens is not None:
        stop = start * 0 + side.total
        if b + 1 < B:
            stop, _ = rows_of(b + 1, side)
        if b == 0:
            fill_rows(ptr, value, runs, step, width, start * 0, start, part, parts)
    fill_rows(ptr, value, runs, step, width, start + count, stop, part, parts)


@triton.jit
def fill_rows(ptr, value, runs, step, width, first, stop, part, parts):
    """Write `value` into the rows [first, stop) of all runs; one of `parts` shares."""
    size = tl.maximum(stop - first, 0).to(tl.int64) * width
    if size > 0:
        ptr += first.to(tl.int64) * width
        for _ in range(runs):
            for offset in range(part * FILLED, size, parts * FILLED):
                offs = offset + tl.arange(0, FILLED)
                tl.store(ptr + offs, value, mask=offs < size)
            ptr += step
