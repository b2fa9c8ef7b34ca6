"""Gradients of the values that a score function captures.

A separate pass: a program owns one tile of scores, recomputes the gradient of its scores, and adds
its part to every captured value that the tile has read, with atomics. So the order of the sums, and
with it their rounding, may differ from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.rows import HeadRows
from .arguments import Blocks, Lengths, Mask, Places, Score, unspecialised
from .bias_gradient import score_gradient_tile
from .positions import indices_of_scores
from .score_rule import capped_score
from .tiles import dropout_key, key_span, query_span


@triton.jit(do_not_specialize=unspecialised("q", "k", "v", "dout"))
def captured_gradient_kernel(
    q_ptr, q_batch, q_row, q_head, k_ptr, k_batch, k_row, k_head, v_ptr, v_batch, v_row, v_head,
    dout_ptr, dout_batch, dout_row, dout_head, dcaptured_ptr, lse_ptr, delta_ptr, at, score_data,
    bias, mask_data, rng_ptr, B, M, N, total_q, total_k, page_columns, left, right,
    chunk, heads, mask_rows, mask_columns, drop_threshold, cfg: tl.constexpr,
):  # fmt: skip
    """One tile of scores: add to the gradients of the captured values, `dcaptured_ptr`, float32."""
    q = HeadRows(q_ptr, q_batch, q_row, q_head)
    k = HeadRows(k_ptr, k_batch, k_row, k_head)
    v = HeadRows(v_ptr, v_batch, v_row, v_head)
    dout = HeadRows(dout_ptr, dout_batch, dout_row, dout_head)
    lengths = Lengths(B, M, N, total_q, total_k, page_columns, at)
    mask = Mask(left, right, chunk, mask_data)
    score = Score(score_data, bias)
    blocks = Blocks(mask_data, mask_rows, mask_columns, heads)
    drop_key = dropout_key(rng_ptr) if cfg.HAS_DROPOUT else 0
    h = tl.program_id(0) % heads
    b = tl.program_id(0) // heads
    m0 = tl.program_id(1) * cfg.BLOCK_M
    n0 = tl.program_id(2) * cfg.BLOCK_N
    ds, qk, visible = score_gradient_tile(
        q, k, v, dout, lse_ptr, delta_ptr, lengths, mask, score, blocks, drop_threshold, drop_key,
        heads, b, h, m0, n0, cfg,
    )  # fmt: skip
    rows = m0 + tl.arange(0, cfg.BLOCK_M)[:, None]
    keys = n0 + tl.arange(0, cfg.BLOCK_N)[None, :]
    s = capped_score(qk, score, cfg)
    values, integers = score.data.captured, score.data.captured_integers
    _, M = query_span(lengths, b)
    _, N = key_span(lengths, b)
    sequence, head, i, j = indices_of_scores(b, h, rows, keys, Places(N - M, at, b), cfg)
    cfg.CAPTURED_GRADIENT(s, sequence, head, i, j, ds, visible, values, integers, dcaptured_ptr)
