"""The tile scheduler: which tile of queries is next, which keys it sees, and which rows may hold
anything. At the end, the kernel that orders the tiles of a packed batch.

Programs are persistent, one for each multiprocessor. The producer of a program, or its scheduler,
takes the index of its next tile from a counter that all programs share, and sends the tile to the
other roles. A program that finishes early takes more tiles, which balances long and short tiles.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....gpu.dropout import BLOCK_KEYS
from ....gpu.intrinsics import let_next_kernel_start
from ....masks import block_mask
from .pipeline import (
    CONSUMER_ROWS,
    CONSUMER_WARPS,
    aggregate,
    number_of,
    opaque_zero,
    put,
    recast,
    rows_of_heads,
    shared_rows,
    shared_value,
)

WORK_NUMBERS = gl.constexpr(9)  # fields of `Work`


# Arguments that change with lengths; Triton must not specialise them.
NUMBERS = (
    "B", "M", "N", "total_q", "total_k", "heads", "group", "swizzle", "tiles", "left", "right",
    "chunk", "alibi_batch", "first_kept",
)  # fmt: skip


class Sequences(NamedTuple):
    """What is known of the sequences in tensors; `Sizes` has the bounds."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    q_runs: Tensor | None = None  # (B, cfg.RUNS, 2), see `positions_of`
    k_runs: Tensor | None = None
    page_table: Tensor | None = None  # (B, sizes.total_k)
    cache_batch_idx: Tensor | None = None  # in the forward, as the next one
    leftpad_k: Tensor | None = None
    tiles: Tensor | None = None  # the list of `packing_order` with cfg.IS_RAGGED, in the forward


class Sizes(NamedTuple):
    """Bounds of all sequences, and the order of the tiles."""

    B: Any
    M: Any
    N: Any
    total_q: Any  # rows of a packed q
    total_k: Any  # with pages, the entries of a sequence in their table
    heads: Any
    group: Any  # query heads that share a key head
    swizzle: Any  # number of heads whose tiles run at the same time (head swizzle)
    tiles: Any  # with cfg.IS_RAGGED, that the list has room for


class Mask(NamedTuple):
    """The numbers of the mask rules, which flags of the plan select, lists of blocks, and where
    rows stand.
    """

    left: Any
    right: Any
    chunk: Any
    blocks: Any = None  # lists: `block_lists.BlockLists` or `span_lists.SpanLists`
    q_runs: Any = None
    k_runs: Any = None


@aggregate
class Work:
    """A tile of queries of one head, and the blocks of keys that some row of it sees."""

    b: gl.tensor
    h: gl.tensor
    m0: gl.tensor  # first row of the tile, counted in the sequence
    start_q: gl.tensor  # first row of the sequence
    M: gl.tensor  # queries of the sequence
    N: gl.tensor
    begin: gl.tensor  # first block of keys; at least one block is visited
    end: gl.tensor
    start_k: gl.tensor  # first row of the sequence's keys
    first_key: gl.tensor  # that of block 0, where the tile has no list

    @gluon.constexpr_function
    def __init__(self, b, h, m0, start_q, M, N, begin, end, start_k, first_key):
        self.b = b
        self.h = h
        self.m0 = m0
        self.start_q = start_q
        self.M = M
        self.N = N
        self.begin = begin
        self.end = end
        self.start_k = start_k
        self.first_key = first_key


@gluon.jit
def swizzled_order(tile, m_tiles, heads, swizzle):
    """(tile, head) of a tile index under the head swizzle: all tiles of a group of `swizzle` heads,
    then those of the next group. Within a group the head varies fastest.

    The heads of a group share the L2 cache. If the heads do not divide evenly, the first group is
    the smaller one: at the end, its few long tiles would leave most programs idle.
    """
    missing = (swizzle - heads % swizzle) % swizzle  # heads that the first group lacks
    first = (tile + missing * m_tiles) // (m_tiles * swizzle) * swizzle - missing
    width = swizzle + gl.minimum(first, 0)
    first = gl.maximum(first, 0)
    index = tile - first * m_tiles
    return index // width, first + index % width


@gluon.jit
def sequence(b, cu_seqlens, seqused, total, bound):
    """First row and number of rows of sequence `b`, clamped to the tensor."""
    start = b * 0
    count = start + bound
    if cu_seqlens is not None:
        start = gl.minimum(gl.maximum(gl.load(cu_seqlens + b), 0), total)
        stop = gl.minimum(gl.load(cu_seqlens + b + 1), total)
        count = gl.minimum(gl.maximum(stop - start, 0), count)
    if seqused is not None:
        count = gl.minimum(gl.maximum(gl.load(seqused + b), 0), count)
    return start, count


@gluon.jit
def floor_to(x, size):
    """`x` rounded down to a multiple of `size`, also below zero."""
    remainder = x % size
    return x - gl.where(remainder < 0, remainder + size, remainder)


# The positions of queries and keys in their sequence, when the tensors hold only parts of it: those
# of `flashtile.masks` on the GPU. A few runs describe the positions of a sequence's rows, which
# increase from row to row. What a query sees is therefore an interval of rows of k, and the rows
# that see a key are an interval of rows of q. They are computed once for each tile, before its
# loop, which knows rows only. Without runs (cfg.RUNS is 0) query i has position i + N - M and key j
# has position j, which costs nothing.


@gluon.jit
def query_positions(rows, p, b, mask, cfg: gl.constexpr):
    """The positions of the queries `rows`, a number or several; `p` without runs."""
    if cfg.RUNS > 0:
        p = positions_of(rows, runs_of(mask.q_runs, b, cfg), cfg)
    return p


@gluon.jit
def key_positions(keys, b, mask, cfg: gl.constexpr):
    """The positions of `keys`."""
    p = keys
    if cfg.RUNS > 0:
        p = positions_of(keys, runs_of(mask.k_runs, b, cfg), cfg)
    return p


@gluon.jit
def queries_before(p, b, M, shift, mask, cfg: gl.constexpr):
    """The first query at position `p` or later; without runs, row 0 is at `shift`, and the query
    may be outside of [0, M].
    """
    if cfg.RUNS > 0:
        row = rows_before(p, runs_of(mask.q_runs, b, cfg), M, cfg)
    else:
        row = p - shift
    return row


@gluon.jit
def queries_between(p, size, b, M, shift, mask, cfg: gl.constexpr):
    """The queries [start, stop) at the positions [p, p + size), as `queries_before`."""
    start = queries_before(p, b, M, shift, mask, cfg)
    if cfg.RUNS > 0:
        stop = queries_before(p + size, b, M, shift, mask, cfg)
    else:
        stop = start + size
    return start, stop


@gluon.jit
def keys_before(p, b, N, mask, cfg: gl.constexpr):
    """The first key at position `p` or later; without runs, it may be outside of [0, N]."""
    key = p
    if cfg.RUNS > 0:
        key = rows_before(p, runs_of(mask.k_runs, b, cfg), N, cfg)
    return key


@gluon.jit
def runs_of(runs_ptr, b, cfg: gl.constexpr):
    """The runs of sequence `b`: cfg.RUNS pairs of first row and position."""
    return runs_ptr + b * (2 * cfg.RUNS)


@gluon.jit
def positions_of(rows, runs_ptr, cfg: gl.constexpr):
    """`Positions.at`; the first run begins at row 0, and unused ones after every row."""
    RUNS: gl.constexpr = cfg.RUNS
    p = rows + gl.load(runs_ptr + 1)
    for run in gl.static_range(1, RUNS):
        first = gl.load(runs_ptr + 2 * run)
        p = gl.where(rows >= first, rows - first + gl.load(runs_ptr + 2 * run + 1), p)
    return p


@gluon.jit
def rows_before(p, runs_ptr, count, cfg: gl.constexpr):
    """`Positions.below`, for a sequence of `count` rows."""
    RUNS: gl.constexpr = cfg.RUNS
    total = p * 0
    for run in gl.static_range(RUNS):
        stop = count
        if run + 1 < RUNS:
            stop = gl.minimum(gl.load(runs_ptr + 2 * run + 2), count)
        length = gl.maximum(stop - gl.load(runs_ptr + 2 * run), 0)
        inside = gl.maximum(p - gl.load(runs_ptr + 2 * run + 1), 0)
        total += gl.minimum(inside, length)
    return total


# What a tile sees


@gluon.jit
def visible_keys(p, b, N, mask, cfg: gl.constexpr):
    """Keys [start, stop) of the N keys of sequence `b` that a query at position `p` sees:
    `masks.Visibility.key_range`.
    """
    start = p * 0
    stop = start + N
    if cfg.HAS_LEFT:
        start = gl.maximum(start, keys_before(p - mask.left, b, N, mask, cfg))
    if cfg.HAS_RIGHT:
        stop = gl.minimum(stop, keys_before(p + mask.right + 1, b, N, mask, cfg))
    if cfg.HAS_CHUNK:
        chunk = floor_to(p, mask.chunk)
        start = gl.maximum(start, keys_before(chunk, b, N, mask, cfg))
        stop = gl.minimum(stop, keys_before(chunk + mask.chunk, b, N, mask, cfg))
    return start, stop


@gluon.jit
def first_seen_key(b, M, N, mask, cfg: gl.constexpr):
    """The number of keys of sequence `b` that come before those that some query sees by the mask
    rules.
    """
    zero = M * 0
    start, _ = visible_keys(query_positions(zero, N - M, b, mask, cfg), b, N, mask, cfg)
    return start


@gluon.jit
def marks_of(b, h, sizes, mask):
    """The pointer to the marks of the keys of a head that no query sees: see `Kept`."""
    number = b * mask.blocks.batch_step + h * mask.blocks.head_step
    return mask.blocks.unseen + number.to(gl.int64) * (sizes.N + SPARE_MARKS)


# Masks as spans with one interval for each row, in a dense batch (cfg.HAS_SPAN): they act like a
# window whose bounds differ from row to row. Every role reads the bounds of its tile, so no kernel
# runs before the forward, and each consumer visits only the blocks that its own rows see. All other
# spans need lists (`span_lists.py`).


@gluon.jit
def seen_by_spans(rows, start, stop, b, h, start_q, M, spans):
    """Those of the keys [start, stop) of each row that its interval contains. `spans` are
    `span_lists.SpanData`.
    """
    b, h, row = b.to(gl.int64), h.to(gl.int64), (start_q + rows).to(gl.int64)
    starts = spans.starts + b * spans.starts_batch + h * spans.starts_head
    stops = spans.stops + b * spans.stops_batch + h * spans.stops_head
    inside = rows < M
    # (rows,)
    own_start = gl.load(starts + row * spans.starts_row, mask=inside, other=0)
    own_stop = gl.load(stops + row * spans.stops_row, mask=inside, other=0)
    # At least 0: an interval may end anywhere, and the difference to a key must not overflow.
    return gl.maximum(start, own_start), gl.maximum(gl.minimum(stop, own_stop), 0)


@gluon.jit
def extremes(start, stop, inside, N):
    """(start, stop) of the keys that some row sees, start >= stop if none, and of those that every
    row sees. Only rows `inside` count, and a row that sees nothing sees no part of N keys.
    """
    sees = inside & (start < stop)
    least_start = gl.min(gl.where(sees, start, N), 0)
    greatest_stop = gl.max(gl.where(sees, stop, 0), 0)
    greatest_start = gl.max(gl.where(sees, start, gl.where(inside, N, 0)), 0)
    least_stop = gl.min(gl.where(sees, stop, gl.where(inside, 0, N)), 0)
    return (least_start, greatest_stop), (greatest_start, least_stop)


@gluon.jit
def seen_by(rows, b, h, start_q, M, N, mask, cfg: gl.constexpr):
    """Keys [start, stop) that the queries `rows` of a sequence see: by the mask rules and, with
    cfg.HAS_SPAN, by the spans.
    """
    # N - M first: otherwise the assembler moves registers in the loops of packed batches.
    p = query_positions(rows, rows + (N - M), b, mask, cfg)
    start, stop = visible_keys(p, b, N, mask, cfg)
    if cfg.HAS_SPAN:
        start, stop = seen_by_spans(rows, start, stop, b, h, start_q, M, mask.blocks)
    return start, stop


@gluon.jit
def keys_of_tile(b, h, m0, start_q, M, N, mask, cfg: gl.constexpr):
    """The keys [start, stop) that some row of a tile sees, in a role of one warp; the first key if
    none.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    STEPS: gl.constexpr = cfg.BLOCK_M // 32
    lane = gl.arange(0, 32, layout=LANES)
    start, stop = lane * 0 + N, lane * 0
    # Not unrolled: with more registers here, the assembler moves those of the consumers' loops.
    for step in range(STEPS):
        rows = m0 + step * 32 + lane
        own_start, own_stop = seen_by(rows, b, h, start_q, M, N, mask, cfg)
        sees = (rows < M) & (own_start < own_stop)
        start = gl.where(sees, gl.minimum(start, own_start), start)
        stop = gl.where(sees, gl.maximum(stop, own_stop), stop)
    start, stop = gl.min(start, 0), gl.max(stop, 0)
    is_empty = start >= stop
    return gl.where(is_empty, 0, start), gl.where(is_empty, 1, stop)


@gluon.jit
def keys_of_consumer(first, work, mask, cfg: gl.constexpr):
    """The keys that some row of a consumer sees, and those that every row sees, counted from
    `work.first_key`.
    """
    rows = first + consumer_rows(CONSUMER_WARPS)
    start, stop = seen_by(rows, work.b, work.h, work.start_q, work.M, work.N, mask, cfg)
    start, stop = start - work.first_key, stop - work.first_key
    return extremes(start, stop, rows < work.M, work.N)


@gluon.jit
def consumer_rows(WARPS: gl.constexpr):
    """The numbers of a consumer's rows, all of them in each of WARPS warps."""
    return gl.arange(0, CONSUMER_ROWS, layout=gl.BlockedLayout([2], [32], [WARPS], [0]))


@gluon.jit
def work_of(tile, sizes, at, mask, cfg: gl.constexpr):
    """The work of a tile index, without blocks of keys if there is no such tile.

    Entry (b, n) of the list of tiles stands for the n-th run of `heads` tiles of sequence b, in its
    swizzled order.
    """
    exists = tile < sizes.tiles
    if cfg.IS_RAGGED:
        tile = gl.where(exists, tile, 0)
        entry = at.tiles + 2 * (tile // sizes.heads)
        b, run = gl.load(entry), gl.load(entry + 1)
        exists = exists & (run >= 0)
        start_q, M = sequence(b, at.cu_seqlens_q, at.seqused_q, sizes.total_q, sizes.M)
        m_tiles = gl.maximum(gl.cdiv(M, cfg.BLOCK_M), 1)
        number = gl.where(exists, run * sizes.heads + tile % sizes.heads, 0)
        m, h = swizzled_order(number, m_tiles, sizes.heads, sizes.swizzle)
    else:
        m_tiles = gl.cdiv(sizes.M, cfg.BLOCK_M)
        number = gl.where(exists, tile, 0)
        m, bh = swizzled_order(number, m_tiles, sizes.B * sizes.heads, sizes.swizzle)
        b, h = bh // sizes.heads, bh % sizes.heads
        start_q, M = sequence(b, at.cu_seqlens_q, at.seqused_q, sizes.total_q, sizes.M)
    # LPT order: the longest KV loops first
    if cfg.HAS_BLOCK_MASK:  # spans have no such order
        m = gl.load(mask.blocks.order + list_of(b, h, 0, sizes, mask, cfg) + m)
    elif cfg.HAS_RIGHT or cfg.HAS_CHUNK or cfg.HAS_LISTS or cfg.HAS_SPAN:
        m = m_tiles - 1 - m
    m0 = m * cfg.BLOCK_M
    start_k, N = sequence(b, at.cu_seqlens_k, at.seqused_k, sizes.total_k, sizes.N)
    if at.leftpad_k is not None:
        pad = gl.minimum(gl.maximum(gl.load(at.leftpad_k + b), 0), N)
        start_k, N = start_k + pad, N - pad
    first_key = m * 0
    if cfg.HAS_LISTS:
        begin = m * 0
        end = gl.load(mask.blocks.counts + 2 * list_of(b, h, m0, sizes, mask, cfg) + 1)
    elif cfg.HAS_SPAN:
        first_key, stop = keys_of_tile(b, h, m0, start_q, M, N, mask, cfg)
        if cfg.HAS_DROPOUT:  # which draws for whole blocks of keys
            first_key -= first_key % BLOCK_KEYS
        begin, end = m * 0, gl.cdiv(stop - first_key, cfg.BLOCK_N)
    else:
        begin, end = blocks_of(m0, gl.minimum(m0 + cfg.BLOCK_M, M) - 1, b, M, N, mask, cfg)
    end = gl.where(exists, end, begin)
    return Work(b, h, m0, start_q, M, N, begin, end, start_k, first_key)


@gluon.jit
def list_of(b, h, m0, sizes, mask, cfg: gl.constexpr):
    """The index of the list of blocks for the tile of queries from row `m0`."""
    number = b * mask.blocks.batch_step + h * mask.blocks.head_step
    return number * gl.cdiv(sizes.M, cfg.BLOCK_M) + m0 // cfg.BLOCK_M


@gluon.constexpr_function
def entry_size(cfg):
    """The numbers of an entry of a list: the first key of a block and, of a block mask, its tile of
    bits.
    """
    return 2 if cfg.HAS_BLOCK_MASK else 1


@gluon.jit
def first_entry(number, sizes, mask, cfg: gl.constexpr):
    """The pointer to the first entry of a list."""
    SIZE: gl.constexpr = entry_size(cfg)
    return mask.blocks.entries + SIZE * number.to(gl.int64) * gl.cdiv(sizes.N, cfg.BLOCK_N)


@gluon.jit
def key_of_block(block, listed, cfg: gl.constexpr):
    """The first key of a block of the tile, counted from `work.first_key`; with a list, of its
    entry `block`.
    """
    n0 = block * cfg.BLOCK_N
    if cfg.HAS_LISTS:
        n0 = gl.load(listed.entries + entry_size(cfg) * block)
    return n0


@gluon.jit
def put_work(queue, i, work, cfg: gl.constexpr):
    """Send the next tile to the other roles, which saves them the divisions."""
    begin = work.begin
    if cfg.HAS_SPAN:  # its blocks begin with number 0
        begin = work.first_key
    put(queue, i, (
        work.b, work.h, work.m0, work.start_q, work.M, work.N, begin, work.end, work.start_k,
    ))  # fmt: skip


@gluon.jit
def read_work(queue, i, sizes, WARPS: gl.constexpr, cfg: gl.constexpr):
    """Read the work of `put_work` in a role of WARPS warps; numbers that the compiler knows need no
    registers.
    """
    W: gl.constexpr = WARPS
    begin, M, N = 0 * sizes.M, sizes.M, sizes.N
    start_q, start_k, first_key = begin, begin, begin
    if cfg.IS_RAGGED:
        start_q = number_of(queue, i, 3, W)
        M = number_of(queue, i, 4, W)
        N = number_of(queue, i, 5, W)
        start_k = number_of(queue, i, 8, W)
    if cfg.HAS_SPAN:
        first_key = number_of(queue, i, 6, W)
    elif cfg.HAS_LEFT or cfg.HAS_CHUNK:
        begin = number_of(queue, i, 6, W)
    b, h = number_of(queue, i, 0, W), number_of(queue, i, 1, W)
    m0, end = number_of(queue, i, 2, W), number_of(queue, i, 7, W)
    return Work(b, h, m0, start_q, M, N, begin, end, start_k, first_key)


@gluon.jit
def blocks_of(first, last, b, M, N, mask, cfg: gl.constexpr):
    """Blocks of keys [begin, end) that some row of [first, last] sees; the first block if none."""
    p = query_positions(first, first + N - M, b, mask, cfg)
    start, _ = visible_keys(p, b, N, mask, cfg)
    p = query_positions(last, last + N - M, b, mask, cfg)
    _, stop = visible_keys(p, b, N, mask, cfg)
    seen = (first <= last) & (start < stop)
    begin = gl.where(seen, start // cfg.BLOCK_N, 0)
    end = gl.where(seen, gl.cdiv(stop, cfg.BLOCK_N), 1)
    return begin, end


@gluon.jit
def own_blocks(first, work, sizes, mask, cfg: gl.constexpr):
    """The blocks of keys (begin, full_begin, full_end, end) of the tile for the rows of a consumer
    from row `first`: some row sees a key of [begin, end), which is at least one block, or two where
    the step after the first one is peeled off the loop, and every row sees [full_begin, full_end)
    completely. With a list, [begin, end) are all its entries.
    """
    LEAST: gl.constexpr = 1 if cfg.LAST_KEYS == cfg.BLOCK_N else 2
    last = gl.minimum(first + CONSUMER_ROWS, work.M) - 1
    begin, end = work.begin, work.end
    if cfg.HAS_LISTS:
        number = list_of(work.b, work.h, work.m0, sizes, mask, cfg)
        full_begin, full_end = begin, gl.load(mask.blocks.counts + 2 * number)
    else:
        if cfg.HAS_SPAN:
            some, every = keys_of_consumer(first, work, mask, cfg)
            begin, end = some[0] // cfg.BLOCK_N, gl.cdiv(some[1], cfg.BLOCK_N)
            start, stop = every
        else:
            begin, end = blocks_of(first, last, work.b, work.M, work.N, mask, cfg)
            shift = work.N - work.M
            p = query_positions(first, first + shift, work.b, mask, cfg)
            _, stop = visible_keys(p, work.b, work.N, mask, cfg)
            p = query_positions(last, last + shift, work.b, mask, cfg)
            start, _ = visible_keys(p, work.b, work.N, mask, cfg)
        begin = gl.minimum(gl.maximum(begin, work.begin), work.end - LEAST)
        end = gl.minimum(gl.maximum(end, begin + LEAST), work.end)
        full_end = gl.minimum(gl.maximum(stop // cfg.BLOCK_N, begin), end)
        full_begin = gl.minimum(gl.maximum(gl.cdiv(start, cfg.BLOCK_N), begin), full_end)
    return begin, full_begin, full_end, end


@gluon.jit
def visited_block(j, work, cfg: gl.constexpr):
    """The block of step `j` of the KV loop: from the last to the first, or the other way round."""
    block = work.end - 1 - j
    if cfg.IS_ASCENDING:
        block = work.begin + j
    return block


@gluon.jit
def blocks_before(block, work, cfg: gl.constexpr):
    """The number of blocks of the tile that are visited before `block`."""
    count = work.end - 1 - block
    if cfg.IS_ASCENDING:
        count = block - work.begin
    return count


@gluon.jit
def blocks_after(block, work, cfg: gl.constexpr):
    """The number of blocks of the tile that are visited after `block`."""
    return work.end - work.begin - 1 - blocks_before(block, work, cfg)


@gluon.jit
def next_number(counter_ptr):
    """A tile index that no program has taken yet; the first indices are the program ids."""
    return gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)


@gluon.jit
def retire(counter_ptr):
    """The last program to arrive resets both counters for the next launch."""
    done = gl.atomic_add(counter_ptr + 1, 1)
    if done == gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)


@gluon.jit
def batch_of(b, cu_seqlens):
    """The index of sequence `b` in the first dimension, which packed sequences share."""
    batch = b
    if cu_seqlens is not None:
        batch = b * 0
    return batch


# Keys that no query of their sequence sees, and queries that see no key, may hold anything.
#
# Their weight is zero, but zero times NaN is NaN. So their rows in shared memory are zeroed before
# a product sums over them: in the forward those of V, in the backward those of K, V, Q and dO. The
# forward also clears rows past the end of a packed sequence, which belong to another one or to
# none; in the backward, TMA does not load them (`pipeline.box_at`). Consumers that share a tile
# write the same values, so they need not wait for each other.
#
# The mask rules hide the first keys of a sequence, or its first queries see nothing. A block mask
# and spans may hide any key: before the kernel, each key gets a mark. A query that sees no key has
# the log-sum-exp +inf in the backward.


SPARE_MARKS = gl.constexpr(block_mask.SPARE_MARKS)


class Kept(NamedTuple):
    """The rows of a tile that are not cleared. A constant KIND says which they are:

    - "stop": those before `stop`;
    - "range": those of [first, stop);
    - "marks": those before `stop` whose mark, an int32 at the pointer `by`, is 0;
    - "lse": those before `stop` whose log-sum-exp, in `by` (1, rows) in shared memory, is not +inf.
    """

    first: Any
    stop: Any
    by: Any


@gluon.constexpr_function
def kind_of_keys(cfg):
    """How a kernel knows the keys that some query sees."""
    kind = "stop"
    if cfg.HAS_HIDDEN_KEYS:
        kind = "marks" if cfg.HAS_LISTS or getattr(cfg, "HAS_SPAN", False) else "range"
    return kind


@gluon.constexpr_function
def kind_of_rows(cfg):
    """How the backward knows the queries that see some key."""
    kind = "stop"
    if cfg.HAS_DEAD_ROWS:
        kind = "lse" if cfg.HAS_LISTS else "range"
    return kind


@gluon.constexpr_function
def every_warp(rows):
    """One number for each row, all of them in each warp: a reduction needs no shared memory."""
    return gl.BlockedLayout([rows // 32], [32], [4], [0])


@gluon.jit
def has_cleared(kept, KIND: gl.constexpr, ROWS: gl.constexpr):
    """Whether some of ROWS rows are cleared."""
    found = kept.stop < ROWS
    if KIND == "range":
        found = found | (kept.first > 0)
    elif KIND == "marks":
        row = gl.arange(0, ROWS, layout=every_warp(ROWS))
        found = found | (gl.max(gl.load(kept.by + row), 0) > 0)
    elif KIND == "lse":
        found = found | (gl.max(numbers(kept.by, ROWS).load(every_warp(ROWS)), 0) == float("inf"))
    return found


@gluon.jit
def numbers(slot, ROWS: gl.constexpr):
    """Statistics (1, ROWS) in shared memory as (ROWS,)."""
    return recast(slot, gl.float32, [ROWS], shared_value())


@gluon.jit
def is_kept(i, kept, KIND: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Which of the COUNT rows from `i * COUNT` on are kept."""
    # (COUNT,)
    row = i * COUNT + gl.arange(0, COUNT, layout=LAYOUT)
    keep = row < kept.stop
    if KIND == "range":
        keep = keep & (row >= kept.first)
    elif KIND == "marks":
        keep = keep & (gl.load(kept.by + row) == 0)
    elif KIND == "lse":
        shape: gl.constexpr = [kept.by.shape[1] // COUNT, COUNT]
        lse = recast(kept.by, gl.float32, shape, shared_value()).index(i).load(LAYOUT)
        keep = keep & (lse != float("inf"))
    return keep


@gluon.jit
def clear_rows(x, kept, KIND: gl.constexpr, IS_UNROLLED: gl.constexpr = False):
    """Zero the rows of the tile `x` (rows, columns) that are not kept.

    Unless the loop IS_UNROLLED, the compiler does not know its length: registers for many rows at
    once would make the loop over blocks spill, although few blocks need them.
    """
    WIDTH: gl.constexpr = x.shape[1] if x.shape[1] < 64 else 64
    LAYOUT: gl.constexpr = rows_of_heads(WIDTH, CONSUMER_WARPS)
    COUNT: gl.constexpr = 1024 // WIDTH  # rows at a time: 16 bytes for each thread
    PARTS: gl.constexpr = x.shape[0] // COUNT
    PIECES: gl.constexpr = x.shape[1] // WIDTH
    SHARED: gl.constexpr = shared_rows(WIDTH, rank=2)
    # Shared memory has 64 columns of all rows, then the next ones.
    pieces = recast(x, x.dtype, [PIECES, x.shape[0], WIDTH], SHARED)
    first = 0 if IS_UNROLLED else opaque_zero(kept.stop)
    for i in range(first, PARTS * PIECES):
        parts = recast(pieces.index(i // PARTS), x.dtype, [PARTS, COUNT, WIDTH], SHARED)
        part = parts.index(i % PARTS)
        # (COUNT, WIDTH)
        old = part.load(LAYOUT)
        keep = is_kept(i % PARTS, kept, KIND, COUNT, gl.SliceLayout(1, LAYOUT))
        part.store(gl.where(keep[:, None], old, gl.zeros_like(old)))


@gluon.jit
def clear_numbers(slot, kept, KIND: gl.constexpr, ROWS: gl.constexpr):
    """Zero the statistics of the rows that are not kept."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [CONSUMER_WARPS], [0])
    own = numbers(slot, ROWS)
    # (ROWS,)
    old = own.load(LAYOUT)
    keep = is_kept(0, kept, KIND, ROWS, LAYOUT)
    own.store(gl.where(keep, old, gl.zeros_like(old)))


# Division by a number that the host knows: a multiplication and a shift (Granlund and Montgomery
# 1994) instead of the 40 dependent instructions of a division.


def reciprocal(divisor: int) -> int:
    """What a kernel needs in order to divide by `divisor`, from 1 to 2**31 - 1, as a 64-bit
    argument.

    The low 32 bits are 2**shift / divisor, rounded up; the other bits are the shift. The shift is
    so large that the rounding changes no quotient of a number below 2**31, and so small that the
    product of such a number and the low bits has 63 bits.
    """
    shift = 31 + (divisor - 1).bit_length()
    return shift << 32 | -(-(2**shift) // divisor)


@gluon.jit
def divide(x, divisor, by):
    """(x // divisor, x % divisor) for 0 <= x < 2**31; `by` is the `reciprocal` of the divisor."""
    quotient = ((x.to(gl.int64) * (by & 0xFFFFFFFF)) >> (by >> 32)).to(gl.int32)
    return quotient, x - quotient * divisor


# Triton specialises the numbers in a tuple, even if the kernel forbids it for its parameters: it
# would compile other kernels for 1 and for multiples of 16.


def unspecialized(x: int) -> int:
    """An odd number, at least 3, that stands for `x`, from 0 to 2**62; see `restored`."""
    return 2 * x + 3


@gluon.jit
def restored(x):
    """The number from which `unspecialized` made `x`."""
    return (x >> 1) - 1


# The order of the tiles of a packed batch. The device makes it, since the host knows no lengths.
#
# A list has an entry for each tile of BLOCK rows that exists: its sequence, and its index there. An
# entry stands for as many programs as there are heads, times the parts of a tile. The list has room
# for the tiles of any batch of that size (`most_tiles`); the entries after the last tile have index
# -1.
#
# Long loops come first. A tile loops over the other side of its sequence; the sequence with the
# longest other side comes first. The tiles of a sequence follow from the first to the last: under a
# causal mask, from the longest loop to the shortest. If several sequences run at the same time
# (`together`), their tiles are merged.
#
# Every sequence counts the tiles before its own: neither a sort nor a second launch is needed.
# Every entry is written even if the lengths are wrong; tiles that do not fit are dropped from the
# end.
#
# The kernels write only the rows of sequences. The kernel that makes a list also fills the spare
# rows, which belong to no sequence: those before, between and after the sequences. So no launch has
# to fill the whole tensor. Most batches have none.


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


# The kernel before the forward if sequences can be shorter than the tensors: it lists the tiles
# that exist and fills the spare rows of the outputs.


@triton.jit(do_not_specialize=[*NUMBERS, "entries", "together"])
def tile_list_kernel(
    out_ptr, lse_ptr, entries, together, at, B, M, N, total_q, total_k, heads,
    BLOCK_M: tl.constexpr, DV: tl.constexpr, IS_PACKED: tl.constexpr,
):  # fmt: skip
    """List the tiles of a sequence, and fill the rows after it: out (rows, heads, DV) with zeros,
    the log-sum-exp with -inf; unless they are None, because the caller has filled them.
    """
    let_next_kernel_start()
    b, part = tl.program_id(0), tl.program_id(1)
    parts = tl.num_programs(1)
    queries = Side(at.cu_seqlens_q, at.seqused_q, total_q, M)
    keys = Side(at.cu_seqlens_k, at.seqused_k, total_k, N)
    if part == 0:
        list_tiles(b, at.tiles, entries, together, B, queries, keys, BLOCK_M)
    _, count = rows_of(b, queries)
    rows = total_q
    if not IS_PACKED:
        rows = M
        out_ptr += b.to(tl.int64) * M * heads * DV
        lse_ptr += b.to(tl.int64) * M * heads
    if out_ptr is not None:
        fill_spare_rows(out_ptr, 0.0, 1, 0, heads * DV, b, count, part, parts, B, queries)
        fill_spare_rows(lse_ptr, -float("inf"), heads, rows, 1, b, count, part, parts, B, queries)
