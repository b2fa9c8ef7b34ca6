"""The softmax probabilities, quadratic in memory: for inspection, not for training."""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.dropout import dropout_key
from ...gpu.intrinsics import rows_base
from ...gpu.rows import HeadRows
from .arguments import Blocks, Corners, Lengths, Mask, RowPositions, Score, unspecialised
from .exponentials import exponent_factor, exponentials, pivot_of_lse
from .pages import load_keys, page_list
from .products import operand, product
from .spans import in_spans, load_intervals
from .tiles import (
    between,
    in_block_mask,
    kept,
    key_row_of_batch,
    key_span,
    load_rows,
    query_span,
    scores_of,
    stats_start,
    visible_keys,
)


@triton.jit(do_not_specialize=unspecialised("q", "k"))
def probabilities_kernel(
    q_ptr, q_batch, q_row, q_head, k_ptr, k_batch, k_row, k_head, probs_ptr, lse_ptr, at,
    score_data, bias, mask_data, rng_ptr, B, M, N, total_q, total_k, page_columns, left,
    right, chunk, heads, mask_rows, mask_columns, first_kept, cfg: tl.constexpr,
):  # fmt: skip
    """P = exp(S - lse) of one tile, negative where dropped; elements that are not visible are not
    written.
    """
    q = HeadRows(q_ptr, q_batch, q_row, q_head)
    k = HeadRows(k_ptr, k_batch, k_row, k_head)
    lengths = Lengths(B, M, N, total_q, total_k, page_columns, at)
    mask = Mask(left, right, chunk, mask_data)
    score = Score(score_data, bias)
    blocks = Blocks(mask_data, mask_rows, mask_columns, heads)
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    n0 = tl.program_id(2) * BLOCK_N
    m0 = tl.program_id(1) * BLOCK_M
    h = tl.program_id(0) % heads
    b = tl.program_id(0) // heads
    kv_head = h // cfg.GROUP
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    offs_m = m0 + tl.arange(0, BLOCK_M)
    rows = offs_m[:, None]
    keys = n0 + tl.arange(0, BLOCK_N)[None, :]
    positions = RowPositions(N - M, at, b)
    start, stop = visible_keys(rows, N, positions, mask, cfg)
    visible = (rows < M) & between(keys, start, stop, cfg)
    intervals = load_intervals(mask.data, b, h, start_q, rows, rows < M, N, cfg)
    visible = in_spans(keys, visible, intervals, cfg)
    if cfg.MASK_TILE_M > 0:
        visible = in_block_mask(rows, keys, visible, b, h, blocks, cfg)
    # (BLOCK_M, BLOCK_D), (BLOCK_N, BLOCK_D)
    q_tile = load_rows(
        q, rows_base(q, b, start_q, h), m0, M, True, cfg.D, BLOCK_M, cfg.BLOCK_D, cfg.ALIGNMENT
    )
    if cfg.PAGE_SIZE > 0:
        k_source = k.ptr + kv_head.to(tl.int64) * k.head
    else:
        k_source = rows_base(k, key_row_of_batch(lengths, b), start_k, kv_head)
    pages = page_list(lengths, b)
    k_tile = load_keys(
        k_source, k, pages, start_k, n0, N, lengths, cfg, True, cfg.D, BLOCK_N, cfg.BLOCK_D
    )
    # (BLOCK_M, BLOCK_N)
    qk = product(operand(q_tile, cfg), operand(k_tile, cfg), cfg)
    corners = Corners(m0, m0 + BLOCK_M - 1, n0, n0 + BLOCK_N - 1)
    s = scores_of(qk, rows, keys, M, corners, positions, b, h, score, cfg)
    stats_row = stats_start(lengths, b, h, heads) + start_q
    lse = tl.load(lse_ptr + stats_row + offs_m, mask=offs_m < M, other=-float("inf"))
    pivot = pivot_of_lse(lse, cfg.HAS_LARGE_SCORES)
    p = exponentials(s, pivot[:, None], exponent_factor(score, cfg), cfg)
    if cfg.HAS_DROPOUT:
        drop_key = dropout_key(rng_ptr)
        p = tl.where(kept(drop_key, first_kept, b, h, rows, n0, positions, cfg), p, -p)
    row = (b * heads + h).to(tl.int64) * lengths.M + rows
    offs = row * lengths.N + keys
    tl.store(probs_ptr + offs, p.to(probs_ptr.dtype.element_ty), mask=visible)
