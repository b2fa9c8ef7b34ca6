"""Gradients of the values that a score function captures.

A separate pass: a program owns the tiles of one band (`distance_gradient.py`) and recomputes the
gradients of their scores. If all scores of the band, or all of a diagonal, read one captured value,
the program adds up its gradient in registers. It adds these sums, and the gradients of all other
values that a tile has read, to the captured values' gradients with atomics. So the order of the
sums, and with it their rounding, may differ from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.dropout import dropout_key
from ...gpu.rows import HeadRows
from .arguments import Blocks, Lengths, Mask, RowPositions, Score, unspecialised
from .bias_gradient import score_gradient_tile
from .distance_gradient import band_offset, diagonal_sums, rows_of_band
from .positions import indices_of_scores
from .tiles import capped_score, key_span, query_span


@triton.jit(do_not_specialize=unspecialised("q", "k", "v", "dout"))
def captured_gradient_kernel(
    q_ptr, q_batch, q_row, q_head, k_ptr, k_batch, k_row, k_head, v_ptr, v_batch, v_row, v_head,
    dout_ptr, dout_batch, dout_row, dout_head, dcaptured_ptr, pivot_ptr, delta_ptr, at,
    score_data, bias, mask_data, rng_ptr, B, M, N, total_q, total_k, page_columns, left, right,
    chunk, heads, mask_rows, mask_columns, first_kept, cfg: tl.constexpr,
):  # fmt: skip
    """One band of tiles of scores of one sequence and query head: add to the gradients of the
    captured values, `dcaptured_ptr`, float32.
    """
    q = HeadRows(q_ptr, q_batch, q_row, q_head)
    k = HeadRows(k_ptr, k_batch, k_row, k_head)
    v = HeadRows(v_ptr, v_batch, v_row, v_head)
    dout = HeadRows(dout_ptr, dout_batch, dout_row, dout_head)
    lengths = Lengths(B, M, N, total_q, total_k, page_columns, at)
    mask = Mask(left, right, chunk, mask_data)
    score = Score(score_data, bias)
    blocks = Blocks(mask_data, mask_rows, mask_columns, heads)
    drop_key = dropout_key(rng_ptr) if cfg.HAS_DROPOUT else 0
    values, integers = score.data.captured, score.data.captured_integers
    SIDE: tl.constexpr = cfg.BLOCK_M
    KEPT: tl.constexpr = cfg.CAPTURED_KEPT
    h = tl.program_id(0) % heads
    b = tl.program_id(0) // heads
    _, own_M = query_span(lengths, b)
    _, own_N = key_span(lengths, b)
    positions = RowPositions(own_N - own_M, at, b)
    offset = band_offset(lengths, SIDE)
    start, stop = rows_of_band(offset, own_M, own_N, positions, mask, cfg)
    kept = ()
    # Triton unrolls this loop, joins tuples with `+` only, and lets a name change its type.
    for n in tl.static_range(KEPT):  # noqa: B007
        kept = kept + (tl.zeros([SIDE, SIDE], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for m0 in range(start, stop, SIDE):
        n0 = m0 + offset
        ds, qk, visible = score_gradient_tile(
            q, k, v, dout, pivot_ptr, delta_ptr, lengths, mask, score, blocks, first_kept,
            drop_key, heads, b, h, m0, n0, cfg,
        )  # fmt: skip
        rows = m0 + tl.arange(0, SIDE)[:, None]
        keys = n0 + tl.arange(0, SIDE)[None, :]
        s = capped_score(qk, score, cfg)
        sequence, head, i, j = indices_of_scores(b, h, rows, keys, positions, cfg)
        kept = cfg.CAPTURED_GRADIENT(
            s, sequence, head, i, j, ds, visible, values, integers, dcaptured_ptr, kept
        )
    if (KEPT > 0) & (start < stop):
        # The scores of the first row of the band, and to the left of them.
        columns = tl.arange(0, SIDE)
        wrapped = ()
        above = ()
        for n in tl.static_range(KEPT):
            sums = diagonal_sums(kept[n])
            above = above + (sums[0],)  # type: ignore[assignment]  # noqa: RUF005
            wrapped = wrapped + (sums[1],)  # type: ignore[assignment]  # noqa: RUF005
        sequence, head, i, j = indices_of_scores(
            b, h, start, start + offset + columns, positions, cfg
        )
        cfg.CAPTURED_SUMS(sequence, head, i, j, values, integers, dcaptured_ptr, above)
        cfg.CAPTURED_SUMS(sequence, head, i, j - SIDE, values, integers, dcaptured_ptr, wrapped)
