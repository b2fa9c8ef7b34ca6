"""The decoding kernel over latent keys: one key head of 576 columns, whose first 512 are the values
(multi-head latent attention, DeepSeek-V2, section 2.1).

A program has 64 rows of queries, the heads of a query one after another, and walks over tiles of 64
keys. A tile is loaded once: S = Q K^T reads all of its columns, O += P V the first 512. Q, two
tiles of K and P fill the shared memory, and O the registers of two warpgroups:

    S   (64, 64)    each warpgroup has 32 keys
    P   (64, 64)    16 bits, in shared memory, because each warpgroup needs the keys of both
    O   (64, 512)   each warpgroup has 256 columns

Both warpgroups run the same code in step, without roles. TMA fills a slot of the ring while they
compute with the other one:

    who waits       for what            how
    all threads     slot is full        mbarrier of the slot, one phase for each use
    all threads     P is stored         `sync_warps`, after a fence for wgmma
    TMA             slot is empty       `sync_warps` after the product that reads it last

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
    copy_to_shared,
    log2,
    rows_of_heads,
    shared_rows,
    sync_warps,
)
from ..shared.softmax import rescaled_where_needed
from . import plan

ROWS, KEYS, VALUES, TAIL = map(gl.constexpr, (plan.ROWS, plan.KEYS, plan.VALUES, plan.TAIL))
SLOTS, WARPS = gl.constexpr(2), gl.constexpr(8)

NUMBERS = ("q_batch", "q_row", "q_head", "B", "M", "N", "total_k", "page_columns", "heads")


@gluon.constexpr_function
def of_columns(columns):
    """A float32 tile (64, 2 * columns) of both warpgroups, next to each other."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, columns, 16])


SCORES = gl.constexpr(of_columns(32))
OUTPUT = gl.constexpr(of_columns(256))


class Keys(NamedTuple):
    """Where the tiles of K come from, and the ring that they go to."""

    tiles_desc: Any
    tails_desc: Any
    table: Any  # pointer to the pages of the sequence; None without pages
    row: Any  # of the cache
    total: Any  # pages
    tiles: Any  # (SLOTS, 1, KEYS, 1, VALUES)
    tails: Any  # (SLOTS, 1, KEYS, 1, TAIL)
    full: Any  # (SLOTS, 1) mbarriers


@gluon.jit
def place_of(n0, keys, cfg: gl.constexpr):
    """The page that holds the keys from `n0` on, and the row in it."""
    if cfg.PAGE_SIZE > 0:
        page = gl.load(keys.table + n0 // cfg.PAGE_SIZE)
        place = gl.minimum(gl.maximum(page, 0), keys.total - 1), n0 % cfg.PAGE_SIZE
    else:
        place = keys.row, n0
    return place


@gluon.jit
def copy_keys(slot, place, keys):
    """Let TMA fill a slot, which is empty."""
    full = keys.full.index(slot)
    mbarrier.expect(full, keys.tiles_desc.block_type.nbytes + keys.tails_desc.block_type.nbytes)
    copy_to_shared(keys.tiles_desc, [place[0], place[1], 0, 0], full, keys.tiles.index(slot))
    copy_to_shared(keys.tails_desc, [place[0], place[1], 0, VALUES], full, keys.tails.index(slot))


@gluon.jit
def load_queries(ptr, offs, inside, COLUMNS: gl.constexpr):
    """Rows of COLUMNS numbers, which start at `offs` (ROWS,) from `ptr`, in shared memory; zeros
    where not `inside`."""
    LAYOUT: gl.constexpr = rows_of_heads(COLUMNS, WARPS)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    dims = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    # (ROWS, COLUMNS)
    offs = gl.convert_layout(offs, OF_ROWS)[:, None] + dims[None, :]
    inside = gl.convert_layout(inside, OF_ROWS)[:, None] & (dims >= 0)[None, :]
    x = gl.load(gl.multiple_of(ptr + offs, [1, 8]), mask=inside, other=0.0)
    tile = gl.allocate_shared_memory(x.dtype, [ROWS, COLUMNS], shared_rows(COLUMNS, 16, 2))
    tile.store(x)
    return tile


@gluon.jit
def clear_rows(tile, count):
    """Zero the rows of a tile of K from `count` on: their weights are 0, but 0 times NaN is NaN."""
    STEP: gl.constexpr = 64
    LAYOUT: gl.constexpr = rows_of_heads(STEP, WARPS)
    row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    for first in gl.static_range(0, VALUES, STEP):
        part = tile.slice(first, STEP, 1)
        # (KEYS, STEP)
        x = part.load(LAYOUT)
        part.store(gl.where((row < count)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    sync_warps()


@gluon.jit
def partial_row_sum(p):
    """Sums within each thread: (ROWS, KEYS) -> (ROWS, warpgroups, threads of a row)."""
    return gl.sum(gl.sum(p.reshape([ROWS, 2, KEYS // 16, 4, 2]), 4), 2)


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
    # (ROWS,)
    flat = gl.program_id(0) % tiles_of_rows * ROWS + gl.arange(
        0, ROWS, layout=gl.SliceLayout(1, SCORES)
    )
    inside = flat < M * heads
    token, head = flat // heads, flat % heads
    if seqused_k_ptr is not None:
        N = gl.minimum(gl.maximum(gl.load(seqused_k_ptr + b), 0), N)
    used = M
    if seqused_q_ptr is not None:
        used = gl.minimum(gl.maximum(gl.load(seqused_q_ptr + b), 0), M)
    stop = flat * 0 + N  # each row sees the keys before
    if cfg.HAS_RIGHT:  # causal: the last query sees the last key
        stop = gl.minimum(stop, N - used + token + 1)
    last = gl.maximum(gl.max(stop, 0), 0)

    offs = b.to(gl.int64) * q_batch + token.to(gl.int64) * q_row + head.to(gl.int64) * q_head
    q = load_queries(q_ptr, offs, inside, VALUES)
    q_tail = load_queries(q_ptr, offs + VALUES, inside, TAIL)

    dtype: gl.constexpr = k_desc.dtype
    tiles = gl.allocate_shared_memory(dtype, [SLOTS, 1, KEYS, 1, VALUES], shared_rows(VALUES))
    tails = gl.allocate_shared_memory(dtype, [SLOTS, 1, KEYS, 1, TAIL], shared_rows(TAIL))
    weights = gl.allocate_shared_memory(dtype, [ROWS, KEYS], shared_rows(KEYS, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(SLOTS):
        mbarrier.init(full.index(n), count=1)
    table = None
    if cfg.PAGE_SIZE > 0:
        table = page_table_ptr + b.to(gl.int64) * page_columns
    keys = Keys(k_desc, tail_desc, table, b, total_k, tiles, tails, full)
    fence_async_shared()
    sync_warps()

    # The tiles of this program.
    count = gl.cdiv(last, KEYS)
    part = gl.cdiv(count, gl.num_programs(1))
    first = gl.minimum(gl.program_id(1) * part, count)
    count = gl.minimum(first + part, count) - first
    for n in gl.static_range(SLOTS):
        if n < count:
            copy_keys(n, place_of((first + n) * KEYS, keys, cfg), keys)

    factor = scale * LOG2E
    # (ROWS,), (ROWS, 2, 4) and (ROWS, VALUES)
    row_max = gl.full([ROWS], -float("inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    row_sum = partial_row_sum(gl.zeros([ROWS, KEYS], gl.float32, layout=SCORES))
    acc = gl.zeros([ROWS, VALUES], gl.float32, layout=OUTPUT)
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))[None, :]
    for i in range(count):
        slot = i % SLOTS
        n0 = (first + i) * KEYS
        next_place = place_of(gl.minimum(n0 + SLOTS * KEYS, N - 1), keys, cfg)
        k = tiles.index(slot).reshape([KEYS, VALUES])
        k_tail = tails.index(slot).reshape([KEYS, TAIL])
        mbarrier.wait(full.index(slot), i // SLOTS & 1)
        # (ROWS, KEYS)
        s = gl.zeros([ROWS, KEYS], gl.float32, layout=SCORES)
        s = warpgroup_mma(q, k.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q_tail, k_tail.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        if n0 + KEYS > N - used:
            s = gl.where(column < (stop - n0)[:, None], s, -float("inf"))
            if n0 + KEYS > N:
                clear_rows(k, N - n0)
        # (ROWS,)
        new_max = gl.maximum(row_max, gl.max(s, 1) * factor)
        pivot = gl.where(new_max == -float("inf"), 0.0, new_max)  # -inf - -inf would be NaN
        rescale = gl.exp2(row_max - pivot)
        row_max = new_max
        p = gl.exp2(s * factor - pivot[:, None])
        weights.store(p.to(dtype))
        fence_async_shared()
        row_sum = row_sum * rescale_of_parts(rescale, row_sum) + partial_row_sum(p)
        acc = rescaled_where_needed(acc, rescale)
        sync_warps()
        # (ROWS, KEYS) @ (KEYS, VALUES) -> (ROWS, VALUES)
        acc = warpgroup_mma(weights, k, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        sync_warps()
        if i + SLOTS < count:
            copy_keys(slot, next_place, keys)

    # (ROWS,)
    total = gl.convert_layout(gl.sum(gl.sum(row_sum, 2), 1), gl.SliceLayout(1, SCORES))
    seen = (total != 0.0) & (token < used)  # NaN was seen
    safe = gl.where(seen, total, 1.0)
    index = gl.program_id(1).to(gl.int64) * B + b
    lse = gl.where(seen, (row_max + log2(safe)) * LN2, -float("inf"))
    gl.store(lse_ptr + (index * heads + head) * M + token, lse, mask=inside)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    acc = acc * gl.convert_layout(gl.where(seen, 1.0 / safe, 0.0), OF_ROWS)[:, None]
    dims = gl.arange(0, VALUES, layout=gl.SliceLayout(0, OUTPUT))[None, :]
    rows = gl.convert_layout(index * M * heads + flat, OF_ROWS)[:, None]
    inside = gl.convert_layout(inside, OF_ROWS)[:, None]
    gl.store(out_ptr + rows * VALUES + dims, acc.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def rescale_of_parts(rescale, row_sum):
    """One factor for each row, in the layout of `partial_row_sum`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, row_sum.type.layout))
    return gl.convert_layout(rescale, LAYOUT)[:, None, None]
