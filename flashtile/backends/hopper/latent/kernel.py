"""The decoding kernel over latent keys: one key head of 576 columns, whose first 512 are the values
(multi-head latent attention, DeepSeek-V2, section 2.1).

A program has 64 rows of queries, the heads of a query one after another, and walks over pairs of
tiles of 64 keys. A tile is loaded once: S = Q K^T reads all of its columns, O += P V the first 512.
Q and two tiles of K fill the shared memory, and O the registers of two warpgroups:

    S, P  (64, 64)    warpgroup 0 has those of the even tiles, warpgroup 1 those of the odd ones
    O     (64, 512)   each warpgroup has 256 columns, its half

So that the tensor cores do not wait for a softmax, the warpgroups take turns (the seesaw schedule
of FlashMLA). Both add the products of all tiles in order, but

    warpgroup 0   S of the even tile, softmax,           its product, that of the odd tile
    warpgroup 1   S of the odd tile, product of the even tile, softmax,  that of the odd tile

Each needs P and the row maximum of the other. A tile's P takes the place of its last 64 columns,
which only S reads.

    who waits               for what                 how
    both warpgroups         half of a tile is full   mbarrier `full` of the half, a phase a pair
    the other warpgroup     P is stored              mbarrier `ready` of the tile, a phase a pair
    TMA                     half of a tile is empty  its warpgroup copies, after its last product

The half of a tile that a warpgroup adds to O is the half that it refills. The one that has read P
in shared memory refills the last columns, too. What is stored there and in `row_max` has then been
read, because the next S waits for these columns.

Several programs may share the keys of a sequence: each stores the normalised output of its part in
float32, and its log-sum-exp; `ops/merge` merges them.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....gpu.intrinsics import LN2, LOG2E, let_next_kernel_start
from ..shared.pipeline import (
    CONSUMER_WARPS,
    accumulator,
    copy_to_shared,
    empty_accumulator,
    left_operand,
    log2,
    opaque_zero,
    row_values,
    rows_of_heads,
    run_roles,
    shared_rows,
    shared_value,
    sync_warps,
)
from ..shared.softmax import (
    SLACK_LOG2,
    lazy_max,
    partial_row_sum,
    pivot_of,
    rescaled,
    rescaled_where_needed,
)
from . import plan

ROWS, KEYS, PAIR = map(gl.constexpr, (plan.ROWS, plan.KEYS, plan.PAIR))
VALUES, HALF, TAIL = map(gl.constexpr, (plan.VALUES, plan.HALF, plan.TAIL))

SCORES, OUTPUT = gl.constexpr(accumulator(plan.KEYS)), gl.constexpr(accumulator(plan.HALF))
OF_ROWS = gl.constexpr(row_values(plan.KEYS))

NUMBERS = ("q_batch", "q_row", "q_head", "B", "M", "N", "total_k", "page_columns", "heads")


class Work(NamedTuple):
    """The rows and keys of a program."""

    index: Any  # of the part and the sequence
    first_row: Any  # of the rows (query, head) of the sequence
    M: Any
    used: Any  # queries
    heads: Any
    N: Any
    first_key: Any
    pairs: Any  # of tiles


class Keys(NamedTuple):
    """Where the tiles of K come from, and the pair of them in shared memory."""

    half_desc: Any
    tail_desc: Any
    table: Any  # pointer to the pages of the sequence; None without pages
    row: Any  # of the cache
    total: Any  # pages
    halves: Any  # (4, 1, KEYS, 1, HALF): two of each tile
    tails: Any  # (2, 1, KEYS, 1, TAIL), later P of the tiles
    full: Any  # (4, 1) mbarriers of the halves


class Exchange(NamedTuple):
    """What a warpgroup tells the other one, beside P."""

    row_max: Any  # (2, ROWS), of the last tile of each
    row_sum: Any  # (2, ROWS), of all tiles of each
    ready: Any  # (4, 1) mbarriers: P and the row maximum of each, and its row sum


@gluon.jit
def place_of(n0, keys, N, cfg: gl.constexpr):
    """The page that holds the keys from `n0` on, and the row in it."""
    if cfg.PAGE_SIZE > 0:
        n0 = gl.minimum(n0, N - 1)  # a tile of hidden keys may have no page
        page = gl.load(keys.table + n0 // cfg.PAGE_SIZE)
        place = gl.minimum(gl.maximum(page, 0), keys.total - 1), n0 % cfg.PAGE_SIZE
    else:
        place = keys.row, n0
    return place


@gluon.jit
def copy_half(TILE: gl.constexpr, ME: gl.constexpr, place, keys):
    """Let TMA copy the half of a tile that warpgroup ME adds to its output; and the last columns,
    where it has read P before, if the tile is the other warpgroup's.
    """
    full, half, tail = keys.full.index(2 * TILE + ME), keys.half_desc, keys.tail_desc
    if TILE == ME:
        mbarrier.expect(full, half.block_type.nbytes)
    else:
        mbarrier.expect(full, half.block_type.nbytes + tail.block_type.nbytes)
        copy_to_shared(tail, [place[0], place[1], 0, VALUES], full, keys.tails.index(TILE))
    target = keys.halves.index(2 * TILE + ME)
    copy_to_shared(half, [place[0], place[1], 0, ME * HALF], full, target)


@gluon.jit
def load_queries(tile, ptr, offs, inside):
    """Fill a tile with rows of numbers that start at `offs` (ROWS,) from `ptr`; with zeros where
    not `inside`."""
    COLUMNS: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = rows_of_heads(COLUMNS, CONSUMER_WARPS)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    dims = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    # (ROWS, COLUMNS)
    offs = gl.convert_layout(offs, OF_ROWS)[:, None] + dims[None, :]
    inside = gl.convert_layout(inside, OF_ROWS)[:, None] & (dims >= 0)[None, :]
    x = gl.load(gl.multiple_of(ptr + offs, [1, 8]), mask=inside, other=0.0)
    tile.store(x)


@gluon.jit
def clear_rows(tile, count):
    """Zero the rows of half a tile of K from `count` on: their weights are 0, but 0 times NaN is
    NaN."""
    STEP: gl.constexpr = 64
    LAYOUT: gl.constexpr = rows_of_heads(STEP, CONSUMER_WARPS)
    row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    for first in gl.static_range(0, HALF, STEP):
        part = tile.slice(first, STEP, 1)
        # (KEYS, STEP)
        x = part.load(LAYOUT)
        part.store(gl.where((row < count)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    sync_warps()


@gluon.jit
def issue_scores(ME: gl.constexpr, q, q_tail, keys, phase, zero):
    """Start S = Q K^T of the tile of warpgroup ME. Its own half is usually the first to be full;
    `zero`: `opaque_zero`."""
    own, other = zero + 2 * ME + ME, zero + 2 * ME + 1 - ME
    mbarrier.wait(keys.full.index(own), phase)
    # (ROWS, HALF) @ (HALF, KEYS) -> (ROWS, KEYS)
    k = keys.halves.index(own).reshape([KEYS, HALF]).permute((1, 0))
    s = empty_accumulator(KEYS)
    s = warpgroup_mma(q.index(zero + ME), k, s, use_acc=False, is_async=True)
    mbarrier.wait(keys.full.index(other), phase)
    k = keys.halves.index(other).reshape([KEYS, HALF]).permute((1, 0))
    s = warpgroup_mma(q.index(zero + 1 - ME), k, s, is_async=True)
    # (ROWS, TAIL) @ (TAIL, KEYS) -> (ROWS, KEYS)
    k = keys.tails.index(zero + ME).reshape([KEYS, TAIL]).permute((1, 0))
    return warpgroup_mma(q_tail.index(zero), k, s, is_async=True)


@gluon.jit
def issue_output(TILE: gl.constexpr, ME: gl.constexpr, p, acc, n0, keys, N, zero):
    """Start O += P V of a tile, which starts at key `n0`, in the columns of warpgroup ME."""
    v = keys.halves.index(zero + 2 * TILE + ME).reshape([KEYS, HALF])
    if n0 + KEYS > N:
        clear_rows(v, N - n0)
    # (ROWS, KEYS) @ (KEYS, HALF) -> (ROWS, HALF)
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def issue_output_of_other(
    ME: gl.constexpr, acc, row_max, row_sum, n0, keys, exchange, N, phase, zero
):
    """`issue_output` of the tile of the other warpgroup; row maximum and row sum after it."""
    OTHER: gl.constexpr = 1 - ME
    mbarrier.wait(exchange.ready.index(OTHER), phase)
    # (ROWS,)
    new_max = exchange.row_max.index(OTHER).load(OF_ROWS)
    rescale = gl.exp2(row_max - pivot_of(new_max, True))
    acc = rescaled_where_needed(acc, rescale)
    p = keys.tails.index(zero + OTHER).reshape([ROWS, KEYS])
    acc = issue_output(OTHER, ME, p, acc, n0, keys, N, zero)
    return acc, new_max, rescaled(row_sum, rescale)


@gluon.jit
def attend(
    ME: gl.constexpr, q, q_tail, keys, exchange, work, out_ptr, lse_ptr, scale, cfg: gl.constexpr
):  # fmt: skip
    """The columns of warpgroup ME of a program's output."""
    OTHER: gl.constexpr = 1 - ME
    M, N, used, heads = work.M, work.N, work.used, work.heads
    # (ROWS,)
    flat = work.first_row + gl.arange(0, ROWS, layout=OF_ROWS)
    token, head = flat // heads, flat % heads
    stop = flat * 0 + N  # each row sees the keys before
    if cfg.HAS_RIGHT:  # causal: the last query sees the last key
        stop = gl.minimum(stop, N - used + token + 1)
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))[None, :]

    factor = scale * LOG2E
    # (ROWS,), (ROWS, 4) and (ROWS, HALF)
    row_max = gl.full([ROWS], -float("inf"), gl.float32, layout=OF_ROWS)
    row_sum = partial_row_sum(empty_accumulator(KEYS))
    acc = empty_accumulator(HALF)
    for pair in range(work.pairs):
        phase, zero = pair & 1, opaque_zero(pair)
        own_n0 = work.first_key + pair * PAIR + ME * KEYS
        other_n0 = work.first_key + pair * PAIR + OTHER * KEYS
        next_own = place_of(own_n0 + PAIR, keys, N, cfg)
        next_other = place_of(other_n0 + PAIR, keys, N, cfg)
        has_next = pair + 1 < work.pairs
        # (ROWS, KEYS)
        s = issue_scores(ME, q, q_tail, keys, phase, zero)
        if ME == 1:
            acc, row_max, row_sum = issue_output_of_other(
                ME, acc, row_max, row_sum, other_n0, keys, exchange, N, phase, zero
            )
        s = warpgroup_mma_wait(ME, deps=[s])
        if own_n0 + KEYS > N - used:
            s = gl.where(column < (stop - own_n0)[:, None], s, -float("inf"))
        # (ROWS,)
        new_max = lazy_max(row_max, gl.max(s, 1) * factor, SLACK_LOG2)
        pivot = pivot_of(new_max, True)
        rescale = gl.exp2(row_max - pivot)
        row_max = new_max
        p = gl.exp2(s * factor - pivot[:, None])
        row_sum = rescaled(row_sum, rescale) + partial_row_sum(p)
        p = p.to(keys.half_desc.dtype)
        keys.tails.index(ME).reshape([ROWS, KEYS]).store(p)
        exchange.row_max.index(ME).store(row_max)
        fence_async_shared()
        mbarrier.arrive(exchange.ready.index(ME), count=1)
        if ME == 1:
            acc = warpgroup_mma_wait(0, deps=[acc])
            if has_next:
                copy_half(OTHER, ME, next_other, keys)
        acc = rescaled_where_needed(acc, rescale)
        p = gl.convert_layout(p, left_operand(HALF), assert_trivial=True)
        acc = issue_output(ME, ME, p, acc, own_n0, keys, N, zero)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if has_next:
            copy_half(ME, ME, next_own, keys)
        if ME == 0:
            acc, row_max, row_sum = issue_output_of_other(
                ME, acc, row_max, row_sum, other_n0, keys, exchange, N, phase, zero
            )
            acc = warpgroup_mma_wait(0, deps=[acc])
            if has_next:
                copy_half(OTHER, ME, next_other, keys)

    # (ROWS,)
    total = gl.convert_layout(gl.sum(row_sum, 1), OF_ROWS)
    exchange.row_sum.index(ME).store(total)
    mbarrier.arrive(exchange.ready.index(2 + ME), count=1)
    mbarrier.wait(exchange.ready.index(2 + OTHER), 0)
    total += exchange.row_sum.index(OTHER).load(OF_ROWS)
    seen = (total != 0.0) & (token < used)  # NaN was seen
    safe = gl.where(seen, total, 1.0)
    inside = flat < M * heads
    if ME == 0:
        lse = gl.where(seen, (row_max + log2(safe)) * LN2, -float("inf"))
        gl.store(lse_ptr + (work.index * heads + head) * M + token, lse, mask=inside)
    acc = rescaled(acc, gl.where(seen, 1.0 / safe, 0.0))
    OF_OUTPUT: gl.constexpr = row_values(HALF)
    dims = ME * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, OUTPUT))[None, :]
    rows = gl.convert_layout(work.index * M * heads + flat, OF_OUTPUT)[:, None]
    inside = gl.convert_layout(inside, OF_OUTPUT)[:, None]
    gl.store(out_ptr + rows * VALUES + dims, acc.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=NUMBERS)
def latent_kernel(
    q_ptr, q_batch, q_row, q_head, k_desc, tail_desc, out_ptr, lse_ptr, seqused_q_ptr,
    seqused_k_ptr, page_table_ptr, B, M, N, total_k, page_columns, heads, scale, cfg: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of a tile of rows over a part of the keys, the grid's second axis.

    Args:
        out_ptr: (parts, B, M, heads, VALUES), contiguous; `lse_ptr`: (parts, B, heads, M).
        total_k: pages of the cache.
    """
    let_next_kernel_start()  # which merges the parts
    tiles_of_rows = gl.cdiv(M * heads, ROWS)
    b = gl.program_id(0) // tiles_of_rows
    first_row = gl.program_id(0) % tiles_of_rows * ROWS
    if seqused_k_ptr is not None:
        N = gl.minimum(gl.maximum(gl.load(seqused_k_ptr + b), 0), N)
    used = M
    if seqused_q_ptr is not None:
        used = gl.minimum(gl.maximum(gl.load(seqused_q_ptr + b), 0), M)
    last = N  # the keys that the last row sees
    if cfg.HAS_RIGHT:
        last_token = (gl.minimum(first_row + ROWS, M * heads) - 1) // heads
        last = gl.minimum(N, gl.maximum(N - used + last_token + 1, 0))

    dtype: gl.constexpr = k_desc.dtype
    q = gl.allocate_shared_memory(dtype, [2, ROWS, HALF], shared_rows(HALF, 16, 2))
    q_tail = gl.allocate_shared_memory(dtype, [1, ROWS, TAIL], shared_rows(TAIL, 16, 2))
    halves = gl.allocate_shared_memory(dtype, [4, 1, KEYS, 1, HALF], shared_rows(HALF))
    tails = gl.allocate_shared_memory(dtype, [2, 1, KEYS, 1, TAIL], shared_rows(TAIL))
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(4):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(ready.index(n), count=1)
    row_max = gl.allocate_shared_memory(gl.float32, [2, ROWS], shared_value())
    row_sum = gl.allocate_shared_memory(gl.float32, [2, ROWS], shared_value())
    exchange = Exchange(row_max, row_sum, ready)
    table = None
    if cfg.PAGE_SIZE > 0:
        table = page_table_ptr + b.to(gl.int64) * page_columns
    keys = Keys(k_desc, tail_desc, table, b, total_k, halves, tails, full)
    fence_async_shared()
    sync_warps()

    # The pairs of tiles of this program; the second tile of the last one may have no key.
    count = gl.cdiv(last, PAIR)
    part = gl.cdiv(count, gl.num_programs(1))
    first = gl.minimum(gl.program_id(1) * part, count)
    pairs = gl.minimum(first + part, count) - first
    if pairs > 0:
        for tile in gl.static_range(2):
            place = place_of(first * PAIR + tile * KEYS, keys, N, cfg)
            copy_half(tile, 0, place, keys)
            copy_half(tile, 1, place, keys)

    # (ROWS,)
    flat = first_row + gl.arange(0, ROWS, layout=OF_ROWS)
    token, head, inside = flat // heads, flat % heads, flat < M * heads
    offs = b.to(gl.int64) * q_batch + token.to(gl.int64) * q_row + head.to(gl.int64) * q_head
    load_queries(q.index(0), q_ptr, offs, inside)
    load_queries(q.index(1), q_ptr, offs + HALF, inside)
    load_queries(q_tail.index(0), q_ptr, offs + VALUES, inside)
    fence_async_shared()
    sync_warps()

    index = gl.program_id(1).to(gl.int64) * B + b
    work = Work(index, first_row, M, used, heads, N, first * PAIR, pairs)
    run_roles(
        [
            (attend, (0, q, q_tail, keys, exchange, work, out_ptr, lse_ptr, scale, cfg)),
            (attend, (1, q, q_tail, keys, exchange, work, out_ptr, lse_ptr, scale, cfg)),
        ],
        [],
    )
