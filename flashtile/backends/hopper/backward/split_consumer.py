"""The consumers of the backward with more than 128 columns: one for values, one for keys.

A tile has 64 keys. The registers of a consumer hold dV or dK of all of them, but not both. So the
value consumer computes S^T = K Q^T, P and dV += P^T dO, and the key consumer dP^T = V dO^T, dS and
dK += dS^T Q. P, with softcap times its derivative, goes through shared memory in the order of the
registers, because both consumers hold scores in the same layout. Each consumer multiplies its P^T
or dS^T from registers. dS^T is also in shared memory, for dQ = dS K: the key consumer computes its
first columns, the value consumer the others.

There is one slot for P and one for dS^T, and neither needs a barrier that says it is empty:

- P of step i + 1 is stored after dS^T of step i is full, and the key consumer has read P by then;
- dS^T of step i + 1 is stored after P of step i + 1 is full, and the value consumer has completed
  its dQ of step i by then.

The value consumer computes S^T of the next step while the key consumer computes dS. It computes the
last columns of dQ, the tail or 64, in the next step, during the exponentials, which also overlap
with products of the key consumer. Tiles of values have as few columns as the values need.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..shared.dropout import draws_of
from ..shared.intrinsics import (
    CONSUMER_ROWS,
    FIRST_BARRIER,
    accumulator,
    arrive_alone,
    empty_accumulator,
    opaque_zero,
    opaque_zeros,
    recast,
    show_written,
    sync_warps,
)
from ..shared.softmax import alibi_slope
from ..shared.unseen import clear_numbers, clear_rows, has_cleared, kind_of_keys, kind_of_rows
from .consumer import acquire_if, add_product, keys_of, store_rows
from .dq import KEY_COLUMNS, emit_pieces, first_of_last, last_columns, value_puts
from .part_sums import store_part
from .products import (
    bits_of,
    issue_dp,
    issue_scores,
    kept_by_dropout,
    kept_probabilities,
    own_rows,
    probabilities,
    products_along,
    rows_tail,
    rows_tile,
    score_gradient,
    statistic,
    whole_tile,
)
from .schedule import (
    block_at,
    first_seeing_row,
    kept_keys,
    kept_rows,
    key_work,
    listed_blocks,
    own_blocks,
    own_heads,
)

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
    if cfg.IS_PACKED or cfg.HAS_HIDDEN_KEYS:
        kept = kept_keys(work, sizes, mask, cfg)
        clear_slot(VALUES, channels.k, 0, kept, kind_of_keys(cfg), None, cfg)
    dv, tail = no_sum(work.n, cfg.BLOCK_DV, cfg.TAIL_DV)
    total = work.stop_step - work.first_step
    gl.assume(total > 0)
    channels.q.acquire(0)
    k = own_rows(0, channels.k, 0, cfg.HAS_K_IN_REGISTERS, cfg)
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
        if cfg.HAS_LEFT or cfg.HAS_CHUNK or cfg.IS_PACKED or cfg.HAS_LISTS:
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
    dq = issue_dq(LAST, last_columns(cfg), whole_tile(channels.k, 0), channels, cfg)
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
    dq = issue_dq(LAST, last_columns(cfg), all_keys, channels, cfg)  # of the previous step, if any
    lse = statistic(channels.lse, i, cfg)
    row = m * cfg.BLOCK_M
    if IS_MASKED and (cfg.IS_PACKED or cfg.HAS_DEAD_ROWS):  # before Q and its lse are released
        rows = kept_rows(m, keys.dead, channels.lse.index(i % cfg.Q_STAGES), work, cfg)
        clear_slot(VALUES, channels.dout, i, rows, kind_of_rows(cfg), None, cfg)
    kept = kept_by_dropout(0, m, draws, work, cfg)
    p, factor = probabilities(
        s, lse, keys, bits, kept, row, slope, score.scale, score.softcap, IS_MASKED, cfg
    )
    p = kept_probabilities(p, dtype, cfg)
    if cfg.HAS_SOFTCAP or cfg.HAS_DROPOUT:
        factor = factor.to(dtype)
    else:
        factor = p
    exchanged(channels).store(factor)
    dq = warpgroup_mma_wait(0, deps=[dq])  # the other consumer may write dS now
    sync_warps()
    arrive_alone(channels.p.full.index(0))
    arrive_alone(channels.q.empty.index(i % cfg.Q_STAGES))  # S^T and all exponentials are done
    channels.dout.acquire(i)
    dv, tail = add_product(p, channels.dout, i, dv, tail, cfg)
    # After the last block, S^T is computed from old contents of the slot, and nothing reads it.
    acquire_if(channels.q, i + 1, i + 1 < total)
    s = issue_scores(k, i + 1, channels, cfg)
    if i > 0:
        emit_pieces(dq, staging, LAST, i - 1, PUTS - 1, PUTS, added, outputs, cfg)
    dv, tail = wait_for_sum(products_along(cfg), dv, tail, cfg.TAIL_DV)
    channels.dout.release_operand(i)
    channels.ds.acquire(i)
    if PUTS == 2:
        dq = issue_dq(KEY_COLUMNS, 64, all_keys, channels, cfg)
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
    if cfg.IS_PACKED or cfg.HAS_HIDDEN_KEYS:
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
        if cfg.IS_PACKED:  # the sequence may end in this block
            dk, tail = key_step(
                dk, tail, i, m, base, dead, listed, v, outputs, channels, work, True, cfg
            )  # fmt: skip
            i += 1
            m -= 1
        full_begin = begin  # the blocks before it may have rows that see no key
        if cfg.HAS_DEAD_ROWS:
            full_begin = gl.minimum(gl.maximum(gl.cdiv(dead, cfg.BLOCK_M), begin), m + 1)
        for _ in range(full_begin, m + 1):
            dk, tail = key_step(
                dk, tail, i, m, base, dead, listed, v, outputs, channels, work, False, cfg
            )  # fmt: skip
            i += 1
            m -= 1
        if cfg.HAS_DEAD_ROWS:
            for _ in range(begin, full_begin):
                dk, tail = key_step(
                    dk, tail, i, m, base, dead, listed, v, outputs, channels, work, True, cfg
                )  # fmt: skip
                i += 1
                m -= 1
    return dk, tail


@gluon.jit
def key_step(
    dk, tail, i, m, base, dead, listed, v, outputs, channels, work, HAS_CLEARED: gl.constexpr,
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
        rows = kept_rows(m, dead, channels.lse.index(i % cfg.Q_STAGES), work, cfg)
        # With a sink, delta has the gradient of the log-sum-exp.
        delta = channels.delta.index(i % cfg.DO_STAGES)
        clear_slot(KEYS, channels.dout, i, rows, KIND, delta, cfg)
    if not cfg.HAS_V_IN_REGISTERS:
        v = own_rows(0, channels.v, zero, False, cfg)
    minus_delta = statistic(channels.delta, i, cfg)
    dp = issue_dp(v, minus_delta, i, channels, cfg)
    channels.p.acquire(i)
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
    dk, tail = add_product(ds, channels.q, i, dk, tail, cfg)
    dq = issue_dq(0, KEY_COLUMNS, whole_tile(channels.k, zero), channels, cfg)
    dk, tail = wait_for_sum(1, dk, tail, cfg.TAIL_D)
    channels.q.release_operand(i)
    dq = warpgroup_mma_wait(0, deps=[dq])
    emit_pieces(dq, channels.staging.of_keys, 0, i, 0, 1, base + m, outputs, cfg)
    return dk, tail


# dQ


@gluon.jit
def issue_dq(FIRST: gl.constexpr, COLUMNS: gl.constexpr, k, channels, cfg: gl.constexpr):
    """Start (64, COLUMNS) of dQ = dS K, the columns from FIRST, which are in the tile or are the
    tail.
    """
    if FIRST < cfg.BLOCK_D:
        columns = k.tile.reshape([cfg.BLOCK_N, cfg.BLOCK_D]).slice(FIRST, COLUMNS, dim=1)
    else:
        columns = k.tail.reshape([cfg.BLOCK_N, cfg.TAIL_D])
    ds = channels.ds.tiles.index(0).permute((1, 0))
    return warpgroup_mma(ds, columns, empty_accumulator(COLUMNS), use_acc=False, is_async=True)


# Keys that no query sees, queries that see no key, and rows past the end of a packed sequence


@gluon.jit
def clear_slot(
    ME: gl.constexpr, channel, i, kept, KIND: gl.constexpr, statistics, cfg: gl.constexpr
):
    """Zero the rows of slot `i` that are not kept, see `unseen.py`, and their `statistics`, if any.

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
