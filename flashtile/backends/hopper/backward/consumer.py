"""The consumers of the backward: up to 128 columns two with half of a tile's keys each, and above,
where the registers do not hold dK and dV of 64 keys, one for values and one for keys.

A step processes one block of queries, with transposed scores: S^T = K Q^T, dP^T = V dO^T, then
dV += P^T dO, dK += dS^T Q and dQ = dS K. First come the parts of tiles that a consumer multiplies,
the products and the recomputed probabilities, which all consumers share.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....gpu.intrinsics import tanh_of_scores
from ..shared.pipeline import (
    CONSUMER_ROWS,
    CONSUMER_WARPS,
    FIRST_BARRIER,
    BoxRows,
    Channel,
    accumulator,
    after_products,
    aggregate,
    arrive_alone,
    box_at,
    copy_to_global,
    empty_accumulator,
    left_operand,
    opaque_zero,
    opaque_zeros,
    recast,
    row_values,
    shared_rows,
    shared_value,
    show_written,
    store_float32,
    sync_warps,
    wait_at_barrier,
    wait_cycles,
)
from ..shared.schedule import clear_numbers, clear_rows, has_cleared, kind_of_keys, kind_of_rows
from ..shared.softmax import (
    LOG2E,
    Place,
    alibi_slope,
    bounds,
    draws_of,
    kept_queries,
    load_bits,
    masked_by_bits,
    modified,
    modified_gradient,
    negative_where_dropped,
    with_alibi,
)
from .dq import (
    KEY_COLUMNS,
    PIECE_ROWS,
    add_at_once,
    emit_pieces,
    first_of_last,
    last_columns,
    part_start,
    piece_columns,
    piece_layout,
    put_piece,
    start_additions,
    store_part,
    store_pieces,
    value_puts,
)
from .schedule import (
    block_at,
    entry_size,
    first_block_of,
    first_seeing_row,
    has_masked_end,
    kept_keys,
    kept_rows,
    key_work,
    listed_blocks,
    next_block,
    own_blocks,
    own_heads,
    read_key_work,
    rows_to_mask,
    seeing_rows,
)


@gluon.constexpr_function
def products_along(cfg):
    """Number of products that cover all columns of K, each over a power of two of columns."""
    return 1 if cfg.TAIL_D == 0 else 2


@gluon.constexpr_function
def has_hidden_scores(cfg):
    """Whether a block of scores that needs a mask may hide a key from some queries only. Otherwise
    it needs one because keys are past the end, and hides these from all queries.
    """
    return cfg.HAS_RIGHT or ends_masked(cfg)


@gluon.constexpr_function
def ends_masked(cfg):
    """Whether the last blocks of queries that see a tile may need a mask."""
    return cfg.HAS_LEFT or cfg.HAS_CHUNK or cfg.HAS_LISTS or has_masked_end(cfg)


# Parts of tiles


class Tile(NamedTuple):
    """A tile of K or V in shared memory."""

    tile: Any  # (1, BLOCK_N, 1, columns)
    tail: Any  # (1, BLOCK_N, 1, columns of the tail), or `tile` again


@gluon.jit
def whole_tile(channel, zero):
    """K or V of the program; `zero` is opaque in a loop."""
    return Tile(channel.tiles.index(zero), channel.tails.index(zero))


@gluon.jit
def rows_tile(channel, i, cfg: gl.constexpr):
    """A block of Q or dO, (BLOCK_M, columns)."""
    COLUMNS: gl.constexpr = channel.tiles.shape[4]
    slot = opaque_zero(i) if channel.SLOTS == 1 else i % channel.SLOTS
    return channel.tiles.index(slot).reshape([cfg.BLOCK_M, COLUMNS])


@gluon.jit
def rows_tail(channel, i, cfg: gl.constexpr):
    """The tail of `rows_tile`, (BLOCK_M, columns)."""
    return channel.tail(i).reshape([cfg.BLOCK_M, channel.TAIL])


@gluon.jit
def keys_tile(ME: gl.constexpr, tile, cfg: gl.constexpr):
    """The rows of a tile of K or V, or of a tail, for this consumer's scores, (64, columns)."""
    rows = tile.reshape([cfg.BLOCK_N, tile.shape[3]])
    return rows.slice(ME * CONSUMER_ROWS, CONSUMER_ROWS)


@gluon.jit
def shared_half(ME: gl.constexpr, tiles, i, cfg: gl.constexpr):
    """This consumer's part of dS^T in shared memory, (64, BLOCK_M)."""
    return tiles.index(i % 2).slice(ME * CONSUMER_ROWS, CONSUMER_ROWS)


@gluon.jit
def statistic(slots, i, cfg: gl.constexpr):
    """The statistic of each row of a block, one for each column of the scores."""
    SLOTS: gl.constexpr = slots.shape[0]
    # (BLOCK_M,)
    numbers = recast(slots.index(i % SLOTS), gl.float32, [cfg.BLOCK_M], shared_value())
    return numbers.load(gl.SliceLayout(0, accumulator(cfg.BLOCK_M)))


# Products


@gluon.jit
def multiply_along(keys, channel, i, start, HAS_START: gl.constexpr, cfg: gl.constexpr):
    """Start `keys`, a consumer's rows of K or V, times block `i` of Q or dO transposed; with
    HAS_START, the product is added to `start`.
    """
    # (64, columns) @ (columns, BLOCK_M) -> (64, BLOCK_M), which are transposed scores
    rows = rows_tile(channel, i, cfg).permute((1, 0))
    x = warpgroup_mma(keys.tile, rows, start, use_acc=HAS_START, is_async=True)
    if channel.TAIL > 0:
        rows = rows_tail(channel, i, cfg).permute((1, 0))
        x = warpgroup_mma(keys.tail, rows, x, is_async=True)
    return x


@gluon.jit
def own_rows(
    ME: gl.constexpr, channel, zero, IS_LOADED: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """The rows of K or V and of its tail for this consumer's scores, in registers or in shared
    memory; `zero` is as in `whole_tile`.
    """
    both = whole_tile(channel, zero)
    # (64, columns), (64, TAIL)
    tile = keys_tile(ME, both.tile, cfg)
    tail = keys_tile(ME, both.tail, cfg)
    if IS_LOADED:
        tile = tile.load(left_operand(cfg.BLOCK_M))
        tail = tail.load(left_operand(cfg.BLOCK_M)) if channel.TAIL > 0 else tile
    return Tile(tile, tail)


@gluon.jit
def issue_scores(k, i, channels, cfg: gl.constexpr):
    """Start S^T = K Q^T of block i; `k` is from `own_rows`."""
    return multiply_along(k, channels.q, i, empty_accumulator(cfg.BLOCK_M), False, cfg)


@gluon.jit
def issue_dp(v, minus_delta, i, channels, cfg: gl.constexpr):
    """Start dP^T - delta = V dO^T - delta of block i; `v` is from `own_rows`, `minus_delta` a
    `statistic`.
    """
    # (64, BLOCK_M)
    start = gl.expand_dims(minus_delta, 0).broadcast_to([CONSUMER_ROWS, cfg.BLOCK_M])
    return multiply_along(v, channels.dout, i, start, True, cfg)


@gluon.jit
def issue_dq(PART: gl.constexpr, k, i, tiles, cfg: gl.constexpr):
    """Start a piece of dQ = dS K: (64, `piece_columns`), number PART along the rows or columns, or
    (64, TAIL_D), the tail's columns. dS^T is in slot `i % 2` of `tiles`.
    """
    COLUMNS: gl.constexpr = piece_columns(cfg)
    columns = k.tile.reshape([cfg.BLOCK_N, cfg.BLOCK_D])
    ds = tiles.index(i % 2)
    if cfg.BLOCK_M > 64:
        ds = ds.slice(PART * CONSUMER_ROWS, CONSUMER_ROWS, dim=1)
    elif PART * COLUMNS < cfg.BLOCK_D:
        columns = columns.slice(PART * COLUMNS, COLUMNS, dim=1)
    else:
        columns = k.tail.reshape([cfg.BLOCK_N, cfg.TAIL_D])
    # (64, BLOCK_N) @ (BLOCK_N, columns) -> (64, columns)
    zero = empty_accumulator(columns.shape[1])
    return warpgroup_mma(ds.permute((1, 0)), columns, zero, use_acc=False, is_async=True)


# P, recomputed from Q K^T and the log-sum-exp.
#
# A block of scores is transposed, (64 keys, columns of queries): in the layout `accumulator`, a
# thread has two keys, and two of every eight queries.


@gluon.jit
def probabilities(
    s, lse_log2, keys, bits, kept, place, slope, scale, score, IS_MASKED: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """P of a block, and the factor of dP - delta in dS: P times the derivatives of softcap and of
    a score function. Both are negative where dropout drops P.

    `lse_log2` (columns,) is +inf for rows that saw no key, and after the last row; `place` has the
    first row; `slope` is ALiBi's slope in base 2; `bits` are those of a block mask, and `kept` of
    dropout.
    """
    m0 = place.first_column
    if cfg.HAS_SOFTCAP:
        t = tanh_of_scores(s * (scale / score.softcap))
        capped, factor_log2 = t, score.softcap * LOG2E
    else:
        capped, factor_log2 = s, scale * LOG2E
    if cfg.SCORE_MOD is not None:
        capped = capped * (score.softcap if cfg.HAS_SOFTCAP else scale)
        s = modified(capped, place, keys.shift, score, True, cfg)
        exponent = s * LOG2E - lse_log2[None, :]
    else:
        exponent = capped * factor_log2 - lse_log2[None, :]
    if cfg.HAS_ALIBI:
        exponent = with_alibi(exponent, slope, place, keys.shift, True)
    if IS_MASKED:
        if cfg.SPANS > 0:
            exponent = masked_by_intervals(exponent, keys, m0, cfg)
        else:
            exponent = masked_rows(exponent, -float("inf"), keys.start - m0, keys.stop - m0, cfg)
        if cfg.HAS_BLOCK_MASK:
            exponent = masked_by_bits(exponent, bits)
    # (64, BLOCK_M), as are S^T, dP^T and the factor
    p = gl.exp2(exponent)
    if cfg.HAS_DROPOUT:
        p = negative_where_dropped(p, kept)
    factor = p
    if cfg.SCORE_GRADIENT is not None:
        factor = modified_gradient(capped, p, place, keys.shift, score, cfg)
        if IS_MASKED or cfg.HAS_LISTS:  # the function may give NaN; in lists past the end, too
            p, factor = without_hidden(p, factor, lse_log2)
    if cfg.HAS_SOFTCAP:
        factor = factor * (1.0 - t * t)
    return p, factor


@gluon.jit
def without_hidden(p, factor, lse_log2):
    """P and its factor, zero where P is and in rows that saw no key."""
    # (64, BLOCK_M)
    seen = (p != 0.0) & (lse_log2 != float("inf"))[None, :]
    return gl.where(seen, p, 0.0), gl.where(seen, factor, 0.0)


@gluon.jit
def kept_by_dropout(ME: gl.constexpr, m, draws, work, cfg: gl.constexpr):
    """The bits of the scores of block `m` and a consumer's keys that dropout keeps; `m` without
    dropout.
    """
    kept = m
    if cfg.HAS_DROPOUT:
        n0 = work.n0 + ME * CONSUMER_ROWS
        kept = kept_queries(m * cfg.BLOCK_M, n0, draws, cfg.BLOCK_M, cfg.DROPOUT_BITS)
    return kept


@gluon.jit
def kept_probabilities(p, dtype: gl.constexpr, cfg: gl.constexpr):
    """P from `probabilities`, rounded; zero where dropout drops it."""
    if cfg.HAS_DROPOUT:
        p = gl.maximum(p, 0.0, tl.PropagateNan.ALL)
    return p.to(dtype)


@gluon.jit
def score_gradient(factor, dp, minus_delta, cfg: gl.constexpr):
    """dS = |factor| (dP - delta), with the factor of `probabilities`; where that is negative,
    dropout dropped P, and dP counts as zero. `minus_delta` is (columns,).
    """
    # (64, BLOCK_M)
    if cfg.HAS_DROPOUT:
        dp = gl.where(factor < 0.0, minus_delta[None, :], dp)
        factor = gl.abs(factor)
    return factor * dp


@gluon.jit
def rows_or_zeros(x, there):
    """16-bit `x` (64, columns), zero in the rows that are not `there` (64,), two numbers with each
    instruction.

    dS of keys past the end: their rows of K are zero, but with a log-sum-exp below zero their P may
    be inf, and dQ = dS K would be NaN. Only their dV, which is not stored, depends on their P.
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    kept = gl.convert_layout(gl.where(there, -1, 0), LAYOUT, assert_trivial=True)[:, None]
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r,r", [x, kept], dtype=x.dtype, is_pure=True, pack=2
    )


@gluon.jit
def bits_of(position, keys, cfg: gl.constexpr):
    """The bits of a position of the list of a block mask, for the keys of this consumer."""
    bits = position
    if cfg.HAS_BLOCK_MASK:
        tile = gl.load(keys.entries + (entry_size(cfg) * position + 1)).to(gl.int64)
        bits = load_bits(keys.masks + tile * (cfg.BLOCK_N * cfg.BLOCK_M // 32), cfg.BLOCK_M)
    return bits


@gluon.jit
def masked_by_intervals(x, keys, m0, cfg: gl.constexpr):
    """-inf where a key is in no interval of the query of its column; `m0` is the first query."""
    SPANS: gl.constexpr = cfg.SPANS
    COLUMNS: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = x.type.layout
    ptr = keys.masks + 2 * SPANS * m0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    key = gl.convert_layout(keys.number, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
    # (64, COLUMNS)
    visible = (key >= gl.load(ptr)[None, :]) & (key < gl.load(ptr + COLUMNS)[None, :])
    for r in gl.static_range(1, SPANS):
        start, stop = gl.load(ptr + 2 * r * COLUMNS), gl.load(ptr + (2 * r + 1) * COLUMNS)
        visible = visible | ((key >= start[None, :]) & (key < stop[None, :]))
    return gl.where(visible, x, -float("inf"))


@gluon.jit
def masked_rows(x, hidden, start, stop, cfg: gl.constexpr):
    """Replace columns of `x` outside their key's [start, stop), both (64,), with `hidden`."""
    COLUMNS: gl.constexpr = x.shape[1]
    # (64, COLUMNS / 8, 8)
    by_eights = x.reshape([64, COLUMNS // 8, 8])
    LAYOUT: gl.constexpr = by_eights.type.layout
    eight = eights(COLUMNS, LAYOUT)
    visible = eight >= bounds(start, LAYOUT)
    if cfg.HAS_LEFT or cfg.HAS_CHUNK or has_masked_end(cfg):
        visible = visible & (eight < bounds(stop, LAYOUT))
    by_eights = gl.where(visible, by_eights, hidden)
    return gl.convert_layout(by_eights.reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def eights(COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """(1, COLUMNS / 8, 1): the first query of each eight of a block; see `softmax.eights`."""
    COUNT: gl.constexpr = COLUMNS // 8
    eight = 8 * gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return eight[None, :, None]


# A consumer up to 128 columns: one warpgroup, with half of a tile's keys. P^T and dS^T stay in the
# consumer's registers. dS^T also goes to shared memory, because dQ needs dS^T of both consumers.
# Each computes half of the rows or columns of dQ; with a tail, one computes the columns of the
# tile, the other those of the tail.
#
# The exponentials of a step overlap with dP^T. S^T of the next step overlaps with the end of this
# step, and so does the load of its log-sum-exp if registers allow.
#
# dQ of a step is computed in the next step, from a ring of dS^T that both consumers read, so they
# need not be in the same step. dQ goes through a ring to the writer or, with
# cfg.HAS_DQ_IN_REGISTERS, directly to memory. As in the forward, one thread releases a slot of Q or
# dO after the last product that reads it; the statistics of its rows have been used by then.


NO_ROW = gl.constexpr(2**30)


@aggregate
class Keys:
    """The keys of a consumer."""

    number: gl.tensor  # (64,) index in the sequence
    start: gl.tensor  # (64,) rows that see them, [start, stop)
    stop: gl.tensor
    shift: gl.tensor  # position of row 0
    entries: gl.tensor  # pointer to the list of blocks
    masks: gl.tensor  # pointer to the keys of the first tile of bits, or to the rows' intervals
    dead: gl.tensor  # `first_seeing_row`

    @gluon.constexpr_function
    def __init__(self, number, start, stop, shift, entries, masks, dead):
        self.number = number
        self.start = start
        self.stop = stop
        self.shift = shift
        self.entries = entries
        self.masks = masks
        self.dead = dead


@aggregate
class KeySums:
    """dK / scale and dV of this consumer's keys so far."""

    dk: gl.tensor  # (64, BLOCK_D)
    dv: gl.tensor
    dk_tail: gl.tensor  # (64, TAIL_D), or a number if there is no tail
    dv_tail: gl.tensor

    @gluon.constexpr_function
    def __init__(self, dk, dv, dk_tail, dv_tail):
        self.dk = dk
        self.dv = dv
        self.dk_tail = dk_tail
        self.dv_tail = dv_tail


@gluon.jit
def no_sums(i, cfg: gl.constexpr):
    """The sums before the first step."""
    dk_tail = i * 0
    dv_tail = i * 0
    if cfg.TAIL_D > 0:
        dk_tail = opaque_zeros(cfg.TAIL_D)
        dv_tail = opaque_zeros(cfg.TAIL_D)
    return KeySums(opaque_zeros(cfg.BLOCK_D), opaque_zeros(cfg.BLOCK_D), dk_tail, dv_tail)


@gluon.jit
def consumer(
    ME: gl.constexpr, outputs, channels, tile, sizes, at, mask, score, cfg: gl.constexpr
):  # fmt: skip
    """dK and dV of this consumer's half of a tile of keys, and its share of dQ."""
    if cfg.IS_PERSISTENT:
        consume_tiles(ME, outputs, channels, sizes, mask, score, cfg)
    else:
        consume_tile(ME, outputs, channels, tile, sizes, at, mask, score, cfg)


@gluon.jit
def consume_tiles(ME: gl.constexpr, outputs, channels, sizes, mask, score, cfg: gl.constexpr):
    """The tiles of a persistent program, until there are no more."""
    count = 0  # tiles so far
    i = 0  # steps so far
    channels.work.acquire(count)
    work = read_key_work(channels.work, count, sizes, CONSUMER_WARPS, cfg)
    while work.begin < work.end:
        sums, i = query_loop(ME, count, i, outputs, channels, work, sizes, mask, score, cfg)
        work = read_key_work(channels.work, count, sizes, CONSUMER_WARPS, cfg)  # saves registers
        store_gradients(ME, sums, outputs, channels, work, sizes, score.scale, cfg)
        channels.work.release(count)
        count += 1
        channels.work.acquire(count)
        work = read_key_work(channels.work, count, sizes, CONSUMER_WARPS, cfg)
    tma.store_wait(0)


@gluon.jit
def consume_tile(
    ME: gl.constexpr, outputs, channels, tile, sizes, at, mask, score, cfg: gl.constexpr
):  # fmt: skip
    """The tile of a program that has only one."""
    work = key_work(tile, sizes, at, mask, cfg)
    if work.end > work.begin:
        zero = work.n * 0
        sums, _ = query_loop(ME, 0, zero, outputs, channels, work, sizes, mask, score, cfg)
        if cfg.IS_PARTED:
            store_parts(ME, sums, outputs, work, sizes, at, cfg)
        else:
            store_gradients(ME, sums, outputs, channels, work, sizes, score.scale, cfg)
        tma.store_wait(0)
    elif cfg.IS_PARTED and work.n0 < work.N:  # the kernel that adds the parts reads all of them
        store_parts(ME, no_sums(work.n, cfg), outputs, work, sizes, at, cfg)
    elif cfg.HAS_LISTS or cfg.RUNS > 0:  # no query sees the tile
        store_gradients(ME, no_sums(work.n, cfg), outputs, channels, work, sizes, score.scale, cfg)
        tma.store_wait(0)


@gluon.jit
def query_loop(
    ME: gl.constexpr, count, i, outputs, channels, work, sizes, mask, score, cfg: gl.constexpr
):  # fmt: skip
    """The loop over this program's query blocks that see the tile, head by head, after `count`
    tiles with `i` steps in all; returns `KeySums` and the number of steps so far.
    """
    channels.k.acquire(count)
    channels.v.acquire(count)
    if cfg.HAS_HIDDEN_KEYS:
        clear_keys(ME, channels, work, sizes, mask, cfg)
    sums = no_sums(work.n, cfg)
    k = own_rows(ME, channels.k, 0, False, cfg)
    v = own_rows(ME, channels.v, 0, cfg.HAS_V_IN_REGISTERS, cfg)
    total = work.stop_step - work.first_step
    gl.assume(total > 0)
    total += i
    channels.q.acquire(i)
    # (64, BLOCK_M), and (BLOCK_M,)
    s = issue_scores(k, i, channels, cfg)
    lse = statistic(channels.lse, i, cfg)
    s = warpgroup_mma_wait(0, deps=[s])
    if cfg.STAGGER > 0 and ME == 1:
        wait_cycles(total, cfg.STAGGER)
    if cfg.IS_PERSISTENT:  # dK and dV of the previous tile have left the ring of dS
        tma.store_wait(0)
        fence_async_shared()
        sync_warps()
        if count > 0:
            channels.ds.release_operand(i + count - 1)
    # The first slot has the dS of no step, and the dQ that is computed from it is not added.
    arrive_alone(channels.ds.full.index((i + count) % 2))
    sync_warps()  # otherwise the compiler inserts a barrier into the loop
    HAS_MASKED_END: gl.constexpr = ends_masked(cfg)
    added = 0  # block of the workspace in the previous step
    first_head, stop_head = own_heads(work, sizes, cfg)
    for g in range(first_head, stop_head):
        h = work.kv_head * sizes.group + g
        base = h * sizes.blocks + work.first_block  # first block of the head in the workspace
        slope = alibi_slope(work.b, h, score, cfg)
        draws = draws_of(work.b, h, score.dropout, cfg)
        listed = listed_blocks(g, work.end - work.begin, work, sizes, mask, cfg)
        keys = keys_of(ME, listed, work, mask, opaque_zero(g), cfg)
        begin, full_begin, full_end, end = own_blocks(g, listed, work, cfg)
        m = first_block_of(begin, end, cfg)
        before, after = end - full_end, full_begin - begin
        if cfg.IS_ASCENDING:
            before, after = after, before
        if cfg.IS_ASCENDING or HAS_MASKED_END:
            for _ in range(before):
                s, lse, sums, added = step(
                    ME, s, lse, sums, added, count, i, total, m, base, slope, draws, keys, v,
                    outputs, channels, work, score, True, cfg,
                )  # fmt: skip
                i += 1
                m = next_block(m, cfg)
        if cfg.FULL_STAGGER > 0 and ME == 1 and full_begin < full_end:
            wait_cycles(i, cfg.FULL_STAGGER)
        for _ in range(full_begin, full_end):
            s, lse, sums, added = step(
                ME, s, lse, sums, added, count, i, total, m, base, slope, draws, keys, v, outputs,
                channels, work, score, False, cfg,
            )  # fmt: skip
            i += 1
            m = next_block(m, cfg)
        if (HAS_MASKED_END or not cfg.IS_ASCENDING) and not cfg.HAS_LISTS:
            if cfg.SCORE_MOD is not None:  # otherwise registers hold them
                keys = keys_of(ME, listed, work, mask, opaque_zero(i), cfg)
            for _ in range(after):
                s, lse, sums, added = step(
                    ME, s, lse, sums, added, count, i, total, m, base, slope, draws, keys, v,
                    outputs, channels, work, score, True, cfg,
                )  # fmt: skip
                i += 1
                m = next_block(m, cfg)
    if cfg.IS_PERSISTENT:
        channels.v.release_operand(0)
    j = i + count
    channels.ds.acquire(j)
    # (64, piece_columns)
    dq = issue_dq(ME, whole_tile(channels.k, 0), j, channels.ds.tiles, cfg)
    dq = warpgroup_mma_wait(0, deps=[dq])
    if cfg.IS_PERSISTENT:
        channels.k.release_operand(0)
    emit_dq(ME, dq, j, added, outputs, channels.staging, cfg)
    return sums, i


@gluon.jit
def step(
    ME: gl.constexpr, s, lse, sums, added, count, i, total, m, base, slope, draws, keys, v,
    outputs, channels, work, score, IS_MASKED: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Process one block of queries: add to `sums` and dQ, and compute S^T of the next block. It is
    step `i` of all `count` tiles so far and this one.
    """
    dtype: gl.constexpr = channels.q.tiles.dtype
    zero = opaque_zero(i)
    if cfg.IS_PERSISTENT or (cfg.SCORE_MOD is not None and cfg.BLOCK_M == 128):
        i = natural(i)
    all_keys = whole_tile(channels.k, zero)
    k = own_rows(ME, channels.k, zero, False, cfg)
    bits = bits_of(m, keys, cfg)
    m = block_at(m, keys.entries, cfg)
    if IS_MASKED and cfg.HAS_DEAD_ROWS:
        rows = kept_rows(m, keys.dead, channels.lse.index(i % cfg.Q_STAGES), cfg)
        clear_queries(ME, channels, i, rows, cfg)
    channels.dout.acquire(i)
    if not cfg.HAS_V_IN_REGISTERS:
        v = own_rows(ME, channels.v, zero, False, cfg)
    # (64, BLOCK_M)
    dp = issue_dp(v, statistic(channels.delta, i, cfg), i, channels, cfg)
    scale = score.scale
    if cfg.IS_DP_FIRST:
        scale = after_products(scale, i)
    if not cfg.HAS_CARRIED_LSE:
        lse = statistic(channels.lse, i, cfg)
    key = work.n0 + ME * CONSUMER_ROWS + (zero if cfg.HAS_ALIBI and cfg.HAS_LISTS else 0)
    place = Place(work.b, draws.h, key, m * cfg.BLOCK_M)
    kept = kept_by_dropout(ME, m, draws, work, cfg)
    IS_P_MASKED: gl.constexpr = IS_MASKED and has_hidden_scores(cfg)
    p, factor = probabilities(
        s, lse, keys, bits, kept, place, slope, scale, score, IS_P_MASKED, cfg
    )
    p = kept_probabilities(p, dtype, cfg)
    s, lse, sums = end_of_step(
        ME, p, factor, dp, lse, sums, added, count, i, total, keys, k, all_keys, outputs, channels,
        IS_MASKED and not IS_P_MASKED, cfg,
    )  # fmt: skip
    added = base + m
    return s, lse, sums, added


@gluon.jit
def end_of_step(
    ME: gl.constexpr, p, factor, dp, lse, sums, added, count, i, total, keys, k, all_keys, outputs,
    channels, IS_MASKED: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """The part of a step after P, and dQ of the previous step; IS_MASKED if dS of keys past the end
    is masked instead of P.
    """
    dtype: gl.constexpr = p.dtype
    PARTS: gl.constexpr = products_along(cfg)
    # Uses of the rings of dS and dQ, of which each tile's first one belongs to no step.
    j = natural(i + count) if cfg.IS_PERSISTENT else i
    # (64, BLOCK_D), (64, TAIL_D), as dK
    dv, dv_tail = add_product(p, channels.dout, i, sums.dv, sums.dv_tail, cfg)
    dp = warpgroup_mma_wait(PARTS, deps=[dp])
    minus_delta = factor
    if cfg.HAS_DROPOUT:  # loaded again: all warps have it when they meet, before the release
        minus_delta = statistic(channels.delta, i, cfg)
    # (64, BLOCK_M)
    ds = score_gradient(factor, dp, minus_delta, cfg).to(dtype)
    if IS_MASKED:
        ds = rows_or_zeros(ds, keys.stop > 0)
    dk, dk_tail = add_product(ds, channels.q, i, sums.dk, sums.dk_tail, cfg)
    if cfg.IS_DQ_FIRST:
        channels.ds.acquire(j)
        dq = issue_dq(ME, all_keys, j, channels.ds.tiles, cfg)
    await_empty(channels.ds, j + 1)
    shared_half(ME, channels.ds.tiles, j + 1, cfg).store(ds)
    fence_async_shared()
    if not cfg.IS_DQ_FIRST:
        channels.ds.acquire(j)
    sync_warps()
    arrive_alone(channels.ds.full.index((j + 1) % 2))
    if not cfg.IS_DQ_FIRST:
        dq = issue_dq(ME, all_keys, j, channels.ds.tiles, cfg)
    if PARTS == 1:
        dv = warpgroup_mma_wait(2, deps=[dv])
    else:
        dv, dv_tail = warpgroup_mma_wait(3, deps=[dv, dv_tail])
    channels.dout.release_operand(i)  # dP and dV have read it; delta went into dP
    # After the last block, S^T is computed from old contents of the slot, and nothing reads it.
    acquire_if(channels.q, i + 1, i + 1 < total)
    # (64, BLOCK_M)
    s = issue_scores(k, i + 1, channels, cfg)
    if PARTS == 1:
        dk, dq = warpgroup_mma_wait(1, deps=[dk, dq])
    else:
        dk, dk_tail, dq = warpgroup_mma_wait(2, deps=[dk, dk_tail, dq])
    channels.ds.release_operand(j)
    if cfg.HAS_CARRIED_LSE:
        lse = statistic(channels.lse, i + 1, cfg)
    channels.q.release_operand(i)  # S^T (a step ago) and dK have read it; lse went into dV
    emit_dq(ME, dq, j, added, outputs, channels.staging, cfg)
    s = warpgroup_mma_wait(0, deps=[s])
    return s, lse, KeySums(dk, dv, dk_tail, dv_tail)


@gluon.jit
def natural(i):
    """`i`; the compiler then knows that i + 1 is not negative, so that halves are shifts."""
    return i & 0x3FFFFFFF


@gluon.jit
def add_product(left, rows, i, x, x_tail, cfg: gl.constexpr):
    """Start adding `left` (64, BLOCK_M), P^T or dS^T, times block `i` of dO or Q to dV or dK."""
    COLUMNS: gl.constexpr = rows.tiles.shape[4]
    operand = gl.convert_layout(left, left_operand(COLUMNS), assert_trivial=True)
    # (64, BLOCK_M) @ (BLOCK_M, columns) -> (64, columns)
    x = warpgroup_mma(operand, rows_tile(rows, i, cfg), x, is_async=True)
    if rows.TAIL > 0:
        operand = gl.convert_layout(left, left_operand(rows.TAIL), assert_trivial=True)
        # (64, BLOCK_M) @ (BLOCK_M, TAIL) -> (64, TAIL)
        x_tail = warpgroup_mma(operand, rows_tail(rows, i, cfg), x_tail, is_async=True)
    return x, x_tail


@gluon.jit
def emit_dq(ME: gl.constexpr, dq, j, block, outputs, staging, cfg: gl.constexpr):
    """Add this consumer's half of dQ of the step before use `j` to block `block` of the workspace,
    or pass it to the writer.
    """
    if not cfg.HAS_DQ_IN_REGISTERS:
        put_piece(ME, dq, staging, j, cfg)
    elif j > 0:
        add_at_once(ME, dq, block, outputs.workspace, cfg)


@gluon.jit
def keys_of(ME: gl.constexpr, listed, work, mask, zero, cfg: gl.constexpr):
    """The keys of this consumer; no row sees those past the end.

    `zero` is opaque, so that every head computes the keys again; they then need no registers in the
    unmasked loop.
    """
    number = work.n0 + zero + gl.arange(0, CONSUMER_ROWS, layout=row_values(cfg.BLOCK_M))
    number += ME * CONSUMER_ROWS
    shift = work.N - work.M
    rows = rows_to_mask(work.M, cfg)
    start, stop = seeing_rows(number, work.b, rows, shift, mask, cfg)
    real = number < work.N
    masks = shift
    if cfg.HAS_BLOCK_MASK:
        masks = mask.blocks.bits + ME * (CONSUMER_ROWS * cfg.BLOCK_M // 32)
    if cfg.SPANS > 0:
        masks = listed.intervals
    start, stop = gl.where(real, start, NO_ROW), gl.where(real, stop, 0)
    dead = shift
    if cfg.HAS_DEAD_ROWS and not cfg.HAS_LISTS:
        dead = first_seeing_row(work, mask, cfg)
    return Keys(number, start, stop, shift, listed.entries, masks, dead)


@gluon.jit
def await_empty(channel, i):
    """Wait until slot `i` may be written."""
    slot = i % channel.SLOTS
    mbarrier.wait(channel.empty.index(slot), ((i // channel.SLOTS) & 1) ^ 1)


@gluon.jit
def acquire_if(channel, i, there):
    """Wait until slot `i` is full, if `there`."""
    slot = i % channel.SLOTS
    mbarrier.wait(channel.full.index(slot), (i // channel.SLOTS) & 1, pred=there)


# Keys that no query sees, and queries that see no key


@gluon.jit
def clear_keys(ME: gl.constexpr, channels, work, sizes, mask, cfg: gl.constexpr):
    """Zero the rows of K and V that are not kept; both consumers zero all of them."""
    kept = kept_keys(work, sizes, mask, cfg)
    KIND: gl.constexpr = kind_of_keys(cfg)
    if has_cleared(kept, KIND, cfg.BLOCK_N):
        clear_rows(channels.k.tile(0).reshape([cfg.BLOCK_N, cfg.BLOCK_D]), kept, KIND)
        clear_rows(channels.v.tile(0).reshape([cfg.BLOCK_N, cfg.BLOCK_D]), kept, KIND)
        if cfg.TAIL_D > 0:
            clear_rows(channels.k.tail(0).reshape([cfg.BLOCK_N, cfg.TAIL_D]), kept, KIND)
            clear_rows(channels.v.tail(0).reshape([cfg.BLOCK_N, cfg.TAIL_D]), kept, KIND)
        show_written(FIRST_BARRIER + 1 + ME)


@gluon.jit
def clear_queries(ME: gl.constexpr, channels, i, kept, cfg: gl.constexpr):
    """Zero the rows of a block of Q and dO that are not kept. S^T is masked there, so no consumer
    waits for the other.
    """
    KIND: gl.constexpr = kind_of_rows(cfg)
    if has_cleared(kept, KIND, cfg.BLOCK_M):
        channels.dout.acquire(i)
        clear_rows(rows_tile(channels.q, i, cfg), kept, KIND)
        clear_rows(rows_tile(channels.dout, i, cfg), kept, KIND)
        if cfg.TAIL_D > 0:
            clear_rows(rows_tail(channels.q, i, cfg), kept, KIND)
            clear_rows(rows_tail(channels.dout, i, cfg), kept, KIND)
        if cfg.HAS_DEAD_ROWS:  # with a sink, delta has the gradient of the log-sum-exp
            clear_numbers(channels.delta.index(i % cfg.DO_STAGES), kept, KIND, cfg.BLOCK_M)
        show_written(FIRST_BARRIER + 1 + ME)


# Results


@gluon.jit
def store_parts(ME: gl.constexpr, sums, outputs, work, sizes, at, cfg: gl.constexpr):
    """Store a program's sums for the kernel that adds them."""
    plain = outputs.plain
    store_part(ME, sums.dv, sums.dv_tail, cfg.TAIL_DV, plain.dv, work, sizes, at, cfg)
    store_part(ME, sums.dk, sums.dk_tail, cfg.TAIL_D, plain.dk, work, sizes, at, cfg)


@gluon.jit
def store_gradients(
    ME: gl.constexpr, sums, outputs, channels, work, sizes, scale, cfg: gl.constexpr
):  # fmt: skip
    """Store dK and dV of this consumer's keys."""
    # The other consumer's last products also read the slots of Q and dO, which are overwritten now.
    wait_at_barrier(FIRST_BARRIER, 256)
    dv, dk, plain = outputs.dv, outputs.dk, outputs.plain
    x = sums.dk * scale
    if cfg.IS_PERSISTENT:  # the next tile's Q and dO are already in their slots
        row = work.n0 + ME * CONSUMER_ROWS
        tiles = through_ds(channels.ds, cfg)
        store_rows(sums.dv, tiles.index(ME), row, 0, dv.tiles, plain.dv, cfg.DV, work, sizes, cfg)
        if tiles.shape[0] == 2:
            tma.store_wait(0)
        tile = tiles.index(tiles.shape[0] - 2 + ME)
        store_rows(x, tile, row, 0, dk.tiles, plain.dk, cfg.D, work, sizes, cfg)
    else:
        store_gradient(ME, sums.dv, False, channels.dout, dv, plain.dv, cfg.DV, work, sizes, cfg)
        if cfg.TAIL_D > 0:
            tail = sums.dv_tail
            store_gradient(ME, tail, True, channels.dout, dv, plain.dv, cfg.DV, work, sizes, cfg)
        store_gradient(ME, x, False, channels.q, dk, plain.dk, cfg.D, work, sizes, cfg)
        if cfg.TAIL_D > 0:
            x_tail = sums.dk_tail * scale
            store_gradient(ME, x_tail, True, channels.q, dk, plain.dk, cfg.D, work, sizes, cfg)


@gluon.jit
def through_ds(ds, cfg: gl.constexpr):
    """The ring of dS as tiles (1, 64, 1, BLOCK_D): two, or more."""
    TILES: gl.constexpr = 4 * cfg.BLOCK_M // cfg.BLOCK_D
    shape: gl.constexpr = [TILES, 1, CONSUMER_ROWS, 1, cfg.BLOCK_D]
    return recast(ds.tiles, ds.tiles.dtype, shape, shared_rows(cfg.BLOCK_D))


@gluon.jit
def store_gradient(
    ME: gl.constexpr, x, IS_TAIL: gl.constexpr, channel, described, ptr, DIM: gl.constexpr, work,
    sizes, cfg: gl.constexpr,
):  # fmt: skip
    """Store this consumer's half of dK or dV, or its tail, through the ring of `channel`: by TMA,
    which clips at the end of the sequence.
    """
    slots = channel.tails if IS_TAIL else channel.tiles
    desc = described.tails if IS_TAIL else described.tiles
    COLUMNS: gl.constexpr = cfg.TAIL_D if IS_TAIL else cfg.BLOCK_D
    FIRST: gl.constexpr = cfg.BLOCK_D if IS_TAIL else 0
    TILES: gl.constexpr = channel.SLOTS * cfg.BLOCK_M // CONSUMER_ROWS
    shape: gl.constexpr = [TILES, 1, CONSUMER_ROWS, 1, COLUMNS]
    tile = recast(slots, slots.dtype, shape, shared_rows(COLUMNS)).index(ME)
    row = work.n0 + ME * CONSUMER_ROWS
    store_rows(x, tile, row, FIRST, desc, ptr, DIM, work, sizes, cfg)


@gluon.jit
def store_rows(
    x, tile, row, COLUMN: gl.constexpr, desc, ptr, DIM: gl.constexpr, work, sizes,
    cfg: gl.constexpr,
):  # fmt: skip
    """Store `x` (64, columns) at `row` and COLUMN of dK or dV; rounded values go through `tile`."""
    start, N, head = work.start_k, work.N, work.kv_head
    if cfg.IS_PARTIAL:
        store_float32(x, ptr, row, COLUMN, DIM, start, N, head, sizes.heads)
    else:
        COLUMNS: gl.constexpr = x.shape[1]
        tile.reshape([CONSUMER_ROWS, COLUMNS]).store(x.to(tile.dtype))
        fence_async_shared()
        box = box_at(BoxRows(work.b, start, N, row, head), COLUMN, cfg.IS_PACKED)
        copy_to_global(desc, box, tile.reshape(desc.block_shape))


# The consumers above 128 columns. A tile has 64 keys. The registers of a consumer hold dV or dK of
# all of them, but not both. So the value consumer computes S^T = K Q^T, P and dV += P^T dO, and the
# key consumer dP^T = V dO^T, dS and dK += dS^T Q. P, with softcap or a score function times its
# derivative, goes through shared memory in the order of the registers, because both consumers hold
# scores in the same layout. Each consumer multiplies its P^T or dS^T from registers. dS^T is also
# in shared memory, for dQ = dS K: the key consumer computes its first columns, the value consumer
# the others.
#
# There is one slot for P and one for dS^T, and neither needs a barrier that says it is empty:
#
# - P of step i + 1 is stored after dS^T of step i is full, and the key consumer has read P by then;
# - dS^T of step i + 1 is stored after P of step i + 1 is full, and the value consumer has completed
#   its dQ of step i by then.
#
# The value consumer computes S^T of the next step while the key consumer computes dS. It computes
# the last columns of dQ, the tail or 64, in the next step, during the exponentials, which also
# overlap with products of the key consumer. Tiles of values have as few columns as the values need.


# Indices of the consumers: of their hardware barriers.
VALUES = gl.constexpr(0)
KEYS = gl.constexpr(1)


@gluon.constexpr_function
def exchange_layout():
    """P, 16-bit (64, 64), in register order: eight registers of a thread of an `accumulator`, then
    the thread, then the other registers. No two threads share a bank.
    """
    return gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 16],
         [0, 32]]
    )  # fmt: skip


@gluon.jit
def exchanged(channels):
    """The slot of P."""
    p = channels.p.tiles
    return recast(p, p.dtype, [CONSUMER_ROWS, CONSUMER_ROWS], exchange_layout())


@gluon.jit
def no_sum(zero, BLOCK_D: gl.constexpr, TAIL_D: gl.constexpr):
    """dK or dV before the first step, and its tail: a number if there is no tail."""
    tail = zero
    if TAIL_D > 0:
        tail = opaque_zeros(TAIL_D)
    return opaque_zeros(BLOCK_D), tail


@gluon.jit
def wait_for_sum(PENDING: gl.constexpr, x, tail, TAIL_D: gl.constexpr):
    """Wait until at most PENDING products are in flight, and `x` and its tail are not."""
    if TAIL_D > 0:
        x, tail = warpgroup_mma_wait(PENDING, deps=[x, tail])
    else:
        x = warpgroup_mma_wait(PENDING, deps=[x])
    return x, tail


# The value consumer


@gluon.jit
def value_consumer(outputs, channels, tile, sizes, at, mask, score, cfg: gl.constexpr):
    """dV of a tile of keys, and the last columns of its dQ."""
    work = key_work(tile, sizes, at, mask, cfg)
    if work.end > work.begin:
        dv, tail = value_loop(outputs, channels, work, sizes, mask, score, cfg)
        if cfg.IS_PARTED:
            store_part(0, dv, tail, cfg.TAIL_DV, outputs.plain.dv, work, sizes, at, cfg)
        else:
            # The key consumer read dO for the last time before the last dS^T, which is full.
            store_sum(
                dv, tail, channels.dout, outputs.dv, outputs.plain.dv, cfg.DV, work, sizes, cfg
            )
        tma.store_wait(0)
    elif cfg.IS_PARTED and work.n0 < work.N:  # the kernel that adds the parts reads all of them
        dv, tail = no_sum(work.n, cfg.BLOCK_DV, cfg.TAIL_DV)
        store_part(0, dv, tail, cfg.TAIL_DV, outputs.plain.dv, work, sizes, at, cfg)
    elif cfg.HAS_LISTS or cfg.RUNS > 0:  # no query sees the tile
        dv, tail = no_sum(work.n, cfg.BLOCK_DV, cfg.TAIL_DV)
        store_sum(dv, tail, channels.dout, outputs.dv, outputs.plain.dv, cfg.DV, work, sizes, cfg)
        tma.store_wait(0)


@gluon.jit
def value_loop(outputs, channels, work, sizes, mask, score, cfg: gl.constexpr):
    """The loop over this program's query blocks that see the tile, head by head; returns dV."""
    channels.k.acquire(0)
    if cfg.HAS_HIDDEN_KEYS:
        kept = kept_keys(work, sizes, mask, cfg)
        clear_slot(VALUES, channels.k, 0, kept, kind_of_keys(cfg), None, cfg)
    dv, tail = no_sum(work.n, cfg.BLOCK_DV, cfg.TAIL_DV)
    total = work.stop_step - work.first_step
    gl.assume(total > 0)
    channels.q.acquire(0)
    k = own_rows(0, channels.k, 0, cfg.HAS_K_IN_REGISTERS, cfg)
    # (64, BLOCK_M)
    s = issue_scores(k, 0, channels, cfg)
    s = warpgroup_mma_wait(0, deps=[s])
    i = 0
    added = 0  # block of the workspace in the previous step
    first_head, stop_head = own_heads(work, sizes, cfg)
    for g in range(first_head, stop_head):
        h = work.kv_head * sizes.group + g
        base = h * sizes.blocks + work.first_block  # first block of the head in the workspace
        slope = alibi_slope(work.b, h, score, cfg)
        draws = draws_of(work.b, h, score.dropout, cfg)
        listed = listed_blocks(g, work.end - work.begin, work, sizes, mask, cfg)
        keys = keys_of(0, listed, work, mask, opaque_zero(g), cfg)
        begin, full_begin, full_end, end = own_blocks(g, listed, work, cfg)
        m = end - 1
        if ends_masked(cfg):
            for _ in range(full_end, end):
                s, dv, tail, added = value_step(
                    s, dv, tail, added, i, total, m, base, slope, draws, keys, k, outputs, channels,
                    work, score, True, cfg,
                )  # fmt: skip
                i += 1
                m -= 1
        for _ in range(full_begin, full_end):
            s, dv, tail, added = value_step(
                s, dv, tail, added, i, total, m, base, slope, draws, keys, k, outputs, channels,
                work, score, False, cfg,
            )  # fmt: skip
            i += 1
            m -= 1
        if not cfg.HAS_LISTS:
            for _ in range(begin, full_begin):
                s, dv, tail, added = value_step(
                    s, dv, tail, added, i, total, m, base, slope, draws, keys, k, outputs, channels,
                    work, score, True, cfg,
                )  # fmt: skip
                i += 1
                m -= 1
    LAST: gl.constexpr = first_of_last(cfg)
    dq = issue_columns_of_dq(LAST, last_columns(cfg), whole_tile(channels.k, 0), channels, cfg)
    dq = warpgroup_mma_wait(0, deps=[dq])
    PUTS: gl.constexpr = value_puts(cfg)
    staging = channels.staging.of_values
    emit_pieces(dq, staging, LAST, i - 1, PUTS - 1, PUTS, added, outputs, cfg)
    return dv, tail


@gluon.jit
def value_step(
    s, dv, tail, added, i, total, m, base, slope, draws, keys, k, outputs, channels, work,
    score, IS_MASKED: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Process one block of queries: pass P on, add to dV and dQ, compute S^T of the next block."""
    dtype: gl.constexpr = channels.q.tiles.dtype
    zero = opaque_zero(i)
    all_keys = whole_tile(channels.k, zero)
    if not cfg.HAS_K_IN_REGISTERS:
        k = own_rows(0, channels.k, zero, False, cfg)
    LAST: gl.constexpr = first_of_last(cfg)
    PUTS: gl.constexpr = value_puts(cfg)
    staging = channels.staging.of_values
    bits = bits_of(m, keys, cfg)
    m = block_at(m, keys.entries, cfg)
    dq = issue_columns_of_dq(
        LAST, last_columns(cfg), all_keys, channels, cfg
    )  # of the previous step, if any
    lse = statistic(channels.lse, i, cfg)
    place = Place(work.b, draws.h, work.n0, m * cfg.BLOCK_M)
    if IS_MASKED and cfg.HAS_DEAD_ROWS:  # before Q and its lse are released
        rows = kept_rows(m, keys.dead, channels.lse.index(i % cfg.Q_STAGES), cfg)
        clear_slot(VALUES, channels.dout, i, rows, kind_of_rows(cfg), None, cfg)
    kept = kept_by_dropout(0, m, draws, work, cfg)
    # (64, BLOCK_M)
    p, factor = probabilities(
        s, lse, keys, bits, kept, place, slope, score.scale, score, IS_MASKED, cfg
    )
    p = kept_probabilities(p, dtype, cfg)
    if cfg.HAS_SOFTCAP or cfg.SCORE_GRADIENT is not None or cfg.HAS_DROPOUT:
        factor = factor.to(dtype)
    else:
        factor = p
    exchanged(channels).store(factor)
    dq = warpgroup_mma_wait(0, deps=[dq])  # the other consumer may write dS now
    sync_warps()
    arrive_alone(channels.p.full.index(0))
    arrive_alone(channels.q.empty.index(i % cfg.Q_STAGES))  # S^T and all exponentials are done
    channels.dout.acquire(i)
    # (64, BLOCK_DV), (64, TAIL_DV)
    dv, tail = add_product(p, channels.dout, i, dv, tail, cfg)
    # After the last block, S^T is computed from old contents of the slot, and nothing reads it.
    acquire_if(channels.q, i + 1, i + 1 < total)
    # (64, BLOCK_M)
    s = issue_scores(k, i + 1, channels, cfg)
    if i > 0:
        emit_pieces(dq, staging, LAST, i - 1, PUTS - 1, PUTS, added, outputs, cfg)
    dv, tail = wait_for_sum(products_along(cfg), dv, tail, cfg.TAIL_DV)
    channels.dout.release_operand(i)
    channels.ds.acquire(i)
    if PUTS == 2:
        dq = issue_columns_of_dq(KEY_COLUMNS, 64, all_keys, channels, cfg)
        s, dq = warpgroup_mma_wait(0, deps=[s, dq])
        emit_pieces(dq, staging, KEY_COLUMNS, i, 0, PUTS, base + m, outputs, cfg)
    else:
        s = warpgroup_mma_wait(0, deps=[s])
    return s, dv, tail, base + m


# The key consumer


@gluon.jit
def key_consumer(outputs, channels, tile, sizes, at, mask, score, cfg: gl.constexpr):
    """dK of a tile of keys, and the first columns of its dQ."""
    work = key_work(tile, sizes, at, mask, cfg)
    if work.end > work.begin:
        dk, tail = key_loop(outputs, channels, work, sizes, mask, cfg)
        if cfg.IS_PARTED:
            store_part(0, dk, tail, cfg.TAIL_D, outputs.plain.dk, work, sizes, at, cfg)
        else:
            dk = dk * score.scale
            if cfg.TAIL_D > 0:
                tail = tail * score.scale
            # The value consumer read Q before the last P; a later S^T is not used.
            store_sum(dk, tail, channels.q, outputs.dk, outputs.plain.dk, cfg.D, work, sizes, cfg)
        tma.store_wait(0)
    elif cfg.IS_PARTED and work.n0 < work.N:
        dk, tail = no_sum(work.n, cfg.BLOCK_D, cfg.TAIL_D)
        store_part(0, dk, tail, cfg.TAIL_D, outputs.plain.dk, work, sizes, at, cfg)
    elif cfg.HAS_LISTS or cfg.RUNS > 0:
        dk, tail = no_sum(work.n, cfg.BLOCK_D, cfg.TAIL_D)
        store_sum(dk, tail, channels.q, outputs.dk, outputs.plain.dk, cfg.D, work, sizes, cfg)
        tma.store_wait(0)


@gluon.jit
def key_loop(outputs, channels, work, sizes, mask, cfg: gl.constexpr):
    """The loop over this program's query blocks that see the tile, head by head; returns
    dK / scale.
    """
    channels.k.acquire(0)
    channels.v.acquire(0)
    if cfg.HAS_HIDDEN_KEYS:
        kept = kept_keys(work, sizes, mask, cfg)
        clear_slot(KEYS, channels.v, 0, kept, kind_of_keys(cfg), None, cfg)
    dk, tail = no_sum(work.n, cfg.BLOCK_D, cfg.TAIL_D)
    v = own_rows(0, channels.v, 0, cfg.HAS_V_IN_REGISTERS, cfg)
    dead = work.M  # with lists, any row may see no key
    if cfg.HAS_DEAD_ROWS and not cfg.HAS_LISTS:
        dead = first_seeing_row(work, mask, cfg)
    i = 0
    first_head, stop_head = own_heads(work, sizes, cfg)
    for g in range(first_head, stop_head):
        base = (work.kv_head * sizes.group + g) * sizes.blocks + work.first_block
        listed = listed_blocks(g, work.end - work.begin, work, sizes, mask, cfg)
        begin, _, _, end = own_blocks(g, listed, work, cfg)
        m = end - 1
        full_begin = begin  # the blocks before it may have rows that see no key
        if cfg.HAS_DEAD_ROWS:
            full_begin = gl.minimum(gl.maximum(gl.cdiv(dead, cfg.BLOCK_M), begin), m + 1)
        for _ in range(full_begin, m + 1):
            dk, tail = key_step(
                dk, tail, i, m, base, dead, listed, v, outputs, channels, False, cfg
            )  # fmt: skip
            i += 1
            m -= 1
        if cfg.HAS_DEAD_ROWS:
            for _ in range(begin, full_begin):
                dk, tail = key_step(
                    dk, tail, i, m, base, dead, listed, v, outputs, channels, True, cfg
                )  # fmt: skip
                i += 1
                m -= 1
    return dk, tail


@gluon.jit
def key_step(
    dk, tail, i, m, base, dead, listed, v, outputs, channels, HAS_CLEARED: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Process one block of queries: compute dS from P of the other consumer; add to dK and dQ."""
    dtype: gl.constexpr = channels.q.tiles.dtype
    KIND: gl.constexpr = kind_of_rows(cfg)
    zero = opaque_zero(i)
    m = block_at(m, listed.entries, cfg)
    channels.dout.acquire(i)
    if HAS_CLEARED:
        if cfg.HAS_DEAD_ROWS and cfg.HAS_LISTS:  # the log-sum-exp comes with Q
            channels.q.acquire(i)
        rows = kept_rows(m, dead, channels.lse.index(i % cfg.Q_STAGES), cfg)
        # With a sink, delta has the gradient of the log-sum-exp.
        delta = channels.delta.index(i % cfg.DO_STAGES)
        clear_slot(KEYS, channels.dout, i, rows, KIND, delta, cfg)
    if not cfg.HAS_V_IN_REGISTERS:
        v = own_rows(0, channels.v, zero, False, cfg)
    minus_delta = statistic(channels.delta, i, cfg)
    # (64, BLOCK_M)
    dp = issue_dp(v, minus_delta, i, channels, cfg)
    channels.p.acquire(i)
    # (64, BLOCK_M)
    factor = exchanged(channels).load(accumulator(cfg.BLOCK_M))
    dp = warpgroup_mma_wait(0, deps=[dp])
    # The product began with delta, so all warps have loaded it.
    channels.dout.release_operand(i)
    ds = score_gradient(factor.to(gl.float32), dp, minus_delta, cfg).to(dtype)
    channels.ds.tiles.index(0).store(ds)
    fence_async_shared()
    sync_warps()
    arrive_alone(channels.ds.full.index(0))
    channels.q.acquire(i)
    if HAS_CLEARED:
        clear_slot(KEYS, channels.q, i, rows, KIND, None, cfg)
    # (64, BLOCK_D), (64, TAIL_D)
    dk, tail = add_product(ds, channels.q, i, dk, tail, cfg)
    # (64, KEY_COLUMNS)
    dq = issue_columns_of_dq(0, KEY_COLUMNS, whole_tile(channels.k, zero), channels, cfg)
    dk, tail = wait_for_sum(1, dk, tail, cfg.TAIL_D)
    channels.q.release_operand(i)
    dq = warpgroup_mma_wait(0, deps=[dq])
    emit_pieces(dq, channels.staging.of_keys, 0, i, 0, 1, base + m, outputs, cfg)
    return dk, tail


# dQ


@gluon.jit
def issue_columns_of_dq(FIRST: gl.constexpr, COLUMNS: gl.constexpr, k, channels, cfg: gl.constexpr):
    """Start (64, COLUMNS) of dQ = dS K, the columns from FIRST, which are in the tile or are the
    tail.
    """
    if FIRST < cfg.BLOCK_D:
        columns = k.tile.reshape([cfg.BLOCK_N, cfg.BLOCK_D]).slice(FIRST, COLUMNS, dim=1)
    else:
        columns = k.tail.reshape([cfg.BLOCK_N, cfg.TAIL_D])
    # (64, BLOCK_N) @ (BLOCK_N, COLUMNS) -> (64, COLUMNS)
    ds = channels.ds.tiles.index(0).permute((1, 0))
    return warpgroup_mma(ds, columns, empty_accumulator(COLUMNS), use_acc=False, is_async=True)


# Keys that no query sees, and queries that see no key


@gluon.jit
def clear_slot(
    ME: gl.constexpr, channel, i, kept, KIND: gl.constexpr, statistics, cfg: gl.constexpr
):
    """Zero the rows of slot `i` that are not kept (`schedule.Kept`), and any `statistics` of them.

    Both consumers clear dO, with the same values. The value consumer also clears K, the key
    consumer V and Q. S^T is masked there, so the value consumer may read Q before or after.
    """
    if has_cleared(kept, KIND, CONSUMER_ROWS):
        channel.acquire(i)
        clear_rows(rows_tile(channel, i, cfg), kept, KIND)
        if channel.TAIL > 0:
            clear_rows(rows_tail(channel, i, cfg), kept, KIND)
        if statistics is not None:
            clear_numbers(statistics, kept, KIND, CONSUMER_ROWS)
        show_written(FIRST_BARRIER + 1 + ME)


# Results


@gluon.jit
def store_sum(
    x, tail, channel, described, ptr, DIM: gl.constexpr, work, sizes, cfg: gl.constexpr
):  # fmt: skip
    """Store dK or dV through the first slot of `channel`."""
    row = work.n0
    store_rows(x, channel.tiles.index(0), row, 0, described.tiles, ptr, DIM, work, sizes, cfg)
    if channel.TAIL > 0:
        slot = channel.tails.index(0)
        store_rows(tail, slot, row, x.shape[1], described.tails, ptr, DIM, work, sizes, cfg)


# The consumers of tiles of 128 keys with 192 columns, and values of 64 or 128.
#
# As with 64 keys, one consumer has the values and one the keys. A step processes one half of the
# keys after the other, so that registers hold the scores of 64 keys beside dV or dK of 128. A part
# of dK does not fit beside the rest: the tail of the second half, which the value consumer adds up.
# The key consumer computes dQ, 64 columns at a time, and stages them while products for dK run.
#
# P and dS^T pass through shared memory, from where products read them. Neither has a barrier that
# says that its tile is empty:
#
# - P of step i + 1 is stored after dS^T of step i is full, and the key consumer has read P by then.
# - dS^T of step i + 1 is stored after P of step i + 1 is full, and the value consumer has completed
#   its products of step i by then.
#
# A tile of 128 keys needs half as many additions to dQ and loads of Q and dO as two tiles of 64,
# and the L2 cache limits those. The plan has them for calls that need no more registers than these.


@gluon.constexpr_function
def is_wide(cfg):
    """Whether two consumers, for values and for keys, have 128 keys."""
    return cfg.IS_SPLIT and cfg.BLOCK_N == 128


@gluon.jit
def make_halves(tiles):
    """P of a step, with a full barrier for each half of the keys."""
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(full.index(1), count=1)
    return Channel(tiles, tiles, full, full, 1)


@gluon.jit
def make_pieces(workspace):
    """Two pieces of dQ on their way to memory."""
    return gl.allocate_shared_memory(gl.float32, [2, PIECE_ROWS, 256], workspace.layout)


@gluon.jit
def half_of(HALF: gl.constexpr, channel, zero):
    """P^T or dS^T of half of the keys, (64, BLOCK_M)."""
    return channel.tiles.index(zero).slice(HALF * CONSUMER_ROWS, CONSUMER_ROWS)


@aggregate
class Sums:
    """What a consumer adds up: dV or dK of both halves of the keys, (64, columns), and the tail of
    dK, (64, TAIL_D): the value consumer has that of the second half.
    """

    first: gl.tensor
    second: gl.tensor
    tail: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first, second, tail):
        self.first = first
        self.second = second
        self.tail = tail


# The value consumer


@gluon.jit
def wide_value_consumer(outputs, channels, tile, sizes, at, mask, score, cfg: gl.constexpr):
    """dV of a tile of keys, and the tail of dK of half of them."""
    work = key_work(tile, sizes, at, mask, cfg)
    zeros = opaque_zeros(cfg.BLOCK_DV)
    sums = Sums(zeros, zeros, opaque_zeros(cfg.TAIL_D))
    if work.end > work.begin:
        sums = wide_value_loop(sums, channels, work, sizes, mask, score, cfg)
        # The key consumer has read dO, and this one Q.
        wait_at_barrier(FIRST_BARRIER, 256)
    dv, dk, plain = outputs.dv, outputs.dk, outputs.plain
    if cfg.IS_PARTED:
        if work.n0 < work.N:  # the kernel that adds the parts reads all of them
            start = part_start(cfg.BLOCK_DV, plain.dv, work, sizes, at, cfg)
            put_part(0, sums.first, start, 0, cfg)
            put_part(1, sums.second, start, 0, cfg)
            start = part_start(cfg.BLOCK_D + cfg.TAIL_D, plain.dk, work, sizes, at, cfg)
            put_part(1, sums.tail, start, cfg.BLOCK_D, cfg)
    elif work.end > work.begin:
        slots, tails = channels.dout.tiles, channels.q.tails
        store_half(0, sums.first, slots, 0, dv.tiles, cfg.DV, work, sizes, cfg)
        store_half(1, sums.second, slots, 0, dv.tiles, cfg.DV, work, sizes, cfg)
        tail = sums.tail * score.scale
        store_half(1, tail, tails, cfg.BLOCK_D, dk.tails, cfg.D, work, sizes, cfg)
    tma.store_wait(0)


@gluon.jit
def wide_value_loop(
    sums, channels, work, sizes, mask, score, cfg: gl.constexpr
):  # fmt: skip
    """The loop over this program's query blocks that see the tile, head by head."""
    channels.k.acquire(0)
    total = work.stop_step - work.first_step
    gl.assume(total > 0)
    channels.q.acquire(0)
    # (64, BLOCK_M)
    s = issue_scores(own_rows(0, channels.k, 0, False, cfg), 0, channels, cfg)
    s = warpgroup_mma_wait(0, deps=[s])
    i = 0
    first_head, stop_head = own_heads(work, sizes, cfg)
    for g in range(first_head, stop_head):
        h = work.kv_head * sizes.group + g
        slope = alibi_slope(work.b, h, score, cfg)
        draws = draws_of(work.b, h, score.dropout, cfg)
        listed = listed_blocks(g, work.end - work.begin, work, sizes, mask, cfg)
        begin, full_begin, full_end, end = own_blocks(g, listed, work, cfg)
        m = first_block_of(begin, end, cfg)
        if ends_masked(cfg):
            for _ in range(full_end, end):
                s, sums = wide_value_step(
                    s, sums, i, total, m, slope, draws, listed, channels, work, mask, score,
                    True, cfg,
                )  # fmt: skip
                i += 1
                m = next_block(m, cfg)
        for _ in range(full_begin, full_end):
            s, sums = wide_value_step(
                s, sums, i, total, m, slope, draws, listed, channels, work, mask, score,
                False, cfg,
            )  # fmt: skip
            i += 1
            m = next_block(m, cfg)
        for _ in range(begin, full_begin):
            s, sums = wide_value_step(
                s, sums, i, total, m, slope, draws, listed, channels, work, mask, score,
                True, cfg,
            )  # fmt: skip
            i += 1
            m = next_block(m, cfg)
    return sums


@gluon.jit
def wide_value_step(
    s, sums, i, total, m, slope, draws, listed, channels, work, mask, score,
    IS_MASKED: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Process one block of queries: pass P on, add to dV, compute S^T of the next block."""
    zero = opaque_zero(i)
    pass_half(0, s, i, m, slope, draws, listed, channels, work, mask, score, IS_MASKED, cfg)
    channels.dout.acquire(i)
    # (64, BLOCK_M)
    s = issue_scores(own_rows(1, channels.k, zero, False, cfg), i, channels, cfg)
    # (64, BLOCK_M) @ (BLOCK_M, BLOCK_DV) -> (64, BLOCK_DV)
    rows = rows_tile(channels.dout, i, cfg)
    first = warpgroup_mma(half_of(0, channels.p, zero), rows, sums.first, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    pass_half(1, s, i, m, slope, draws, listed, channels, work, mask, score, IS_MASKED, cfg)
    second = warpgroup_mma(half_of(1, channels.p, zero), rows, sums.second, is_async=True)
    # After the last block, S^T is computed from old contents of the slot, and nothing reads it.
    acquire_if(channels.q, i + 1, i + 1 < total)
    # (64, BLOCK_M)
    s = issue_scores(own_rows(0, channels.k, zero, False, cfg), i + 1, channels, cfg)
    channels.ds.acquire(i)
    # (64, BLOCK_M) @ (BLOCK_M, TAIL_D) -> (64, TAIL_D)
    rows = rows_tail(channels.q, i, cfg)
    tail = warpgroup_mma(half_of(1, channels.ds, zero), rows, sums.tail, is_async=True)
    s, first, second, tail = warpgroup_mma_wait(0, deps=[s, first, second, tail])
    channels.dout.release_operand(i)
    channels.q.release_operand(i)  # its log-sum-exp was read before P was full
    return s, Sums(first, second, tail)


@gluon.jit
def pass_half(
    HALF: gl.constexpr, s, i, m, slope, draws, listed, channels, work, mask, score,
    IS_MASKED: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Store P of half of the keys, from its S^T."""
    dtype: gl.constexpr = channels.q.tiles.dtype
    zero = opaque_zero(i)
    lse = statistic(channels.lse, i, cfg)
    place = Place(work.b, draws.h, work.n0 + HALF * CONSUMER_ROWS, m * cfg.BLOCK_M)
    keys = keys_of(HALF, listed, work, mask, zero, cfg)
    # (64, BLOCK_M)
    p, _ = probabilities(s, lse, keys, m, m, place, slope, score.scale, score, IS_MASKED, cfg)
    half_of(HALF, channels.p, zero).store(p.to(dtype))
    fence_async_shared()
    sync_warps()
    arrive_alone(channels.p.full.index(HALF))


# The key consumer


@gluon.jit
def wide_key_consumer(outputs, channels, tile, sizes, at, mask, score, cfg: gl.constexpr):
    """dK of a tile of keys, without the tail of half of them, and dQ."""
    work = key_work(tile, sizes, at, mask, cfg)
    zeros = opaque_zeros(cfg.BLOCK_D)
    sums = Sums(zeros, zeros, opaque_zeros(cfg.TAIL_D))
    if work.end > work.begin:
        sums = wide_key_loop(sums, outputs, channels, work, sizes, mask, cfg)
        # The value consumer has read Q; a later S^T is not used.
        wait_at_barrier(FIRST_BARRIER, 256)
    dk, scale = outputs.dk, score.scale
    if cfg.IS_PARTED:
        if work.n0 < work.N:
            COLUMNS: gl.constexpr = cfg.BLOCK_D + cfg.TAIL_D
            start = part_start(COLUMNS, outputs.plain.dk, work, sizes, at, cfg)
            put_part(0, sums.first, start, 0, cfg)
            put_part(1, sums.second, start, 0, cfg)
            put_part(0, sums.tail, start, cfg.BLOCK_D, cfg)
    elif work.end > work.begin:
        slots, tails = channels.q.tiles, channels.q.tails
        store_half(0, sums.first * scale, slots, 0, dk.tiles, cfg.D, work, sizes, cfg)
        store_half(1, sums.second * scale, slots, 0, dk.tiles, cfg.D, work, sizes, cfg)
        tail = sums.tail * scale
        store_half(0, tail, tails, cfg.BLOCK_D, dk.tails, cfg.D, work, sizes, cfg)
    tma.store_wait(0)


@gluon.jit
def wide_key_loop(sums, outputs, channels, work, sizes, mask, cfg: gl.constexpr):
    """The loop over this program's query blocks that see the tile, head by head; returns
    dK / scale.
    """
    channels.k.acquire(0)
    channels.v.acquire(0)
    i = 0
    first_head, stop_head = own_heads(work, sizes, cfg)
    for g in range(first_head, stop_head):
        base = (work.kv_head * sizes.group + g) * sizes.blocks + work.first_block
        listed = listed_blocks(g, work.end - work.begin, work, sizes, mask, cfg)
        begin, _, _, end = own_blocks(g, listed, work, cfg)
        block = base + first_block_of(begin, end, cfg)
        for _ in range(begin, end):
            sums = wide_key_step(sums, i, block, outputs, channels, cfg)
            i += 1
            block = next_block(block, cfg)
    return sums


@gluon.jit
def wide_key_step(sums, i, block, outputs, channels, cfg: gl.constexpr):
    """Process one block of queries, block `block` of the workspace: compute dS from P of the other
    consumer; add to dK and dQ.
    """
    channels.dout.acquire(i)
    store_ds(0, i, channels, cfg)
    store_ds(1, i, channels, cfg)
    channels.dout.release_operand(i)
    fence_async_shared()
    sync_warps()
    arrive_alone(channels.ds.full.index(0))
    channels.q.acquire(i)
    zero = opaque_zero(i)
    k = whole_tile(channels.k, zero)
    own, other = half_of(0, channels.ds, zero), half_of(1, channels.ds, zero)
    # Each piece of dQ is staged while the product after it runs.
    # (64, BLOCK_N) @ (BLOCK_N, 64) -> (64, 64)
    dq = issue_columns_of_dq(0, 64, k, channels, cfg)
    # (64, BLOCK_M) @ (BLOCK_M, columns) -> (64, columns)
    first = warpgroup_mma(own, rows_tile(channels.q, i, cfg), sums.first, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    stage_piece(dq, 0, i, block, outputs, channels, cfg)
    dq = issue_columns_of_dq(64, 64, k, channels, cfg)
    tail = warpgroup_mma(own, rows_tail(channels.q, i, cfg), sums.tail, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    stage_piece(dq, 1, i, block, outputs, channels, cfg)
    dq = issue_columns_of_dq(cfg.BLOCK_D, cfg.TAIL_D, k, channels, cfg)
    second = warpgroup_mma(other, rows_tile(channels.q, i, cfg), sums.second, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    stage_piece(dq, 2, i, block, outputs, channels, cfg)
    first, second, tail = warpgroup_mma_wait(0, deps=[first, second, tail])
    channels.q.release_operand(i)
    return Sums(first, second, tail)


@gluon.jit
def store_ds(HALF: gl.constexpr, i, channels, cfg: gl.constexpr):
    """Store dS^T of half of the keys, from V, dO and P."""
    zero = opaque_zero(i)
    minus_delta = statistic(channels.delta, i, cfg)
    # (64, BLOCK_M)
    dp = issue_dp(own_rows(HALF, channels.v, zero, False, cfg), minus_delta, i, channels, cfg)
    mbarrier.wait(channels.p.full.index(HALF), i & 1)
    # (64, BLOCK_M)
    p = half_of(HALF, channels.p, zero).load(accumulator(cfg.BLOCK_M))
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = score_gradient(p.to(gl.float32), dp, minus_delta, cfg)
    half_of(HALF, channels.ds, zero).store(ds.to(p.dtype))


@gluon.jit
def stage_piece(dq, NUMBER: gl.constexpr, i, block, outputs, channels, cfg: gl.constexpr):
    """Start adding `dq` (64, 64), piece NUMBER of step `i`, to block `block` of the workspace."""
    COLUMNS: gl.constexpr = dq.shape[1]
    tile = channels.staging.index((3 * i + NUMBER) & 1)  # a step has three pieces
    tma.store_wait(1)  # the piece before the last one has been read
    recast(tile, gl.float32, [64, COLUMNS], piece_layout(COLUMNS)).store(dq)
    fence_async_shared()
    tiles = recast(tile, gl.float32, [1, PIECE_ROWS, 256], outputs.workspace.layout)
    start_additions(tiles, 64 * NUMBER, COLUMNS, block, outputs, cfg)


# Results


@gluon.jit
def store_half(
    HALF: gl.constexpr, x, slots, COLUMN: gl.constexpr, desc, DIM: gl.constexpr, work, sizes,
    cfg: gl.constexpr,
):  # fmt: skip
    """Store columns from COLUMN on of half of dK or dV through one of `slots`."""
    row = work.n0 + HALF * CONSUMER_ROWS
    store_rows(x, slots.index(HALF), row, COLUMN, desc, None, DIM, work, sizes, cfg)


@gluon.jit
def put_part(HALF: gl.constexpr, x, start, BEFORE: gl.constexpr, cfg: gl.constexpr):
    """Store half of a part of dK or dV, which begins at `start`, or of its tail, which has BEFORE
    columns before it.
    """
    store_pieces(x, start + (cfg.BLOCK_N * BEFORE + HALF * (CONSUMER_ROWS * x.shape[1])))
