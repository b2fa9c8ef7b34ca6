"""The tile scheduler: which tile of queries is next, and which keys it sees.

Programs are persistent, one for each multiprocessor. The producer of a program, or its scheduler,
takes the index of its next tile from a counter that all programs share, and sends the tile to the
other roles. A program that finishes early takes more tiles, which balances long and short tiles.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .channels import number_of, put
from .intrinsics import aggregate
from .positions import keys_before, query_positions

WORK_NUMBERS = gl.constexpr(9)  # fields of `Work`


# Arguments that change with lengths; Triton must not specialise them.
NUMBERS = (
    "B", "M", "N", "total_q", "total_k", "heads", "group", "swizzle", "tiles", "left", "right",
    "chunk", "alibi_batch",
)  # fmt: skip


class Sequences(NamedTuple):
    """What is known of the sequences in tensors; `Sizes` has the bounds."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    q_runs: Tensor | None = None  # (B, cfg.RUNS, 2), see `positions.py`
    k_runs: Tensor | None = None
    tiles: Tensor | None = None  # the list of `packing_order` with cfg.IS_RAGGED, in the forward


class Sizes(NamedTuple):
    """Bounds of all sequences, and the order of the tiles."""

    B: Any
    M: Any
    N: Any
    total_q: Any  # rows of a packed q
    total_k: Any
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

    @gluon.constexpr_function
    def __init__(self, b, h, m0, start_q, M, N, begin, end, start_k):
        self.b = b
        self.h = h
        self.m0 = m0
        self.start_q = start_q
        self.M = M
        self.N = N
        self.begin = begin
        self.end = end
        self.start_k = start_k


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
    elif cfg.HAS_RIGHT or cfg.HAS_CHUNK or cfg.HAS_LISTS:
        m = m_tiles - 1 - m
    m0 = m * cfg.BLOCK_M
    start_k, N = sequence(b, at.cu_seqlens_k, at.seqused_k, sizes.total_k, sizes.N)
    if cfg.HAS_LISTS:
        begin = m * 0
        end = gl.load(mask.blocks.counts + 2 * list_of(b, h, m0, sizes, mask, cfg) + 1)
    else:
        begin, end = blocks_of(m0, gl.minimum(m0 + cfg.BLOCK_M, M) - 1, b, M, N, mask, cfg)
    end = gl.where(exists, end, begin)
    return Work(b, h, m0, start_q, M, N, begin, end, start_k)


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
def first_key(block, listed, cfg: gl.constexpr):
    """The first key of a block of the tile; with a list, of its entry `block`."""
    n0 = block * cfg.BLOCK_N
    if cfg.HAS_LISTS:
        n0 = gl.load(listed.entries + entry_size(cfg) * block)
    return n0


@gluon.jit
def put_work(queue, i, work):
    """Send the next tile to the other roles, which saves them the divisions."""
    put(queue, i, (
        work.b, work.h, work.m0, work.start_q, work.M, work.N, work.begin, work.end, work.start_k,
    ))  # fmt: skip


@gluon.jit
def read_work(queue, i, sizes, WARPS: gl.constexpr, cfg: gl.constexpr):
    """Read the work of `put_work` in a role of WARPS warps; numbers that the compiler knows need no
    registers.
    """
    W: gl.constexpr = WARPS
    begin, M, N = 0 * sizes.M, sizes.M, sizes.N
    start_q, start_k = begin, begin
    if cfg.IS_RAGGED:
        start_q = number_of(queue, i, 3, W)
        M = number_of(queue, i, 4, W)
        N = number_of(queue, i, 5, W)
        start_k = number_of(queue, i, 8, W)
    if cfg.HAS_LEFT or cfg.HAS_CHUNK:
        begin = number_of(queue, i, 6, W)
    b, h = number_of(queue, i, 0, W), number_of(queue, i, 1, W)
    m0, end = number_of(queue, i, 2, W), number_of(queue, i, 7, W)
    return Work(b, h, m0, start_q, M, N, begin, end, start_k)


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
def own_blocks(first, last, work, mask, cfg: gl.constexpr):
    """The blocks of keys [begin, end) of the tile that some row of [first, last] sees; at least
    one block. With a list, all its entries.
    """
    begin, end = work.begin, work.end
    if not cfg.HAS_LISTS:
        begin, end = blocks_of(first, last, work.b, work.M, work.N, mask, cfg)
        begin = gl.minimum(gl.maximum(begin, work.begin), work.end - 1)
        end = gl.minimum(gl.maximum(end, begin + 1), work.end)
    return begin, end


@gluon.jit
def full_blocks(first, last, begin, end, work, sizes, mask, cfg: gl.constexpr):
    """The blocks of [begin, end) that every row of [first, last] sees completely."""
    if cfg.HAS_LISTS:
        number = list_of(work.b, work.h, work.m0, sizes, mask, cfg)
        full_begin, full_end = begin, gl.load(mask.blocks.counts + 2 * number)
    else:
        shift = work.N - work.M
        p = query_positions(first, first + shift, work.b, mask, cfg)
        _, stop = visible_keys(p, work.b, work.N, mask, cfg)
        p = query_positions(last, last + shift, work.b, mask, cfg)
        start, _ = visible_keys(p, work.b, work.N, mask, cfg)
        full_end = gl.minimum(gl.maximum(stop // cfg.BLOCK_N, begin), end)
        full_begin = gl.minimum(gl.maximum(gl.cdiv(start, cfg.BLOCK_N), begin), full_end)
    return full_begin, full_end


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
