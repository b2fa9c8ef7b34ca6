"""Which tile of keys a program has, and which blocks of queries see it.

The steps of a tile are its blocks of queries, one query head of the group after the other. With
cfg.IS_PARTED, several programs share a tile: each has a range of the steps, a part. The order of
the programs treats a part of a key head like a head of its own, because programs that pass over
other query heads share nothing in the cache.

The float32 workspace of dQ and the row statistics consist of whole blocks of BLOCK_M rows: every
sequence starts a new block, and `blocks_before` counts the blocks before it.

Under a block mask, the blocks that see a tile are a list (`shared/block_lists.py`). Loops then
count positions in this list instead of blocks, and `block_at` reads the block.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared.pipeline import aggregate, number_of, opaque_zero, put
from ..shared.schedule import (
    Kept,
    divide,
    first_seen_key,
    floor_to,
    key_positions,
    kind_of_keys,
    marks_of,
    queries_before,
    queries_between,
    reciprocal,
    restored,
    sequence,
    swizzled_order,
    unspecialized,
)


@gluon.constexpr_function
def entry_size(cfg):
    """The numbers of an entry of a list: the block of queries and, of a block mask, its tile of
    bits and how many tiles add to dQ before this one.
    """
    return 3 if cfg.HAS_BLOCK_MASK else 1


class KeyOrder(NamedTuple):
    """Where the programs find their tiles."""

    counter: Any  # number of tiles that have started, for ordered additions and persistent programs
    tiles: Any  # the list of `packing_order`, for packed batches


class OrderReciprocals(NamedTuple):
    """Reciprocals of what `swizzled_order` divides by; all fields are `unspecialized`."""

    missing: Any  # heads that the first group of the swizzle lacks
    by_group: Any  # of the number of tiles of a group of `swizzle` heads
    by_swizzle: Any
    by_first: Any  # of the number of heads of the first group
    by_heads: Any  # of `program_heads`


def order_reciprocals(tiles: int, sequences: int, heads: int, swizzle: int) -> OrderReciprocals:
    """The reciprocals for `tiles` tiles of each of the `program_heads` of a dense batch."""
    missing = -sequences * heads % swizzle
    divisors = (max(tiles, 1) * swizzle, swizzle, swizzle - missing, heads)
    return OrderReciprocals(*map(unspecialized, (missing, *map(reciprocal, divisors))))


class PhaseReciprocals(NamedTuple):
    """What `phased_order` divides by; all fields are `unspecialized`."""

    phases: Any  # 1 or 2
    length: Any  # tiles of a head in one phase
    by_section: Any  # of the number of programs of a section
    by_step: Any  # of `swizzle` programs for each phase
    by_swizzle: Any
    by_heads: Any  # of `program_heads`


def phase_reciprocals(tiles: int, heads: int, phases: int, swizzle: int) -> PhaseReciprocals:
    """The reciprocals for `tiles` tiles of each head; a sequence has `heads` `program_heads`."""
    length, step = max(-(-tiles // phases), 1), phases * swizzle
    reciprocals = map(reciprocal, (length * step, step, swizzle, heads))
    return PhaseReciprocals(*map(unspecialized, (phases, length, *reciprocals)))


def phased_programs(tiles: int, together: int, phases: int, swizzle: int) -> int:
    """The number of programs of `phased_order` for `together` heads of the batch."""
    sections = -(-together // swizzle) + phases - 1
    return sections * phases * swizzle * -(-tiles // phases)


@gluon.jit
def program_heads(sizes, cfg: gl.constexpr):
    """The heads of `swizzled_order`: the parts of each key head, one key head after the other."""
    heads = sizes.heads
    if cfg.IS_PARTED:
        heads = heads * sizes.parts
    return heads


@gluon.jit
def dense_order(number, heads, sizes, BLOCK_N: gl.constexpr):
    """(tile in its head, sequence, head) of the number of a program: `swizzled_order` without
    divisions, for which every role of a program would wait before it starts.
    """
    # Without this zero, the compiler decodes the numbers once for all roles, which then read them
    # from the stack.
    zero = opaque_zero(number)
    by = sizes.reciprocals
    tiles = gl.cdiv(sizes.N + zero, BLOCK_N)
    missing, by_group = restored(by.missing + zero), restored(by.by_group + zero)
    group, _ = divide(number + missing * tiles, tiles * sizes.swizzle, by_group)
    start = group * sizes.swizzle - missing
    is_first = start < 0
    width = sizes.swizzle - gl.where(is_first, missing, 0)
    by_width = restored(gl.where(is_first, by.by_first, by.by_swizzle) + zero)
    start = gl.maximum(start, 0)
    n, head = divide(number - start * tiles, width, by_width)
    b, head = divide(start + head, heads, restored(by.by_heads + zero))
    return n, b, head


@gluon.jit
def phased_order(number, sizes, cfg: gl.constexpr):
    """(tile in its head, head of the batch) of the number of a program, in phases: see
    `plan.phases_of`. A program without a tile gets the index after a head's last tile, where there
    are no keys.

    Groups of `swizzle` heads follow each other. The tiles of each head are cut into `phases` equal
    ranges. Section s of the programs has the first range of group s and the second one of group
    s - 1; a step of it has a tile of each head of both. Some of these tiles and heads do not exist.

    A head's tiles have ascending numbers: within a range, a tile is one step after the previous
    one; the second range is one section after the first. `dq.acquire_semaphore` needs this.
    """
    by = sizes.reciprocals
    phases, length = restored(by.phases).to(gl.int32), restored(by.length).to(gl.int32)
    step = phases * sizes.swizzle
    section, index = divide(number, length * step, restored(by.by_section))
    n, index = divide(index, step, restored(by.by_step))
    phase, head = divide(index, sizes.swizzle, restored(by.by_swizzle))
    n += phase * length
    head += (section - phase) * sizes.swizzle
    exists = (head >= 0) & (head < sizes.B * program_heads(sizes, cfg))
    return gl.where(exists, n, gl.cdiv(sizes.N, cfg.BLOCK_N)), gl.where(exists, head, 0)


@aggregate
class KeyWork:
    """A tile of keys of one key head, and the blocks of queries that see some key of it."""

    b: gl.tensor
    kv_head: gl.tensor
    part: gl.tensor  # index of the program among those of the tile
    n: gl.tensor  # index of the tile in its sequence
    n0: gl.tensor  # first key of the tile
    start_q: gl.tensor  # first row of the sequence
    M: gl.tensor
    start_k: gl.tensor
    N: gl.tensor
    first_block: gl.tensor  # first block of the sequence in the workspace, of head 0
    before: gl.tensor  # `end` of the previous tile of keys
    begin: gl.tensor
    full_begin: gl.tensor  # blocks [full_begin, full_end) see every key of the tile
    full_end: gl.tensor
    end: gl.tensor
    first_step: gl.tensor  # steps [first_step, stop_step) of the tile are this program's
    stop_step: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, b, kv_head, part, n, n0, start_q, M, start_k, N, first_block, before, begin,
        full_begin, full_end, end, first_step, stop_step,
    ):  # fmt: skip
        self.b = b
        self.kv_head = kv_head
        self.part = part
        self.n = n
        self.n0 = n0
        self.start_q = start_q
        self.M = M
        self.start_k = start_k
        self.N = N
        self.first_block = first_block
        self.before = before
        self.begin = begin
        self.full_begin = full_begin
        self.full_end = full_end
        self.end = end
        self.first_step = first_step
        self.stop_step = stop_step


class Tile(NamedTuple):
    """The number of a program; in packed batches, the sequence and the index there of its tile. In
    phases, the head of the batch and the index there.
    """

    number: Any
    b: Any
    n: Any


@gluon.jit
def listed_tile(number, order, sizes, cfg: gl.constexpr):
    """The tile of a program, read once for all roles."""
    b = number * 0
    n = b
    if cfg.IS_PACKED:
        entry = order.tiles + 2 * (number // program_heads(sizes, cfg))
        b = gl.load(entry)
        n = gl.load(entry + 1)
    elif cfg.HAS_PHASES:
        n, number = phased_order(number, sizes, cfg)
    return Tile(number, b, n)


@gluon.jit
def key_work(tile, sizes, at, mask, cfg: gl.constexpr):
    """The work of a program, in the order of the head swizzle or of phases. The first keys come
    first, because under a causal mask most queries see them (LPT order). In packed batches the
    swizzle stays within a sequence: the programs of entry (b, n) take the n-th run of
    `program_heads` numbers in its swizzled order. The tile has no blocks if the program has no
    steps.
    """
    b, index = tile.b, tile.number
    heads = program_heads(sizes, cfg)
    if cfg.HAS_BLOCK_MASK:
        entry = mask.blocks.order + 4 * index
        b, h, n = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
        steps = gl.load(entry + 3)
    elif cfg.HAS_PHASES:
        n = tile.n
        zero = opaque_zero(index)  # as in `dense_order`
        b, h = divide(index + zero, heads, restored(sizes.reciprocals.by_heads + zero))
    elif not cfg.IS_PACKED:
        n, b, h = dense_order(index, heads, sizes, cfg.BLOCK_N)
    start_q, M = sequence(b, at.cu_seqlens_q, at.seqused_q, sizes.total_q, sizes.M)
    start_k, N = sequence(b, at.cu_seqlens_k, at.seqused_k, sizes.total_k, sizes.N)
    if cfg.IS_PACKED:
        n_tiles = gl.maximum(gl.cdiv(N, cfg.BLOCK_N), 1)
        number = gl.maximum(tile.n, 0) * heads + index % heads
        n, h = swizzled_order(number, n_tiles, heads, sizes.swizzle)
        n = gl.where(tile.n < 0, n_tiles, n)  # no tile, therefore no key
    part = index * 0
    if cfg.IS_PARTED:
        part = h % sizes.parts
        h = h // sizes.parts
    n0 = n * cfg.BLOCK_N
    _, _, _, before = blocks_seeing(n0 - cfg.BLOCK_N, b, M, N, mask, cfg)
    begin, full_begin, full_end, end = blocks_seeing(n0, b, M, N, mask, cfg)
    first_step, stop_step = steps_of(part, end - begin, sizes, cfg)
    if cfg.IS_PARTED:
        begin = gl.where(first_step < stop_step, begin, end)
    if cfg.SPANS > 0:
        steps = begin * 0
        for g in range(sizes.group):
            number = list_of(b, h * sizes.group + g, n, sizes, mask, cfg)
            steps += gl.load(mask.blocks.counts + 2 * number + 1)
    if cfg.HAS_LISTS:  # those of all heads; `own_blocks` has the blocks of one head
        begin, end, stop_step = steps * 0, steps, steps
    return KeyWork(
        b, h, part, n, n0, start_q, M, start_k, N,
        blocks_before(b, start_q, sizes.M, at.cu_seqlens_q, cfg.BLOCK_M),
        gl.where(n > 0, before, 0), begin, full_begin, full_end, end, first_step, stop_step,
    )  # fmt: skip


KEY_WORK_NUMBERS = gl.constexpr(12)  # that `put_key_work` sends


@gluon.jit
def put_key_work(queue, i, work):
    """Send the next tile of a persistent program to the other roles."""
    put(queue, i, (
        work.b, work.kv_head, work.n, work.start_q, work.M, work.start_k, work.N,
        work.first_block, work.begin, work.full_begin, work.full_end, work.end,
    ))  # fmt: skip


@gluon.jit
def put_no_work(queue, i):
    """Say that there are no more tiles."""
    put(queue, i, (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0))


@gluon.jit
def read_key_work(queue, i, sizes, WARPS: gl.constexpr, cfg: gl.constexpr):
    """Read the work of `put_key_work` in a role of WARPS warps."""
    W: gl.constexpr = WARPS
    b, kv_head, n = number_of(queue, i, 0, W), number_of(queue, i, 1, W), number_of(queue, i, 2, W)
    zero = 0 * sizes.M
    start_q, M, start_k, N = zero, sizes.M, zero, sizes.N
    if cfg.IS_PACKED:
        start_q, M = number_of(queue, i, 3, W), number_of(queue, i, 4, W)
        start_k, N = number_of(queue, i, 5, W), number_of(queue, i, 6, W)
    first_block = number_of(queue, i, 7, W)
    begin, full_begin = number_of(queue, i, 8, W), number_of(queue, i, 9, W)
    full_end, end = number_of(queue, i, 10, W), number_of(queue, i, 11, W)
    return KeyWork(
        b, kv_head, zero, n, n * cfg.BLOCK_N, start_q, M, start_k, N, first_block, zero, begin,
        full_begin, full_end, end, zero, (end - begin) * sizes.group,
    )  # fmt: skip


@gluon.jit
def steps_of(part, count, sizes, cfg: gl.constexpr):
    """The steps [first, stop) of a part of a tile that `count` blocks of each head see.

    Parts have equal numbers of steps. With ordered additions they have whole heads: otherwise a
    part of one tile would start at a block that another part of the previous tile reaches last.
    """
    total = count * sizes.group
    first, stop = total * 0, total
    if cfg.IS_PARTED:
        if cfg.IS_ORDERED:
            first = part * sizes.group // sizes.parts * count
            stop = (part + 1) * sizes.group // sizes.parts * count
        else:
            first = part * total // sizes.parts
            stop = (part + 1) * total // sizes.parts
    return first, stop


@gluon.jit
def own_heads(work, sizes, cfg: gl.constexpr):
    """The query heads [first, stop) of the group that this program's steps belong to."""
    first, stop = sizes.group * 0, sizes.group
    if cfg.IS_PARTED:
        count = gl.maximum(work.end - work.begin, 1)
        first = work.first_step // count
        stop = gl.cdiv(work.stop_step, count)
    return first, stop


class Listed(NamedTuple):
    """The blocks of queries of one head that see some key of a tile."""

    count: Any
    full: Any  # how many of them every query of which sees every key; only with a block mask
    entries: Any  # pointer to the list
    intervals: Any  # pointer to the intervals of the head's rows; only with spans


@gluon.jit
def list_of(b, h, n, sizes, mask, cfg: gl.constexpr):
    """The index of the list for tile `n` of keys and query head `h`."""
    number = b * mask.blocks.batch_step + h * mask.blocks.head_step
    return number * gl.cdiv(sizes.N, cfg.BLOCK_N) + n


@gluon.jit
def listed_blocks(g, count, work, sizes, mask, cfg: gl.constexpr):
    """The blocks of head `g` of the group that see the tile: `count` without a list."""
    full, entries, intervals = count, count, count
    if cfg.HAS_LISTS:
        h = work.kv_head * sizes.group + g
        number = list_of(work.b, h, work.n, sizes, mask, cfg)
        full = gl.load(mask.blocks.counts + 2 * number)
        count = gl.load(mask.blocks.counts + 2 * number + 1)
        first = number.to(gl.int64) * gl.cdiv(sizes.M, cfg.BLOCK_M)
        entries = mask.blocks.entries + entry_size(cfg) * first
        if cfg.SPANS > 0:
            # A mask has as many lists as tiles of keys.
            mask_number = (number // gl.cdiv(sizes.N, cfg.BLOCK_N)).to(gl.int64)
            blocks = mask_number * gl.cdiv(sizes.M, cfg.BLOCK_M)
            intervals = mask.blocks.intervals + blocks * (2 * cfg.SPANS * cfg.BLOCK_M)
    return Listed(count, full, entries, intervals)


@gluon.jit
def block_at(position, entries, cfg: gl.constexpr):
    """The block of queries at a position of a list; without a list, they are the same."""
    block = position
    if cfg.HAS_LISTS:
        block = gl.load(entries + entry_size(cfg) * position)
    return block


@gluon.jit
def predecessors_at(position, entries, work, cfg: gl.constexpr):
    """The number of tiles of keys that come before this one where it adds to dQ."""
    predecessors = work.n
    if cfg.HAS_BLOCK_MASK:
        predecessors = gl.load(entries + (entry_size(cfg) * position + 2))
    return predecessors


@gluon.jit
def own_steps(g, count, work, cfg: gl.constexpr):
    """This program's steps [first, stop) of the `count` steps of head `g` of the group."""
    first, stop = count * 0, count
    if cfg.IS_PARTED:
        first = gl.maximum(work.first_step - g * count, 0)
        stop = gl.minimum(work.stop_step - g * count, count)
    return first, stop


@gluon.jit
def own_blocks(g, listed, work, cfg: gl.constexpr):
    """The blocks of `own_steps` as the numbers begin, full_begin, full_end and end of `KeyWork`."""
    begin, full_begin, full_end, end = work.begin, work.full_begin, work.full_end, work.end
    if cfg.HAS_LISTS:
        begin, full_begin, full_end, end = g * 0, g * 0, listed.full, listed.count
    if cfg.IS_PARTED:
        first, stop = own_steps(g, end - begin, work, cfg)
        if cfg.IS_ASCENDING:
            begin, end = work.begin + first, work.begin + stop
        else:
            begin, end = work.end - stop, work.end - first
        full_begin = gl.minimum(gl.maximum(full_begin, begin), end)
        full_end = gl.minimum(gl.maximum(full_end, begin), end)
    return begin, full_begin, full_end, end


@gluon.jit
def blocks_before(b, start_q, M, cu_seqlens, BLOCK_M: gl.constexpr):
    """Number of blocks of the workspace before sequence `b`. A packed sequence of `count` rows
    takes ceil(count / BLOCK_M) blocks, and start_q // BLOCK_M + b grows by at least as many.
    It also counts tiles of keys, given the start, the bound and the tile size of keys.
    """
    first_block = b * gl.cdiv(M, BLOCK_M)
    if cu_seqlens is not None:
        first_block = start_q // BLOCK_M + b
    return first_block


@gluon.jit
def seeing_rows(key, b, rows, shift, mask, cfg: gl.constexpr):
    """Rows [start, stop) of the `rows` of sequence `b` that see `key`: the inverse of
    `schedule.visible_keys`.
    """
    p = key_positions(key, b, mask, cfg)
    start = key * 0
    stop = start + rows
    if cfg.HAS_RIGHT:
        start = gl.maximum(start, queries_before(p - mask.right, b, rows, shift, mask, cfg))
    if cfg.HAS_LEFT:
        stop = gl.minimum(stop, queries_before(p + mask.left + 1, b, rows, shift, mask, cfg))
    if cfg.HAS_CHUNK:
        chunk = floor_to(p, mask.chunk)
        first, last = queries_between(chunk, mask.chunk, b, rows, shift, mask, cfg)
        start = gl.maximum(start, first)
        stop = gl.minimum(stop, last)
    return start, stop


@gluon.jit
def first_seeing_row(work, mask, cfg: gl.constexpr):
    """The number of rows of the sequence before those that see some key by the mask rules."""
    start, _ = seeing_rows(work.n * 0, work.b, work.M, work.N - work.M, mask, cfg)
    return start


@gluon.jit
def kept_keys(work, sizes, mask, cfg: gl.constexpr):
    """Which keys of the tile are kept: those that some query sees."""
    first, by, stop = work.n0, work.n0, work.n * 0 + cfg.BLOCK_N
    if kind_of_keys(cfg) == "marks":
        by = marks_of(work.b, work.kv_head * sizes.group, sizes, mask) + work.n0
    elif kind_of_keys(cfg) == "range":
        first = first_seen_key(work.b, work.M, work.N, mask, cfg) - work.n0
    return Kept(first, stop, by)


@gluon.jit
def kept_rows(m, dead, lse, cfg: gl.constexpr):
    """Which rows of block `m` are kept: those that see some key. `dead` is `first_seeing_row`,
    `lse` the statistics of the block.
    """
    return Kept(dead - m * cfg.BLOCK_M, m * 0 + cfg.BLOCK_M, lse)


@gluon.constexpr_function
def has_masked_end(cfg):
    """Whether rows past the end are masked. TMA fills them with zeros and they have P = 0 (their
    log-sum-exp is +inf), unless a score function gives NaN there.
    """
    return cfg.SCORE_MOD is not None


@gluon.jit
def rows_to_mask(M, cfg: gl.constexpr):
    """The number of rows after which rows are masked."""
    rows = gl.cdiv(M, cfg.BLOCK_M) * cfg.BLOCK_M
    if has_masked_end(cfg):
        rows = M
    return rows


@gluon.jit
def blocks_seeing(n0, b, M, N, mask, cfg: gl.constexpr):
    """Blocks of queries [begin, end) that see a key of [n0, n0 + BLOCK_N), and the blocks
    [full_begin, full_end) among them that need no mask. All are equal if no query sees a key.

    begin and end never decrease from one tile of keys to the next.
    """
    rows = rows_to_mask(M, cfg)
    shift = N - M
    start, first_stop = seeing_rows(n0, b, rows, shift, mask, cfg)
    last = gl.minimum(n0 + cfg.BLOCK_N, N) - 1
    last_start, stop = seeing_rows(last, b, rows, shift, mask, cfg)
    seen = (n0 < N) & (start < stop)
    begin = gl.where(seen, start // cfg.BLOCK_M, 0)
    end = gl.where(seen, gl.cdiv(stop, cfg.BLOCK_M), 0)
    full_begin = gl.minimum(gl.maximum(gl.cdiv(last_start, cfg.BLOCK_M), begin), end)
    full_end = gl.minimum(gl.maximum(first_stop // cfg.BLOCK_M, full_begin), end)
    past = n0 + cfg.BLOCK_N > N
    return begin, gl.where(past, end, full_begin), gl.where(past, end, full_end), end


@gluon.jit
def visited_block(j, listed, work, cfg: gl.constexpr):
    """The block of step `j` of a head, or its position in a list: up from the
    first one or down from the last one.
    """
    end = work.end
    if cfg.HAS_LISTS:
        end = listed.count
    block = end - 1 - j
    if cfg.IS_ASCENDING:
        block = work.begin + j
    return block


@gluon.jit
def first_block_of(begin, end, cfg: gl.constexpr):
    """The block of [begin, end) that `visited_block` returns first."""
    return begin if cfg.IS_ASCENDING else end - 1


@gluon.jit
def next_block(block, cfg: gl.constexpr):
    """The block that `visited_block` returns after `block`."""
    return block + 1 if cfg.IS_ASCENDING else block - 1
