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
from ...gpu.kernel import kernel
from ...gpu.rows import HeadRows
from ...gpu.score_source import Corners
from .arguments import UNSPECIALISED, Dropout, Lengths, Mask, RowStats, Score, Sequence
from .backward_pass import drop, recompute_p
from .masks import full_tile_of, in_spans, load_intervals, masked_tile_of, steps_of_queries
from .products import add_product_in_halves, operand, product
from .tiles import (
    between,
    exponentials,
    in_block_mask,
    kept,
    key_span,
    load_bias,
    load_query_tile,
    load_tile,
    pivot_of_lse,
    product_gradient,
    query_span,
    stats_start,
    store_rows,
    tile_of_queries,
    tile_source,
    visible_keys,
    without_hidden,
)


@triton.jit
def add_keys(
    acc, mu, row_sum, q_operand, tq_operand, stats, n0, k, k_source, v, v_source, tk, tk_source, tv,
    tv_source, rows, start, stop, intervals, sequence, h, mask, score, tbias, dropout,
    IS_MASKED: tl.constexpr, HAS_SCORES: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """One step of the KV loop: the keys [n0, n0 + BLOCK_N)."""
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    M, N = sequence.M, sequence.N
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
            visible = in_block_mask(rows, keys, visible, sequence, h, mask, cfg)
    corners = Corners(tl.min(rows), tl.max(rows), n0, n0 + BLOCK_N - 1)
    p = recompute_p(qk, stats, rows, keys, visible, corners, sequence, h, score, M, IS_MASKED, cfg)
    if cfg.HAS_LARGE_SCORES:
        row_sum += tl.sum(p, 1)
    keep = visible
    if cfg.HAS_DROPOUT:
        keep = kept(dropout, rows, n0, sequence, h, cfg)
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
            ts, qk, p, rows, keys, corners, sequence, h, score, IS_MASKED, cfg
        )
        if tbias.ptr is not None:
            ts += load_bias(tbias, sequence.b, h, rows, keys, M).to(tl.float32)
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


@kernel(*UNSPECIALISED)
def forward_tangent_kernel(
    q: HeadRows, k: HeadRows, v: HeadRows, out: HeadRows, tq: HeadRows, tk: HeadRows, tv: HeadRows,
    tout: HeadRows, lse_ptr, tlse_ptr, sink_ptr, tsink_ptr, tbias, score: Score, lists, rng_ptr,
    lengths: Lengths, mask: Mask, first_kept, HAS_SCORES: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Tangents of one tile of queries, `tout` and `tlse_ptr`.

    HAS_SCORES: scores have a tangent; else only V has.
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
    # (BLOCK_M, BLOCK_D)
    q_tile = load_query_tile(q, sequence, h, m0, cfg.D, cfg.BLOCK_D, cfg.ALIGNMENT, cfg)
    q_operand = operand(q_tile, cfg)
    tq_operand = None
    if tq.ptr is not None:
        tq_tile = load_query_tile(tq, sequence, h, m0, cfg.D, cfg.BLOCK_D, cfg.ALIGNMENT, cfg)
        tq_operand = operand(tq_tile, cfg)
    # (BLOCK_M, 1)
    stats_row = stats_start(sequence, h)
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
    if tk.ptr is not None:
        tk_base = rows_base(tk, b, start_k, kv_head)
        tk_source = tile_source(tk, tk_base, N, cfg, cfg.D, BLOCK_N, BLOCK_D)
    tv_source = v_source
    if tv.ptr is not None:
        tv_base = rows_base(tv, b, start_k, kv_head)
        tv_source = tile_source(tv, tv_base, N, cfg, cfg.DV, BLOCK_N, BLOCK_DV)
    start, stop = visible_keys(rows, sequence, mask, cfg)
    intervals = load_intervals(mask.data, sequence, h, rows, rows < M, cfg)

    full_count, masked_count, steps = steps_of_queries(
        lists, sequence, h, tile, m_tiles, rows, intervals, mask, cfg
    )
    # The loop counts keys, not tiles, as in the forward.
    for offset in range(0, full_count * BLOCK_N, BLOCK_N):
        n0 = full_tile_of(offset // BLOCK_N, steps, cfg) * BLOCK_N
        acc, mu, row_sum = add_keys(
            acc, mu, row_sum, q_operand, tq_operand, stats, n0, k, k_source, v, v_source, tk,
            tk_source, tv, tv_source, rows, start, stop, intervals, sequence, h, mask, score, tbias,
            dropout, False, HAS_SCORES, cfg,
        )  # fmt: skip
    for i in range(0, masked_count):
        n0 = masked_tile_of(i, steps, cfg) * BLOCK_N
        acc, mu, row_sum = add_keys(
            acc, mu, row_sum, q_operand, tq_operand, stats, n0, k, k_source, v, v_source, tk,
            tk_source, tv, tv_source, rows, start, stop, intervals, sequence, h, mask, score, tbias,
            dropout, True, HAS_SCORES, cfg,
        )  # fmt: skip

    if cfg.HAS_LARGE_SCORES:
        weight = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
        mu, acc = mu * weight, acc * weight[:, None]
    # (BLOCK_M, BLOCK_DV)
    o_tile = load_query_tile(out, sequence, h, m0, cfg.DV, cfg.BLOCK_DV, cfg.OUT_ALIGNMENT, cfg)
    acc -= mu[:, None] * o_tile.to(tl.float32)
    store_rows(
        tout, rows_base(tout, b, start_q, h), m0, M, acc, cfg.DV, BLOCK_M, BLOCK_DV,
        cfg.OUT_ALIGNMENT,
    )  # fmt: skip
    tl.store(tlse_ptr + stats_row + offs_m, mu, mask=offs_m < M)
