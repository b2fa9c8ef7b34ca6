"""Gradient of the bias: dS summed over the dimensions that were broadcast.

A separate third pass, which needs neither atomics nor a score matrix in memory: a program
owns a tile of the gradient and visits every tile of scores that reads it, in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.dropout import dropout_key
from ...gpu.intrinsics import rows_base
from ...gpu.rows import HeadRows
from .arguments import Blocks, Corners, Lengths, Mask, RowPositions, Score, unspecialised
from .backward_pass import drop, load_stats, recompute_p, stats_at
from .products import operand, product, product_in_halves
from .spans import in_spans, load_intervals
from .tiles import (
    between,
    in_block_mask,
    kept,
    key_span,
    load_rows,
    query_span,
    stats_start,
    visible_keys,
)


@triton.jit
def probability_tile(
    q_tile, k_tile, pivot_ptr, delta_ptr, lengths, mask, score, blocks, heads, b, h, m0, n0,
    cfg: tl.constexpr,
):  # fmt: skip
    """Of the scores of one tile of queries and one of keys: P (BLOCK_M, BLOCK_N), zero where
    masked, Q K^T, the mask, and the statistics of the rows.
    """
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    start_q, M = query_span(lengths, b)
    _, N = key_span(lengths, b)
    offs_m = m0 + tl.arange(0, BLOCK_M)
    rows = offs_m[:, None]
    keys = n0 + tl.arange(0, BLOCK_N)[None, :]
    positions = RowPositions(N - M, lengths.at, b)
    start, stop = visible_keys(rows, N, positions, mask, cfg)
    visible = (rows < M) & between(keys, start, stop, cfg)
    intervals = load_intervals(mask.data, b, h, start_q, rows, rows < M, N, cfg)
    visible = in_spans(keys, visible, intervals, cfg)
    if cfg.MASK_TILE_M > 0:
        visible = in_block_mask(rows, keys, visible, b, h, blocks, cfg)
    # (BLOCK_M, BLOCK_N)
    qk = product(operand(q_tile, cfg), operand(k_tile, cfg), cfg)
    stats_row = stats_start(lengths, b, h, heads) + start_q
    stats = stats_at(pivot_ptr, delta_ptr, stats_row, lengths, heads, cfg)
    stats = load_stats(stats, offs_m, M, True, 1, cfg)
    corners = Corners(m0, m0 + BLOCK_M - 1, n0, n0 + BLOCK_N - 1)
    p = recompute_p(qk, stats, rows, keys, visible, corners, positions, b, h, score, M, True, cfg)
    return p, qk, visible, stats


@triton.jit
def score_gradient_tile(
    q, k, v, dout, pivot_ptr, delta_ptr, lengths, mask, score, blocks, first_kept, drop_key,
    heads, b, h, m0, n0, cfg: tl.constexpr,
):  # fmt: skip
    """Of one tile of scores: dS (BLOCK_M, BLOCK_N), zero where masked, Q K^T, and the mask."""
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    kv_head = h // cfg.GROUP
    # (BLOCK_M, BLOCK_D), (BLOCK_N, BLOCK_D), (BLOCK_M, BLOCK_DV), (BLOCK_N, BLOCK_DV)
    q_tile = load_rows(
        q, rows_base(q, b, start_q, h), m0, M, True, cfg.D, BLOCK_M, cfg.BLOCK_D, cfg.ALIGNMENT
    )
    k_tile = load_rows(
        k, rows_base(k, b, start_k, kv_head), n0, N, True, cfg.D, BLOCK_N, cfg.BLOCK_D,
        cfg.ALIGNMENT,
    )  # fmt: skip
    do_tile = load_rows(
        dout, rows_base(dout, b, start_q, h), m0, M, True, cfg.DV, BLOCK_M, cfg.BLOCK_DV,
        cfg.OUT_ALIGNMENT,
    )  # fmt: skip
    v_tile = load_rows(
        v, rows_base(v, b, start_k, kv_head), n0, N, True, cfg.DV, BLOCK_N, cfg.BLOCK_DV,
        cfg.ALIGNMENT,
    )  # fmt: skip
    # (BLOCK_M, BLOCK_N)
    dp = product_in_halves(operand(do_tile, cfg), operand(v_tile, cfg), cfg)
    p, qk, visible, stats = probability_tile(
        q_tile, k_tile, pivot_ptr, delta_ptr, lengths, mask, score, blocks, heads, b, h, m0, n0,
        cfg,
    )  # fmt: skip
    keep = visible
    if cfg.HAS_DROPOUT:
        rows = m0 + tl.arange(0, BLOCK_M)[:, None]
        positions = RowPositions(N - M, lengths.at, b)
        keep = kept(drop_key, first_kept, b, h, rows, n0, positions, cfg)
    ds = p * (drop(dp, keep, score.data.drop_scale, cfg) - stats.delta)
    # Keys of a sequence without queries may be NaN, whatever hides other keys.
    return tl.where(p > 0.0, ds, 0.0), qk, visible


@triton.jit(do_not_specialize=unspecialised("q", "k", "v", "dout"))
def bias_gradient_kernel(
    q_ptr, q_batch, q_row, q_head, k_ptr, k_batch, k_row, k_head, v_ptr, v_batch, v_row, v_head,
    dout_ptr, dout_batch, dout_row, dout_head, dbias, pivot_ptr, delta_ptr, at, score_data, bias,
    mask_data, rng_ptr, B, M, N, total_q, total_k, page_columns, left, right, chunk, heads,
    mask_rows, mask_columns, first_kept, IS_BATCH_SHARED: tl.constexpr,
    IS_HEAD_SHARED: tl.constexpr, IS_ROW_SHARED: tl.constexpr, IS_KEY_SHARED: tl.constexpr,
    cfg: tl.constexpr,
):  # fmt: skip
    """One tile of the gradient `dbias`. The IS_X_SHARED flags name the dimensions in which the bias
    was broadcast.
    """
    q = HeadRows(q_ptr, q_batch, q_row, q_head)
    k = HeadRows(k_ptr, k_batch, k_row, k_head)
    v = HeadRows(v_ptr, v_batch, v_row, v_head)
    dout = HeadRows(dout_ptr, dout_batch, dout_row, dout_head)
    lengths = Lengths(B, M, N, total_q, total_k, page_columns, at)
    mask = Mask(left, right, chunk, mask_data)
    score = Score(score_data, bias)
    blocks = Blocks(mask_data, mask_rows, mask_columns, heads)
    dbias_heads = 1 if IS_HEAD_SHARED else heads
    drop_key = dropout_key(rng_ptr) if cfg.HAS_DROPOUT else 0
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    own_h = tl.program_id(0) % dbias_heads
    own_b = tl.program_id(0) // dbias_heads
    own_m = tl.program_id(1) * BLOCK_M
    own_n = tl.program_id(2) * BLOCK_N
    # Terms of the four sums: one in a dimension that is not shared. They are one loop, because the
    # compiler loads the tiles of the next step ahead only in an innermost loop.
    b_terms = lengths.B if IS_BATCH_SHARED else 1
    h_terms = heads if IS_HEAD_SHARED else 1
    m_terms = tl.cdiv(lengths.M, BLOCK_M) if IS_ROW_SHARED else 1
    n_terms = tl.cdiv(lengths.N, BLOCK_N) if IS_KEY_SHARED else 1
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for term in range(b_terms * h_terms * m_terms * n_terms):
        m_term = term // n_terms
        h_term = m_term // m_terms
        n0 = own_n + term % n_terms * BLOCK_N
        m0 = own_m + m_term % m_terms * BLOCK_M
        h = own_h + h_term % h_terms
        b = own_b + h_term // h_terms
        ds, _, _ = score_gradient_tile(
            q, k, v, dout, pivot_ptr, delta_ptr, lengths, mask, score, blocks, first_kept,
            drop_key, heads, b, h, m0, n0, cfg,
        )  # fmt: skip
        acc += ds
    rows = own_m + tl.arange(0, BLOCK_M)[:, None]
    keys = own_n + tl.arange(0, BLOCK_N)[None, :]
    if IS_ROW_SHARED:
        acc = tl.sum(acc, 0)[None, :]
        rows = tl.zeros([1, 1], tl.int32)
    if IS_KEY_SHARED:
        acc = tl.sum(acc, 1)[:, None]
        keys = tl.zeros([1, 1], tl.int32)
    offs = own_b.to(tl.int64) * dbias.batch + own_h.to(tl.int64) * dbias.head
    offs += rows.to(tl.int64) * dbias.row + keys.to(tl.int64) * dbias.key
    inside = (rows < lengths.M) & (keys < lengths.N)
    tl.store(dbias.ptr + offs, acc.to(dbias.ptr.dtype.element_ty), mask=inside)
