"""The backward pass: FlashAttention-2 (Dao 2023), algorithm 2, as two kernels without atomics.

`key_gradient_kernel` owns a tile of keys and loops over the queries that see it (dK, dV);
`query_gradient_kernel` owns a tile of queries and loops over its keys (dQ). Both recompute P from
the stored log-sum-exp. One program computes each sum in a fixed order, so results are bitwise
reproducible.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.dropout import dropout_key
from ...gpu.intrinsics import rows_base
from ...gpu.kernel import kernel
from ...gpu.rows import HeadRows
from ...gpu.score_source import Corners
from .arguments import UNSPECIALISED, Dropout, Lengths, Mask, RowStats, Score, Sequence
from .masks import full_tile_of, in_spans, load_intervals, masked_tile_of, steps_of_queries
from .products import add_product, operand, product, rounded_to_tf32
from .tiles import (
    between,
    exponent_factor,
    exponentials,
    floor_to,
    head_swizzle,
    in_block_mask,
    kept,
    key_span,
    list_row,
    load_key_tile,
    load_query_tile,
    load_rows,
    load_tile,
    masked_tile,
    pivot_of_lse,
    product_gradient,
    query_span,
    scores_of,
    seeing_rows,
    stats_count,
    stats_start,
    store_key_tile,
    store_rows,
    tile_of_queries,
    tile_phases,
    tile_source,
    visible_keys,
    without_hidden,
)


@kernel(*UNSPECIALISED, "rows_total", "heads")
def delta_kernel(
    out: HeadRows, dout: HeadRows, lse_ptr, dlse_ptr, delta_ptr, pivot_ptr, rows_total, heads,
    BLOCK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, ALIGNMENT: tl.constexpr,
    HAS_LARGE_SCORES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For every row of one head: delta = rowsum(dO * O) minus the gradient of the log-sum-exp, and
    the log-sum-exp as the pivot of its scores.

    HAS_LARGE_SCORES: zeros follow the pivots of all rows; see `row_sums_kernel`.
    """
    h = tl.program_id(0) % heads
    b = tl.program_id(0) // heads
    zero = b * 0
    m0 = tl.program_id(1) * BLOCK
    # (BLOCK, BLOCK_DV)
    o_tile = load_rows(
        out, rows_base(out, b, zero, h), m0, rows_total, True, DV, BLOCK, BLOCK_DV, ALIGNMENT
    )
    do_tile = load_rows(
        dout, rows_base(dout, b, zero, h), m0, rows_total, True, DV, BLOCK, BLOCK_DV, ALIGNMENT
    )
    if PRECISION == "tf32":  # as in dO V^T, so that an error that all keys share cancels in dS
        do_tile = rounded_to_tf32(do_tile)
    # A row without a key has an output of 0, whatever its gradient holds.
    product = o_tile.to(tl.float32) * do_tile.to(tl.float32)
    # (BLOCK,)
    delta = tl.sum(tl.where(o_tile == 0.0, 0.0, product), 1)
    rows = m0 + tl.arange(0, BLOCK)
    stats_offs = (b * heads + h).to(tl.int64) * rows_total + rows
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + stats_offs, mask=rows < rows_total, other=0.0)
    lse = tl.load(lse_ptr + stats_offs, mask=rows < rows_total, other=0.0)
    delta = tl.where(lse == -float("inf"), 0.0, delta)  # whatever dlse holds at rows without a key
    tl.store(delta_ptr + stats_offs, delta, mask=rows < rows_total)
    tl.store(pivot_ptr + stats_offs, pivot_of_lse(lse, HAS_LARGE_SCORES), mask=rows < rows_total)
    if HAS_LARGE_SCORES:
        log_sum_offs = tl.num_programs(0).to(tl.int64) * rows_total + stats_offs
        tl.store(pivot_ptr + log_sum_offs, tl.zeros_like(lse), mask=rows < rows_total)


@triton.jit
def stats_at(pivot_ptr, delta_ptr, sequence, h, cfg: tl.constexpr):
    """Pointers to the statistics of the first row of a sequence and head."""
    start = stats_start(sequence, h)
    pivot = pivot_ptr + start
    log_sum = pivot  # a function of Triton cannot return None in a tuple
    if cfg.HAS_LARGE_SCORES:
        log_sum += stats_count(sequence.lengths)
    return RowStats(pivot, log_sum, delta_ptr + start)


@triton.jit
def load_stats(stats, rows, M, IS_MASKED: tl.constexpr, AXIS: tl.constexpr, cfg: tl.constexpr):
    """The statistics of `rows`, in tiles of size 1 along AXIS. Rows past the end get the pivot
    +inf, which makes P zero.
    """
    # (rows,)
    if IS_MASKED:
        inside = rows < M
        if cfg.IS_INVARIANT:
            inside = inside & (rows >= 0)
        pivot = tl.load(stats.pivot + rows, mask=inside, other=float("inf"))
        delta = tl.load(stats.delta + rows, mask=inside, other=0.0)
    elif cfg.HAS_WGMMA and rows.shape[0] >= 64:
        # One load of at least as many numbers as 4 warps have threads. If a load has fewer, each
        # thread loads all numbers that it needs, one by one, and the addresses of these loads make
        # ptxas serialise the wgmma of dK and dV (C7515). Triton 3.9 cannot compile the one load for
        # sm_100.
        pivot, delta = tl.split(tl.load(tl.join(stats.pivot + rows, stats.delta + rows)))
    else:
        pivot = tl.load(stats.pivot + rows)
        delta = tl.load(stats.delta + rows)
    log_sum = delta
    if cfg.HAS_LARGE_SCORES:
        if IS_MASKED:
            log_sum = tl.load(stats.log_sum + rows, mask=inside, other=0.0)
        else:
            log_sum = tl.load(stats.log_sum + rows)
    return RowStats(
        tl.expand_dims(pivot, AXIS), tl.expand_dims(log_sum, AXIS), tl.expand_dims(delta, AXIS)
    )


@triton.jit
def recompute_p(
    qk,
    stats,
    rows,
    keys,
    visible,
    corners,
    sequence,
    h,
    score,
    M,
    IS_MASKED: tl.constexpr,
    cfg: tl.constexpr,
):
    """P = exp(S - lse) of a tile or of a transposed tile, whose rows have `stats`."""
    # The shape of `qk`, as `visible`.
    s = scores_of(qk, rows, keys, M, corners, sequence, h, score, cfg)
    p = exponentials(s, stats.pivot, exponent_factor(score, cfg), cfg, stats.log_sum)
    if IS_MASKED:
        if cfg.HAS_HIDDEN_KEYS:  # rows past the end see keys that no row sees, and NaN - inf is NaN
            visible = visible & (stats.pivot != float("inf"))
        p = tl.where(visible, p, 0.0)
    return p


@triton.jit
def drop(x, keep, scale, cfg: tl.constexpr):
    """`x` where dropout keeps it, scaled; `x` itself without dropout."""
    if cfg.HAS_DROPOUT:
        x = tl.where(keep, x * scale, 0.0)
    return x


@triton.jit
def add_queries(
    dk_acc, dv_acc, k_operand, v_operand, m0, q, q_source, dout, dout_source, stats, n0, keys,
    sequence, h, mask, score, dropout, IS_MASKED: tl.constexpr, HAS_DK: tl.constexpr,
    HAS_DV: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """One step of dK and dV: the queries [m0, m0 + BLOCK_M). Tiles of scores are transposed,
    (BLOCK_N, BLOCK_M).
    """
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    M, N = sequence.M, sequence.N
    offs_m = m0 + tl.arange(0, BLOCK_M)
    rows = offs_m[None, :]
    # (BLOCK_M, BLOCK_D)
    q_tile = load_tile(
        q_source, q, m0, M, cfg, IS_MASKED, cfg.D, BLOCK_M, cfg.BLOCK_D, cfg.ALIGNMENT
    )
    # Three parts of Q and of dO do not fit shared memory together.
    IS_DP_FIRST: tl.constexpr = cfg.PRECISION == "bf16x6" and not HAS_DV
    if IS_DP_FIRST:
        stats = load_stats(stats, offs_m, M, IS_MASKED, 0, cfg)
        # (BLOCK_M, BLOCK_DV)
        do_tile = load_tile(
            dout_source, dout, m0, M, cfg, IS_MASKED, cfg.DV, BLOCK_M, cfg.BLOCK_DV,
            cfg.OUT_ALIGNMENT,
        )  # fmt: skip
        # (BLOCK_N, BLOCK_DV) @ (BLOCK_DV, BLOCK_M) -> (BLOCK_N, BLOCK_M)
        dp = product(v_operand, operand(do_tile, cfg), cfg, 0.5 * stats.delta)
    q_operand = operand(q_tile, cfg)
    # (BLOCK_N, BLOCK_D) @ (BLOCK_D, BLOCK_M) -> (BLOCK_N, BLOCK_M)
    qk = product(k_operand, q_operand, cfg)
    if not IS_DP_FIRST:
        stats = load_stats(stats, offs_m, M, IS_MASKED, 0, cfg)
    visible = keys < N
    if IS_MASKED:
        start, stop = visible_keys(rows, sequence, mask, cfg)
        intervals = load_intervals(mask.data, sequence, h, rows, rows < M, cfg)
        visible = in_spans(keys, between(keys, start, stop, cfg), intervals, cfg)
        if cfg.MASK_TILE_M > 0:
            visible = in_block_mask(rows, keys, visible, sequence, h, mask, cfg)
    keep = visible
    if cfg.HAS_DROPOUT:
        # (BLOCK_N, BLOCK_M), from (BLOCK_M, BLOCK_N)
        keep = tl.trans(kept(dropout, offs_m[:, None], n0, sequence, h, cfg))
    corners = Corners(m0, m0 + BLOCK_M - 1, n0, n0 + cfg.BLOCK_N - 1)
    # (BLOCK_N, BLOCK_M)
    p = recompute_p(qk, stats, rows, keys, visible, corners, sequence, h, score, M, IS_MASKED, cfg)
    if not IS_DP_FIRST:
        # (BLOCK_M, BLOCK_DV)
        do_tile = load_tile(
            dout_source, dout, m0, M, cfg, IS_MASKED, cfg.DV, BLOCK_M, cfg.BLOCK_DV,
            cfg.OUT_ALIGNMENT,
        )  # fmt: skip
        if cfg.HAS_DEAD_ROWS and (IS_MASKED or score.bias.ptr is not None):
            do_tile = without_hidden(do_tile, p)
        do_operand = operand(do_tile, cfg)
    if HAS_DV:
        p_kept = drop(p, keep, score.data.drop_scale, cfg).to(do_tile.dtype)
        # (BLOCK_N, BLOCK_M) @ (BLOCK_M, BLOCK_DV) -> (BLOCK_N, BLOCK_DV)
        dv_acc = add_product(dv_acc, operand(p_kept, cfg), do_operand, cfg)
    if HAS_DK:
        if not IS_DP_FIRST:
            # (BLOCK_N, BLOCK_DV) @ (BLOCK_DV, BLOCK_M) -> (BLOCK_N, BLOCK_M)
            dp = product(v_operand, do_operand, cfg, 0.5 * stats.delta)
        ds = p * (drop(dp, keep, score.data.drop_scale, cfg) - stats.delta)
        ds = product_gradient(ds, qk, p, rows, keys, corners, sequence, h, score, IS_MASKED, cfg)
        if (cfg.HAS_HIDDEN_KEYS or cfg.HAS_DEAD_ROWS) and (  # delta has the gradient of the lse
            IS_MASKED or score.bias.ptr is not None
        ):
            ds = tl.where(p != 0.0, ds, 0.0)
        # (BLOCK_N, BLOCK_M) @ (BLOCK_M, BLOCK_D) -> (BLOCK_N, BLOCK_D)
        dk_acc = add_product(dk_acc, operand(ds.to(q_tile.dtype), cfg), q_operand, cfg)
    return dk_acc, dv_acc


@kernel(*UNSPECIALISED)
def key_gradient_kernel(
    q: HeadRows, k: HeadRows, v: HeadRows, dout: HeadRows, dk: HeadRows, dv: HeadRows, pivot_ptr,
    delta_ptr, score: Score, lists, rng_ptr, lengths: Lengths, mask: Mask, first_kept,
    HAS_DK: tl.constexpr, HAS_DV: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys of one key head, summed over the query heads of its group.

    HAS_DK and HAS_DV: which of them to compute; separate passes if registers do not hold both.
    """
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    BLOCK_D: tl.constexpr = cfg.BLOCK_D
    BLOCK_DV: tl.constexpr = cfg.BLOCK_DV
    HAS_LISTS: tl.constexpr = cfg.MASK_TILE_M > 0 or cfg.SPANS > 0
    kv_heads = lengths.heads // cfg.GROUP
    n_tiles = tl.cdiv(lengths.N, BLOCK_N)
    # Under a causal mask most queries see the first keys, so ascending order is already LPT order.
    tile, bh = head_swizzle(tl.program_id(0), n_tiles, lengths.B * kv_heads, cfg.HEAD_SWIZZLE)
    b = bh // kv_heads
    kv_head = bh % kv_heads
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    sequence = Sequence(b, start_q, M, start_k, N, lengths)
    n0 = tile * BLOCK_N
    if n0 >= N:
        return
    keys = n0 + tl.arange(0, BLOCK_N)[:, None]
    dropout = Dropout(dropout_key(rng_ptr) if cfg.HAS_DROPOUT else 0, first_kept)
    # (BLOCK_N, BLOCK_D), (BLOCK_N, BLOCK_DV)
    k_tile = load_key_tile(k, sequence, kv_head, n0, cfg.D, cfg.BLOCK_D, cfg.ALIGNMENT, cfg)
    v_tile = load_key_tile(v, sequence, kv_head, n0, cfg.DV, cfg.BLOCK_DV, cfg.ALIGNMENT, cfg)
    k_operand, v_operand = operand(k_tile, cfg), operand(v_tile, cfg)
    # (BLOCK_N, BLOCK_D), (BLOCK_N, BLOCK_DV)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    # Rows that see the first key of the tile, and the last.
    last_key = tl.minimum(n0 + BLOCK_N, N) - 1
    first_start, first_stop = seeing_rows(n0, sequence, mask, cfg)
    last_start, last_stop = seeing_rows(last_key, sequence, mask, cfg)
    before = 0  # rows of the first tile before the first query
    if cfg.IS_INVARIANT:  # tiles begin at positions that are multiples of their size
        before = N - M - floor_to(N - M, BLOCK_M)
        first_start, first_stop = first_start + before, first_stop + before
        last_start, last_stop = last_start + before, last_stop + before
    begin, full_begin, full_end, end = tile_phases(
        first_start, first_stop, last_start, last_stop, BLOCK_M
    )

    for g in range(cfg.GROUP):
        h = kv_head * cfg.GROUP + g
        q_source = tile_source(q, rows_base(q, b, start_q, h), M, cfg, cfg.D, BLOCK_M, BLOCK_D)
        dout_source = tile_source(
            dout, rows_base(dout, b, start_q, h), M, cfg, cfg.DV, BLOCK_M, BLOCK_DV
        )
        stats = stats_at(pivot_ptr, delta_ptr, sequence, h, cfg)
        if HAS_LISTS:
            capacity = tl.cdiv(lengths.M, BLOCK_M)
            counts, tiles = list_row(lists, sequence, h, tile, n_tiles, capacity)
            full_count = tl.load(counts)
            masked_count = tl.load(counts + 1)
        else:
            full_count = full_end - full_begin
            masked_count = end - begin - full_count
        for i in range(0, full_count):
            if HAS_LISTS:
                m0 = tl.load(tiles + i) * BLOCK_M
            else:
                m0 = (full_begin + i) * BLOCK_M - before
            dk_acc, dv_acc = add_queries(
                dk_acc, dv_acc, k_operand, v_operand, m0, q, q_source, dout, dout_source, stats, n0,
                keys, sequence, h, mask, score, dropout, False, HAS_DK, HAS_DV, cfg,
            )  # fmt: skip
        for i in range(0, masked_count):
            if HAS_LISTS:
                m0 = tl.load(tiles + capacity - 1 - i) * BLOCK_M
            else:
                m0 = masked_tile(i, begin, full_begin, full_end) * BLOCK_M - before
            dk_acc, dv_acc = add_queries(
                dk_acc, dv_acc, k_operand, v_operand, m0, q, q_source, dout, dout_source, stats, n0,
                keys, sequence, h, mask, score, dropout, True, HAS_DK, HAS_DV, cfg,
            )  # fmt: skip

    if HAS_DK:
        dk_acc = dk_acc * score.data.scale
        store_key_tile(dk, sequence, kv_head, n0, dk_acc, cfg.D, cfg.BLOCK_D, cfg)
    if HAS_DV:
        store_key_tile(dv, sequence, kv_head, n0, dv_acc, cfg.DV, cfg.BLOCK_DV, cfg)


@triton.jit
def add_keys(
    dq_acc, q_operand, do_operand, stats, n0, k, k_source, v, v_source, rows, start, stop,
    intervals, sequence, h, mask, score, dropout, IS_MASKED: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """One step of dQ: the keys [n0, n0 + BLOCK_N)."""
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    M, N = sequence.M, sequence.N
    keys = n0 + tl.arange(0, BLOCK_N)[None, :]
    # (BLOCK_N, BLOCK_D), (BLOCK_N, BLOCK_DV)
    k_tile = load_tile(
        k_source, k, n0, N, cfg, IS_MASKED, cfg.D, BLOCK_N, cfg.BLOCK_D, cfg.ALIGNMENT
    )
    v_tile = load_tile(
        v_source, v, n0, N, cfg, IS_MASKED, cfg.DV, BLOCK_N, cfg.BLOCK_DV, cfg.ALIGNMENT
    )
    # (BLOCK_M, BLOCK_N)
    IS_DP_FIRST: tl.constexpr = cfg.PRECISION == "bf16x6"  # as in `add_queries`
    if IS_DP_FIRST:
        # (BLOCK_M, BLOCK_DV) @ (BLOCK_DV, BLOCK_N) -> (BLOCK_M, BLOCK_N)
        dp = product(do_operand, operand(v_tile, cfg), cfg, 0.5 * stats.delta)
    k_operand = operand(k_tile, cfg)
    # (BLOCK_M, BLOCK_D) @ (BLOCK_D, BLOCK_N) -> (BLOCK_M, BLOCK_N)
    qk = product(q_operand, k_operand, cfg)
    if not IS_DP_FIRST:
        # (BLOCK_M, BLOCK_DV) @ (BLOCK_DV, BLOCK_N) -> (BLOCK_M, BLOCK_N)
        dp = product(do_operand, operand(v_tile, cfg), cfg, 0.5 * stats.delta)
    visible = keys < N
    if IS_MASKED:
        visible = in_spans(keys, between(keys, start, stop, cfg), intervals, cfg)
        if cfg.MASK_TILE_M > 0:
            visible = in_block_mask(rows, keys, visible, sequence, h, mask, cfg)
    keep = visible
    if cfg.HAS_DROPOUT:
        keep = kept(dropout, rows, n0, sequence, h, cfg)
    corners = Corners(tl.min(rows), tl.max(rows), n0, n0 + BLOCK_N - 1)
    # (BLOCK_M, BLOCK_N)
    p = recompute_p(qk, stats, rows, keys, visible, corners, sequence, h, score, M, IS_MASKED, cfg)
    ds = p * (drop(dp, keep, score.data.drop_scale, cfg) - stats.delta)
    ds = product_gradient(ds, qk, p, rows, keys, corners, sequence, h, score, IS_MASKED, cfg)
    if IS_MASKED or score.bias.ptr is not None:
        if cfg.HAS_HIDDEN_KEYS or cfg.HAS_DEAD_ROWS:
            ds = tl.where(p != 0.0, ds, 0.0)
        if cfg.HAS_HIDDEN_KEYS:
            k_operand = operand(without_hidden(k_tile, p), cfg)
    # (BLOCK_M, BLOCK_N) @ (BLOCK_N, BLOCK_D) -> (BLOCK_M, BLOCK_D)
    return add_product(dq_acc, operand(ds.to(k_tile.dtype), cfg), k_operand, cfg)


@kernel(*UNSPECIALISED)
def query_gradient_kernel(
    q: HeadRows, k: HeadRows, v: HeadRows, dout: HeadRows, dq: HeadRows, pivot_ptr, delta_ptr,
    score: Score, lists, rng_ptr, lengths: Lengths, mask: Mask, first_kept, IS_ADDED: tl.constexpr,
    cfg: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries.

    IS_ADDED: add it to `dq`, which has that of other keys.
    """
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    BLOCK_D: tl.constexpr = cfg.BLOCK_D
    BLOCK_DV: tl.constexpr = cfg.BLOCK_DV
    tile, m_tiles, b, h = tile_of_queries(lengths, cfg)
    kv_head = h // cfg.GROUP
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    sequence = Sequence(b, start_q, M, start_k, N, lengths)
    m0 = tile * BLOCK_M
    if m0 >= M:
        return
    offs_m = m0 + tl.arange(0, BLOCK_M)
    rows = offs_m[:, None]
    dropout = Dropout(dropout_key(rng_ptr) if cfg.HAS_DROPOUT else 0, first_kept)
    # (BLOCK_M, BLOCK_D), (BLOCK_M, BLOCK_DV)
    q_tile = load_query_tile(q, sequence, h, m0, cfg.D, cfg.BLOCK_D, cfg.ALIGNMENT, cfg)
    do_tile = load_query_tile(dout, sequence, h, m0, cfg.DV, cfg.BLOCK_DV, cfg.OUT_ALIGNMENT, cfg)
    q_operand, do_operand = operand(q_tile, cfg), operand(do_tile, cfg)
    stats = stats_at(pivot_ptr, delta_ptr, sequence, h, cfg)
    # (BLOCK_M, 1)
    stats = load_stats(stats, offs_m, M, True, 1, cfg)
    k_source = tile_source(k, rows_base(k, b, start_k, kv_head), N, cfg, cfg.D, BLOCK_N, BLOCK_D)
    v_source = tile_source(v, rows_base(v, b, start_k, kv_head), N, cfg, cfg.DV, BLOCK_N, BLOCK_DV)
    start, stop = visible_keys(rows, sequence, mask, cfg)
    intervals = load_intervals(mask.data, sequence, h, rows, rows < M, cfg)
    # (BLOCK_M, BLOCK_D)
    dq_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    full_count, masked_count, steps = steps_of_queries(
        lists, sequence, h, tile, m_tiles, rows, intervals, mask, cfg
    )
    # The loop counts keys, not tiles, as in the forward.
    for offset in range(0, full_count * BLOCK_N, BLOCK_N):
        n0 = full_tile_of(offset // BLOCK_N, steps, cfg) * BLOCK_N
        dq_acc = add_keys(
            dq_acc, q_operand, do_operand, stats, n0, k, k_source, v, v_source, rows, start, stop,
            intervals, sequence, h, mask, score, dropout, False, cfg,
        )  # fmt: skip
    for i in range(0, masked_count):
        n0 = masked_tile_of(i, steps, cfg) * BLOCK_N
        dq_acc = add_keys(
            dq_acc, q_operand, do_operand, stats, n0, k, k_source, v, v_source, rows, start, stop,
            intervals, sequence, h, mask, score, dropout, True, cfg,
        )  # fmt: skip

    dq_acc = dq_acc * score.data.scale
    dq_base = rows_base(dq, b, start_q, h)
    if IS_ADDED:
        dq_acc += load_rows(dq, dq_base, m0, M, True, cfg.D, BLOCK_M, BLOCK_D, cfg.OUT_ALIGNMENT)
    store_rows(dq, dq_base, m0, M, dq_acc, cfg.D, BLOCK_M, BLOCK_D, cfg.OUT_ALIGNMENT)
