"""The row sums that large log-sum-exps have lost.

The log-sum-exp is m + log(l), for a row's maximum m and sum l. Its float32 number is off by up to
2**-24 of its size, and so is every P = exp(S - lse) of the row. At -1e9, where m + log(l) rounds to
m, that is all of l: P would be 1 for each of l equal keys. So the backward adds up P first in rows
of large scores, such as those whose every key a mask hides by adding a huge negative number.
Programs without such a row return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.intrinsics import rows_base
from ...gpu.rows import HeadRows
from ...problem import LARGE_LSE
from .arguments import Blocks, Lengths, Mask, Score, unspecialised
from .backward_pass import load_stats, stats_at
from .bias_gradient import probability_tile
from .exponentials import exponent_factor, exponentials
from .tiles import key_span, load_rows, query_span, stats_start

LARGE = tl.constexpr(LARGE_LSE)


@triton.jit(do_not_specialize=unspecialised("q", "k"))
def row_sums_kernel(
    q_ptr, q_batch, q_row, q_head, k_ptr, k_batch, k_row, k_head, pivot_ptr, delta_ptr, sink_ptr,
    at, score_data, bias, mask_data, B, M, N, total_q, total_k, page_columns, left, right, chunk,
    heads, mask_rows, mask_columns, first_kept, cfg: tl.constexpr,
):  # fmt: skip
    """log2 of the row sums of P, after the pivots; 0 where the log-sum-exp is not large."""
    q = HeadRows(q_ptr, q_batch, q_row, q_head)
    k = HeadRows(k_ptr, k_batch, k_row, k_head)
    lengths = Lengths(B, M, N, total_q, total_k, page_columns, at)
    mask = Mask(left, right, chunk, mask_data)
    score = Score(score_data, bias)
    blocks = Blocks(mask_data, mask_rows, mask_columns, heads)
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    h = tl.program_id(0) % heads
    b = tl.program_id(0) // heads
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    m0 = tl.program_id(1) * BLOCK_M
    offs_m = m0 + tl.arange(0, BLOCK_M)
    stats_row = stats_start(lengths, b, h, heads) + start_q
    rows = stats_at(pivot_ptr, delta_ptr, stats_row, lengths, heads, cfg)
    # (BLOCK_M, 1)
    pivot = load_stats(rows, offs_m, M, True, 1, cfg).pivot
    size = tl.abs(pivot)
    is_large = (size >= LARGE) & (size < float("inf"))
    if tl.max(is_large.to(tl.int32)) == 0:
        return
    # (BLOCK_M, BLOCK_D)
    q_base, k_base = rows_base(q, b, start_q, h), rows_base(k, b, start_k, h // cfg.GROUP)
    q_tile = load_rows(q, q_base, m0, M, True, cfg.D, BLOCK_M, cfg.BLOCK_D, cfg.ALIGNMENT)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for n0 in range(0, N, BLOCK_N):
        # (BLOCK_N, BLOCK_D)
        k_tile = load_rows(k, k_base, n0, N, True, cfg.D, BLOCK_N, cfg.BLOCK_D, cfg.ALIGNMENT)
        found = probability_tile(
            q_tile, k_tile, pivot_ptr, delta_ptr, lengths, mask, score, blocks, heads, b, h, m0, n0,
            cfg,
        )  # fmt: skip
        row_sum += tl.sum(found[0], 1)
    row_sum = row_sum[:, None]
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + h).to(tl.float32)
        row_sum += exponentials(sink, pivot, exponent_factor(score, cfg), cfg)
    log_sum = tl.math.log2(tl.where(is_large & (row_sum > 0.0), row_sum, 1.0))
    tl.store(rows.log_sum + offs_m[:, None], log_sum, mask=offs_m[:, None] < M)
