"""Forward mode: the tangents of the output and of the log-sum-exp, one program per tile of queries.

Read `attend` in `backends/cpu/derivatives.py` first: the same algorithm in plain PyTorch. The loop
is that of dQ: P is recomputed from the log-sum-exp, and multiplied by the tangents of the scores,

    mu = rowsum(P * dS),    dO = (P * dS) V + P dV - mu O,    dL = mu.

Names of tangents begin with t, because those with d are gradients. A tensor without a tangent has
none (None), and its products are not compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.dropout import dropout_key
from ...gpu.intrinsics import LOG2E, rows_base
from ...gpu.rows import HeadRows
from ...gpu.score_source import Corners
from .arguments import Blocks, Lengths, Mask, RowPositions, RowStats, Score, unspecialised
from .backward_pass import drop, recompute_p
from .masks import full_tile_of, in_spans, key_ranges, load_intervals, masked_tile_of, step_counts
from .products import add_product_in_halves, operand, product
from .tiles import (
    between,
    exponentials,
    head_swizzle,
    in_block_mask,
    kept,
    key_span,
    list_row,
    load_bias,
    load_rows,
    load_tile,
    pivot_of_lse,
    product_gradient,
    query_span,
    stats_start,
    store_rows,
    tile_source,
    visible_keys,
    without_hidden,
)


@triton.jit
def add_keys(
    acc, mu, row_sum, q_operand, tq_operand, stats, n0, k, k_source, v, v_source, tk, tk_source, tv,
    tv_source, rows, start, stop, intervals, M, N, positions, b, h, score, tbias, blocks,
    first_kept, drop_key, IS_MASKED: tl.constexpr, HAS_SCORES: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """One step of the KV loop: the keys [n0, n0 + BLOCK_N)."""
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    IS_HIDING: tl.constexpr = cfg.HAS_HIDDEN_KEYS and (IS_MASKED or score.bias.ptr is not None)
    keys = n0 + tl.arange(0, BLOCK_N)[None, :]
    # (BLOCK_N, BLOCK_D)
    k_tile = load_tile(
        k_source, k, n0, N, cfg, IS_MASKED, cfg.D, BLOCK_N, cfg.BLOCK_D, cfg.ALIGNMENT
    )
    k_operand = operand(k_tile, cfg)
    # (BLOCK_M, BLOCK_N)
    qk = product(q_operand, k_operand, cfg)
    visible = keys < N
    if IS_MASKED:
        visible = in_spans(keys, between(keys, start, stop, cfg), intervals, cfg)
        if cfg.MASK_TILE_M > 0:
            visible = in_block_mask(rows, keys, visible, b, h, blocks, cfg)
    corners = Corners(tl.min(rows), tl.max(rows), n0, n0 + BLOCK_N - 1)
    p = recompute_p(
        qk, stats, rows, keys, visible, corners, positions, b, h, score, M, IS_MASKED, cfg,
    )  # fmt: skip
    if cfg.HAS_LARGE_SCORES:
        row_sum += tl.sum(p, 1)
    keep = visible
    if cfg.HAS_DROPOUT:
        keep = kept(drop_key, first_kept, b, h, rows, n0, positions, cfg)
    if HAS_SCORES:
        ts = tl.zeros_like(p)
        if tq_operand is not None:
            ts = product(tq_operand, k_operand, cfg)
        if tk.ptr is not None:
            # (BLOCK_N, BLOCK_D)
            tk_tile = load_tile(
                tk_source, tk, n0, N, cfg, IS_MASKED, cfg.D, BLOCK_N, cfg.BLOCK_D, cfg.ALIGNMENT
            )
            ts += product(q_operand, operand(tk_tile, cfg), cfg)
        # A score is a function of its product alone: the factor is that of the gradient.
        ts = score.data.scale * product_gradient(
            ts, qk, p, rows, keys, corners, b, h, positions, score, IS_MASKED, cfg
        )
        if tbias.ptr is not None:
            ts += load_bias(tbias, b, h, rows, keys, M).to(tl.float32)
        ts = p * ts
        if IS_HIDING:
            ts = tl.where(p != 0.0, ts, 0.0)
        mu += tl.sum(ts, 1)
        # (BLOCK_N, BLOCK_DV)
        v_tile = load_tile(
            v_source, v, n0, N, cfg, IS_MASKED, cfg.DV, BLOCK_N, cfg.BLOCK_DV, cfg.ALIGNMENT
        )
        if IS_HIDING:
            v_tile = without_hidden(v_tile, p)
        ts = drop(ts, keep, score.data.drop_scale, cfg).to(v_tile.dtype)
        acc = add_product_in_halves(acc, operand(ts, cfg), operand(v_tile, cfg), cfg)
    if tv.ptr is not None:
        # (BLOCK_N, BLOCK_DV)
        tv_tile = load_tile(
            tv_source, tv, n0, N, cfg, IS_MASKED, cfg.DV, BLOCK_N, cfg.BLOCK_DV, cfg.ALIGNMENT
        )
        if IS_HIDING:
            tv_tile = without_hidden(tv_tile, p)
        p_kept = drop(p, keep, score.data.drop_scale, cfg).to(tv_tile.dtype)
        acc = add_product_in_halves(acc, operand(p_kept, cfg), operand(tv_tile, cfg), cfg)
    return acc, mu, row_sum


@triton.jit(do_not_specialize=unspecialised("q", "k", "v", "out", "tq", "tk", "tv", "tout"))
def forward_tangent_kernel(
    q_ptr, q_batch, q_row, q_head, k_ptr, k_batch, k_row, k_head, v_ptr, v_batch, v_row, v_head,
    out_ptr, out_batch, out_row, out_head, tq_ptr, tq_batch, tq_row, tq_head, tk_ptr, tk_batch,
    tk_row, tk_head, tv_ptr, tv_batch, tv_row, tv_head, tout_ptr, tout_batch, tout_row, tout_head,
    lse_ptr, tlse_ptr, sink_ptr, tsink_ptr, at, score_data, bias, tbias, mask_data, lists, rng_ptr,
    B, M, N, total_q, total_k, page_columns, left, right, chunk, heads, mask_rows, mask_columns,
    first_kept, HAS_SCORES: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Tangents of one tile of queries, `tout` and `tlse_ptr`.

    HAS_SCORES: scores have a tangent; else only V has.
    """
    q = HeadRows(q_ptr, q_batch, q_row, q_head)
    k = HeadRows(k_ptr, k_batch, k_row, k_head)
    v = HeadRows(v_ptr, v_batch, v_row, v_head)
    out = HeadRows(out_ptr, out_batch, out_row, out_head)
    tq = HeadRows(tq_ptr, tq_batch, tq_row, tq_head)
    tk = HeadRows(tk_ptr, tk_batch, tk_row, tk_head)
    tv = HeadRows(tv_ptr, tv_batch, tv_row, tv_head)
    tout = HeadRows(tout_ptr, tout_batch, tout_row, tout_head)
    lengths = Lengths(B, M, N, total_q, total_k, page_columns, at)
    mask = Mask(left, right, chunk, mask_data)
    score = Score(score_data, bias)
    blocks = Blocks(mask_data, mask_rows, mask_columns, heads)
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    BLOCK_D: tl.constexpr = cfg.BLOCK_D
    BLOCK_DV: tl.constexpr = cfg.BLOCK_DV
    m_tiles = tl.cdiv(lengths.M, BLOCK_M)
    tile, bh = head_swizzle(tl.program_id(0), m_tiles, lengths.B * heads, cfg.HEAD_SWIZZLE)
    if cfg.HAS_RIGHT or cfg.SPANS > 0:
        tile = m_tiles - 1 - tile  # LPT order: the longest KV loops first
    b = bh // heads
    h = bh % heads
    kv_head = h // cfg.GROUP
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    positions = RowPositions(N - M, at, b)
    m0 = tile * BLOCK_M
    if m0 >= M:
        return
    offs_m = m0 + tl.arange(0, BLOCK_M)
    rows = offs_m[:, None]
    drop_key = dropout_key(rng_ptr) if cfg.HAS_DROPOUT else 0
    # (BLOCK_M, BLOCK_D)
    q_tile = load_rows(
        q, rows_base(q, b, start_q, h), m0, M, True, cfg.D, BLOCK_M, BLOCK_D, cfg.ALIGNMENT
    )
    q_operand = operand(q_tile, cfg)
    tq_operand = None
    if tq_ptr is not None:
        tq_tile = load_rows(
            tq, rows_base(tq, b, start_q, h), m0, M, True, cfg.D, BLOCK_M, BLOCK_D, cfg.ALIGNMENT
        )
        tq_operand = operand(tq_tile, cfg)
    # (BLOCK_M, 1)
    stats_row = stats_start(lengths, b, h, heads) + start_q
    lse = tl.load(lse_ptr + stats_row + rows, mask=rows < M, other=-float("inf"))
    pivot = pivot_of_lse(lse, cfg.HAS_LARGE_SCORES)
    stats = RowStats(pivot, tl.zeros_like(pivot), tl.zeros_like(pivot))
    # (BLOCK_M,); the sum is 1 but where a large log-sum-exp has lost digits
    mu = tl.zeros([BLOCK_M], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sink_ptr is not None:  # a key whose value is zero
        sink = tl.load(sink_ptr + h).to(tl.float32)
        p = tl.reshape(exponentials(sink, pivot, LOG2E, cfg), [BLOCK_M])
        row_sum += p
        if tsink_ptr is not None:
            mu += p * tl.load(tsink_ptr + h).to(tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    k_source = tile_source(k, rows_base(k, b, start_k, kv_head), N, cfg, cfg.D, BLOCK_N, BLOCK_D)
    v_source = tile_source(v, rows_base(v, b, start_k, kv_head), N, cfg, cfg.DV, BLOCK_N, BLOCK_DV)
    tk_source = k_source
    if tk_ptr is not None:
        tk_base = rows_base(tk, b, start_k, kv_head)
        tk_source = tile_source(tk, tk_base, N, cfg, cfg.D, BLOCK_N, BLOCK_D)
    tv_source = v_source
    if tv_ptr is not None:
        tv_base = rows_base(tv, b, start_k, kv_head)
        tv_source = tile_source(tv, tv_base, N, cfg, cfg.DV, BLOCK_N, BLOCK_DV)
    start, stop = visible_keys(rows, N, positions, mask, cfg)
    intervals = load_intervals(mask_data, b, h, start_q, rows, rows < M, N, cfg)

    if cfg.MASK_TILE_M > 0:
        capacity = tl.cdiv(lengths.N, BLOCK_N)
        counts, tiles = list_row(lists, b, h, heads, tile, m_tiles, capacity)
        full_count = tl.load(counts)
        masked_count = tl.load(counts + 1)
    else:
        last = tl.minimum(m0 + BLOCK_M, M) - 1
        first_start, first_stop = visible_keys(m0, N, positions, mask, cfg)
        last_start, last_stop = visible_keys(last, N, positions, mask, cfg)
        ranges = key_ranges(
            first_start, first_stop, last_start, last_stop, intervals, rows < M, N, cfg
        )
        full_count, masked_count = step_counts(ranges, cfg)
    # The loop counts keys, not tiles, as in the forward.
    for offset in range(0, full_count * BLOCK_N, BLOCK_N):
        i = offset // BLOCK_N
        if cfg.MASK_TILE_M > 0:
            n0 = tl.load(tiles + i) * BLOCK_N
        else:
            n0 = full_tile_of(i, ranges, cfg) * BLOCK_N
        acc, mu, row_sum = add_keys(
            acc, mu, row_sum, q_operand, tq_operand, stats, n0, k, k_source, v, v_source, tk,
            tk_source, tv, tv_source, rows, start, stop, intervals, M, N, positions, b, h, score,
            tbias, blocks, first_kept, drop_key, False, HAS_SCORES, cfg,
        )  # fmt: skip
    for i in range(0, masked_count):
        if cfg.MASK_TILE_M > 0:
            n0 = tl.load(tiles + capacity - 1 - i) * BLOCK_N
        else:
            n0 = masked_tile_of(i, ranges, cfg) * BLOCK_N
        acc, mu, row_sum = add_keys(
            acc, mu, row_sum, q_operand, tq_operand, stats, n0, k, k_source, v, v_source, tk,
            tk_source, tv, tv_source, rows, start, stop, intervals, M, N, positions, b, h, score,
            tbias, blocks, first_kept, drop_key, True, HAS_SCORES, cfg,
        )  # fmt: skip

    if cfg.HAS_LARGE_SCORES:
        weight = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
        mu, acc = mu * weight, acc * weight[:, None]
    # (BLOCK_M, BLOCK_DV)
    o_tile = load_rows(
        out, rows_base(out, b, start_q, h), m0, M, True, cfg.DV, BLOCK_M, BLOCK_DV,
        cfg.OUT_ALIGNMENT,
    )  # fmt: skip
    acc -= mu[:, None] * o_tile.to(tl.float32)
    store_rows(
        tout, rows_base(tout, b, start_q, h), m0, M, acc, cfg.DV, BLOCK_M, BLOCK_DV,
        cfg.OUT_ALIGNMENT,
    )  # fmt: skip
    tl.store(tlse_ptr + stats_row + offs_m, mu, mask=offs_m < M)
