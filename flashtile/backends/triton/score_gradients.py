"""Passes over single tiles of scores, beside the forward and the backward: the gradients of what is
added to scores, the row sums that large log-sum-exps have lost, and the probabilities themselves.

All recompute P of a tile with `probability_tile`, and dS with `score_gradient_tile`. None needs a
score matrix in memory, except the last one, which writes it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...gpu.dropout import dropout_key
from ...gpu.intrinsics import rows_base
from ...gpu.kernel import kernel
from ...gpu.rows import HeadRows
from ...gpu.score_source import Corners
from ...problem import LARGE_LSE, Operands, Options
from .arguments import UNSPECIALISED, Dropout, Lengths, Mask, Score, Sequence
from .backward_pass import drop, load_stats, recompute_p, stats_at
from .cache import load_keys, page_list
from .masks import in_spans, load_intervals
from .products import operand, product
from .tiles import (
    between,
    capped_score,
    exponent_factor,
    exponentials,
    in_block_mask,
    indices_of_scores,
    kept,
    key_row_of_batch,
    key_span,
    load_key_tile,
    load_query_tile,
    load_rows,
    pivot_of_lse,
    query_span,
    scores_of,
    stats_start,
    visible_keys,
)


@triton.jit
def probability_tile(
    q_tile, k_tile, pivot_ptr, delta_ptr, sequence, mask, score, h, m0, n0, cfg: tl.constexpr
):
    """Of the scores of one tile of queries and one of keys: P (BLOCK_M, BLOCK_N), zero where
    masked, Q K^T, the mask, and the statistics of the rows.
    """
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    M = sequence.M
    offs_m = m0 + tl.arange(0, BLOCK_M)
    rows = offs_m[:, None]
    keys = n0 + tl.arange(0, BLOCK_N)[None, :]
    start, stop = visible_keys(rows, sequence, mask, cfg)
    visible = (rows < M) & between(keys, start, stop, cfg)
    intervals = load_intervals(mask.data, sequence, h, rows, rows < M, cfg)
    visible = in_spans(keys, visible, intervals, cfg)
    if cfg.MASK_TILE_M > 0:
        visible = in_block_mask(rows, keys, visible, sequence, h, mask, cfg)
    # (BLOCK_M, BLOCK_N)
    qk = product(operand(q_tile, cfg), operand(k_tile, cfg), cfg)
    stats = stats_at(pivot_ptr, delta_ptr, sequence, h, cfg)
    # (BLOCK_M, 1)
    stats = load_stats(stats, offs_m, M, True, 1, cfg)
    corners = Corners(m0, m0 + BLOCK_M - 1, n0, n0 + BLOCK_N - 1)
    # (BLOCK_M, BLOCK_N)
    p = recompute_p(qk, stats, rows, keys, visible, corners, sequence, h, score, M, True, cfg)
    return p, qk, visible, stats


@triton.jit
def score_gradient_tile(
    q, k, v, dout, pivot_ptr, delta_ptr, lengths, mask, score, dropout, b, h, m0, n0,
    cfg: tl.constexpr,
):  # fmt: skip
    """Of one tile of scores: dS (BLOCK_M, BLOCK_N), zero where masked, Q K^T, and the mask."""
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    sequence = Sequence(b, start_q, M, start_k, N, lengths)
    kv_head = h // cfg.GROUP
    # (BLOCK_M, BLOCK_D), (BLOCK_N, BLOCK_D), (BLOCK_M, BLOCK_DV), (BLOCK_N, BLOCK_DV)
    q_tile = load_query_tile(q, sequence, h, m0, cfg.D, cfg.BLOCK_D, cfg.ALIGNMENT, cfg)
    k_tile = load_key_tile(k, sequence, kv_head, n0, cfg.D, cfg.BLOCK_D, cfg.ALIGNMENT, cfg)
    do_tile = load_query_tile(dout, sequence, h, m0, cfg.DV, cfg.BLOCK_DV, cfg.OUT_ALIGNMENT, cfg)
    v_tile = load_key_tile(v, sequence, kv_head, n0, cfg.DV, cfg.BLOCK_DV, cfg.ALIGNMENT, cfg)
    # (BLOCK_M, BLOCK_N)
    p, qk, visible, stats = probability_tile(
        q_tile, k_tile, pivot_ptr, delta_ptr, sequence, mask, score, h, m0, n0, cfg
    )
    # (BLOCK_M, BLOCK_DV) @ (BLOCK_DV, BLOCK_N) -> (BLOCK_M, BLOCK_N)
    dp = product(operand(do_tile, cfg), operand(v_tile, cfg), cfg, 0.5 * stats.delta)
    keep = visible
    if cfg.HAS_DROPOUT:
        rows = m0 + tl.arange(0, BLOCK_M)[:, None]
        keep = kept(dropout, rows, n0, sequence, h, cfg)
    ds = p * (drop(dp, keep, score.data.drop_scale, cfg) - stats.delta)
    # Keys of a sequence without queries may be NaN, whatever hides other keys.
    return tl.where(p != 0.0, ds, 0.0), qk, visible


# Gradient of the bias: dS summed over the dimensions that were broadcast. A program owns a tile of
# the gradient and visits every tile of scores that reads it, in a fixed order, without atomics.


@kernel(*UNSPECIALISED)
def bias_gradient_kernel(
    q: HeadRows, k: HeadRows, v: HeadRows, dout: HeadRows, dbias, pivot_ptr, delta_ptr,
    score: Score, rng_ptr, lengths: Lengths, mask: Mask, first_kept, IS_BATCH_SHARED: tl.constexpr,
    IS_HEAD_SHARED: tl.constexpr, IS_ROW_SHARED: tl.constexpr, IS_KEY_SHARED: tl.constexpr,
    cfg: tl.constexpr,
):  # fmt: skip
    """One tile of the gradient `dbias`. The IS_X_SHARED flags name the dimensions in which the bias
    was broadcast.
    """
    dbias_heads = 1 if IS_HEAD_SHARED else lengths.heads
    dropout = Dropout(dropout_key(rng_ptr) if cfg.HAS_DROPOUT else 0, first_kept)
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    own_h = tl.program_id(0) % dbias_heads
    own_b = tl.program_id(0) // dbias_heads
    own_m = tl.program_id(1) * BLOCK_M
    own_n = tl.program_id(2) * BLOCK_N
    # Terms of the four sums: one in a dimension that is not shared. They are one loop, because the
    # compiler loads the tiles of the next step ahead only in an innermost loop.
    b_terms = lengths.B if IS_BATCH_SHARED else 1
    h_terms = lengths.heads if IS_HEAD_SHARED else 1
    m_terms = tl.cdiv(lengths.M, BLOCK_M) if IS_ROW_SHARED else 1
    n_terms = tl.cdiv(lengths.N, BLOCK_N) if IS_KEY_SHARED else 1
    # (BLOCK_M, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for term in range(b_terms * h_terms * m_terms * n_terms):
        m_term = term // n_terms
        h_term = m_term // m_terms
        n0 = own_n + term % n_terms * BLOCK_N
        m0 = own_m + m_term % m_terms * BLOCK_M
        h = own_h + h_term % h_terms
        b = own_b + h_term // h_terms
        ds, _, _ = score_gradient_tile(
            q, k, v, dout, pivot_ptr, delta_ptr, lengths, mask, score, dropout, b, h, m0, n0, cfg
        )
        acc += ds
    rows = own_m + tl.arange(0, BLOCK_M)[:, None]
    keys = own_n + tl.arange(0, BLOCK_N)[None, :]
    if IS_ROW_SHARED:
        # (1, BLOCK_N)
        acc = tl.sum(acc, 0)[None, :]
        rows = tl.zeros([1, 1], tl.int32)
    if IS_KEY_SHARED:
        # (BLOCK_M, 1), or (1, 1)
        acc = tl.sum(acc, 1)[:, None]
        keys = tl.zeros([1, 1], tl.int32)
    offs = own_b.to(tl.int64) * dbias.batch + own_h.to(tl.int64) * dbias.head
    offs += rows.to(tl.int64) * dbias.row + keys.to(tl.int64) * dbias.key
    inside = (rows < lengths.M) & (keys < lengths.N)
    tl.store(dbias.ptr + offs, acc.to(dbias.ptr.dtype.element_ty), mask=inside)


# The gradients of numbers that scores add by distance: ALiBi's slopes and a relative bias.
#
# Both need only the sums of dS over all scores of equal distance. A program owns the tiles of one
# band, whose first key minus first row is the same. In all of them, an element has the same
# distance, so the program adds up whole tiles of dS, and sums over the diagonals once, at the end.
# Tiles are square. Neighbouring bands share distances and write to different buffers, so every sum
# has one fixed order.


@triton.jit
def band_offset(lengths, SIDE: tl.constexpr):
    """First key minus first row of the tiles of the program's band; under a causal mask, the
    longest bands that are not empty come first (LPT order).
    """
    return (tl.cdiv(lengths.N, SIDE) - 1 - tl.program_id(1)) * SIDE


@triton.jit
def rows_of_band(offset, sequence, mask, cfg: tl.constexpr):
    """Rows [start, stop) of a band of a sequence; none if no score is visible.

    A band has the scores whose key minus row is within (offset - SIDE, offset + SIDE).
    """
    SIDE: tl.constexpr = cfg.BLOCK_M
    start = tl.maximum(-offset, 0)
    stop = tl.minimum(sequence.M, sequence.N - offset)
    shift = sequence.N - sequence.M
    if cfg.RUNS == 0:
        if cfg.HAS_LEFT:
            stop = tl.where(offset + SIDE <= shift - mask.left, start, stop)
        if cfg.HAS_RIGHT:
            stop = tl.where(offset - SIDE >= shift + mask.right, start, stop)
        if cfg.HAS_CHUNK:
            is_near = (offset + SIDE > shift - mask.chunk) & (offset - SIDE < shift + mask.chunk)
            stop = tl.where(is_near, stop, start)
    return start, stop


@triton.jit
def diagonal_sums(x):
    """The sums of the diagonals of a square tile: (SIDE,) for those from column c of the first row,
    and (SIDE,) for those from column c - SIDE, outside of the tile.
    """
    SIDE: tl.constexpr = x.shape[0]
    # Row i moved left by i, with its first i columns after the others: column c then holds the
    # diagonal c, below the wrapped ones of the diagonal c - SIDE.
    rows, columns = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    # (SIDE, SIDE)
    moved = tl.gather(x, (columns + rows) % SIDE, 1)
    is_wrapped = columns + rows >= SIDE
    return tl.sum(tl.where(is_wrapped, 0.0, moved), 0), tl.sum(tl.where(is_wrapped, moved, 0.0), 0)


@kernel(*UNSPECIALISED)
def distance_gradient_kernel(
    q: HeadRows, k: HeadRows, v: HeadRows, dout: HeadRows, sums_ptr, pivot_ptr, delta_ptr,
    score: Score, rng_ptr, lengths: Lengths, mask: Mask, first_kept, cfg: tl.constexpr,
):  # fmt: skip
    """Sums of dS over the diagonals of one band of tiles, for one sequence and query head.

    `sums_ptr`: (2, B, heads, M + N - 1), zeros; the last dimension is the distance plus N - 1.
    """
    dropout = Dropout(dropout_key(rng_ptr) if cfg.HAS_DROPOUT else 0, first_kept)
    SIDE: tl.constexpr = cfg.BLOCK_M
    h = tl.program_id(0) % lengths.heads
    b = tl.program_id(0) // lengths.heads
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    sequence = Sequence(b, start_q, M, start_k, N, lengths)
    offset = band_offset(lengths, SIDE)
    start, stop = rows_of_band(offset, sequence, mask, cfg)
    # (SIDE, SIDE)
    acc = tl.zeros([SIDE, SIDE], tl.float32)
    for m0 in range(start, stop, SIDE):
        found = score_gradient_tile(
            q, k, v, dout, pivot_ptr, delta_ptr, lengths, mask, score, dropout, b, h, m0,
            m0 + offset, cfg,
        )  # fmt: skip
        acc += found[0]
    # (SIDE,)
    above, wrapped = diagonal_sums(acc)
    width = lengths.M + lengths.N - 1
    row = (tl.program_id(1) % 2).to(tl.int64) * lengths.B + b
    sums = sums_ptr + (row * lengths.heads + h) * width
    slots = tl.arange(0, SIDE) + offset - (N - M) + lengths.N - 1
    tl.store(sums + slots, above, mask=(slots >= 0) & (slots < width))
    slots -= SIDE
    tl.store(sums + slots, wrapped, mask=(slots >= 0) & (slots < width))


def gradients_of(
    sums: Tensor, operands: Operands, options: Options
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the slopes and of the relative bias that a call needs, from the sums of
    `distance_gradient_kernel`.
    """
    by_distance = sums.double().sum(0)
    lowest = 1 - options.max_seqlen_k
    distance = torch.arange(lowest, lowest + sums.shape[-1], device=sums.device)
    dslopes = dtable = None
    slopes, table = operands.alibi_slopes, operands.relative_bias
    if slopes is not None and options.alibi_needs_grad:
        dslopes = -(by_distance @ distance.abs().double())
        dslopes = dslopes.sum_to_size(slopes.shape).to(slopes.dtype)
    if table is not None and options.relative_bias_needs_grad:
        dtable = _by_column(by_distance.sum(0), lowest, table.shape[1] // 2).to(table.dtype)
    return dslopes, dtable


def _by_column(sums: Tensor, lowest: int, R: int) -> Tensor:
    """(heads, 2 R + 1) from sums (heads, distances) that begin at the distance `lowest`. Distances
    beyond R count to the ends. Without `index_add_`, whose order is not fixed on a GPU.
    """
    highest = lowest + sums.shape[1] - 1
    before, after = max(lowest + R, 0), max(R - highest, 0)
    sums = torch.nn.functional.pad(sums, (before, after))
    lowest, highest = lowest - before, highest + after
    inner = sums[:, -R - lowest : sums.shape[1] - (highest - R)].clone()
    inner[:, 0] += sums[:, : -R - lowest].sum(1)
    inner[:, -1] += sums[:, sums.shape[1] - (highest - R) :].sum(1)
    return inner


# Gradients of the values that a score function captures.
#
# A program owns the tiles of one band, as above, and recomputes the gradients of their scores. If
# all scores of the band, or all of a diagonal, read one captured value, the program adds up its
# gradient in registers. It adds these sums, and the gradients of all other values that a tile has
# read, to the captured values' gradients with atomics. So the order of the sums, and with it their
# rounding, may differ from run to run.


@kernel(*UNSPECIALISED)
def captured_gradient_kernel(
    q: HeadRows, k: HeadRows, v: HeadRows, dout: HeadRows, dcaptured_ptr, pivot_ptr, delta_ptr,
    score: Score, rng_ptr, lengths: Lengths, mask: Mask, first_kept, cfg: tl.constexpr,
):  # fmt: skip
    """One band of tiles of scores of one sequence and query head: add to the gradients of the
    captured values, `dcaptured_ptr`, float32.
    """
    dropout = Dropout(dropout_key(rng_ptr) if cfg.HAS_DROPOUT else 0, first_kept)
    values, integers = score.data.captured, score.data.captured_integers
    SIDE: tl.constexpr = cfg.BLOCK_M
    KEPT: tl.constexpr = cfg.CAPTURED_KEPT
    h = tl.program_id(0) % lengths.heads
    b = tl.program_id(0) // lengths.heads
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    sequence = Sequence(b, start_q, M, start_k, N, lengths)
    offset = band_offset(lengths, SIDE)
    start, stop = rows_of_band(offset, sequence, mask, cfg)
    # KEPT tiles (SIDE, SIDE)
    kept = ()
    # Triton unrolls this loop, joins tuples with `+` only, and lets a name change its type.
    for n in tl.static_range(KEPT):  # noqa: B007
        kept = kept + (tl.zeros([SIDE, SIDE], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for m0 in range(start, stop, SIDE):
        n0 = m0 + offset
        # (SIDE, SIDE)
        ds, qk, visible = score_gradient_tile(
            q, k, v, dout, pivot_ptr, delta_ptr, lengths, mask, score, dropout, b, h, m0, n0, cfg
        )
        rows = m0 + tl.arange(0, SIDE)[:, None]
        keys = n0 + tl.arange(0, SIDE)[None, :]
        s = capped_score(qk, score, cfg)
        index, head, i, j = indices_of_scores(rows, keys, sequence, h, cfg)
        kept = cfg.CAPTURED_GRADIENT(
            s, index, head, i, j, ds, visible, values, integers, dcaptured_ptr, kept
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
        index, head, i, j = indices_of_scores(start, start + offset + columns, sequence, h, cfg)
        cfg.CAPTURED_SUMS(index, head, i, j, values, integers, dcaptured_ptr, above)
        cfg.CAPTURED_SUMS(index, head, i, j - SIDE, values, integers, dcaptured_ptr, wrapped)


# The row sums that large log-sum-exps have lost.
#
# The log-sum-exp is m + log(l), for a row's maximum m and sum l. Its float32 number is off by up to
# 2**-24 of its size, and so is every P = exp(S - lse) of the row. At -1e9, where m + log(l) rounds
# to m, that is all of l: P would be 1 for each of l equal keys. So the backward adds up P first in
# rows of large scores, such as those whose every key a mask hides by adding a huge negative number.
# Programs without such a row return at once.


LARGE = tl.constexpr(LARGE_LSE)


@kernel(*UNSPECIALISED)
def row_sums_kernel(
    q: HeadRows, k: HeadRows, pivot_ptr, delta_ptr, sink_ptr, score: Score, lengths: Lengths,
    mask: Mask, cfg: tl.constexpr,
):  # fmt: skip
    """log2 of the row sums of P, after the pivots; 0 where the log-sum-exp is not large."""
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    h = tl.program_id(0) % lengths.heads
    b = tl.program_id(0) // lengths.heads
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    sequence = Sequence(b, start_q, M, start_k, N, lengths)
    m0 = tl.program_id(1) * BLOCK_M
    offs_m = m0 + tl.arange(0, BLOCK_M)
    rows = stats_at(pivot_ptr, delta_ptr, sequence, h, cfg)
    # (BLOCK_M, 1)
    pivot = load_stats(rows, offs_m, M, True, 1, cfg).pivot
    size = tl.abs(pivot)
    is_large = (size >= LARGE) & (size < float("inf"))
    if tl.max(is_large.to(tl.int32)) == 0:
        return
    # (BLOCK_M, BLOCK_D)
    q_base, k_base = rows_base(q, b, start_q, h), rows_base(k, b, start_k, h // cfg.GROUP)
    q_tile = load_rows(q, q_base, m0, M, True, cfg.D, BLOCK_M, cfg.BLOCK_D, cfg.ALIGNMENT)
    # (BLOCK_M,)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for n0 in range(0, N, BLOCK_N):
        # (BLOCK_N, BLOCK_D)
        k_tile = load_rows(k, k_base, n0, N, True, cfg.D, BLOCK_N, cfg.BLOCK_D, cfg.ALIGNMENT)
        found = probability_tile(
            q_tile, k_tile, pivot_ptr, delta_ptr, sequence, mask, score, h, m0, n0, cfg
        )
        row_sum += tl.sum(found[0], 1)
    # (BLOCK_M, 1)
    row_sum = row_sum[:, None]
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + h).to(tl.float32)
        row_sum += exponentials(sink, pivot, exponent_factor(score, cfg), cfg)
    log_sum = tl.math.log2(tl.where(is_large & (row_sum > 0.0), row_sum, 1.0))
    tl.store(rows.log_sum + offs_m[:, None], log_sum, mask=offs_m[:, None] < M)


# The softmax probabilities, quadratic in memory: for inspection, not for training.


@kernel(*UNSPECIALISED)
def probabilities_kernel(
    q: HeadRows, k: HeadRows, probs_ptr, lse_ptr, score: Score, rng_ptr, lengths: Lengths,
    mask: Mask, first_kept, cfg: tl.constexpr,
):  # fmt: skip
    """P = exp(S - lse) of one tile, negative where dropped; elements that are not visible are not
    written.
    """
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    n0 = tl.program_id(2) * BLOCK_N
    m0 = tl.program_id(1) * BLOCK_M
    h = tl.program_id(0) % lengths.heads
    b = tl.program_id(0) // lengths.heads
    kv_head = h // cfg.GROUP
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    sequence = Sequence(b, start_q, M, start_k, N, lengths)
    offs_m = m0 + tl.arange(0, BLOCK_M)
    rows = offs_m[:, None]
    keys = n0 + tl.arange(0, BLOCK_N)[None, :]
    start, stop = visible_keys(rows, sequence, mask, cfg)
    visible = (rows < M) & between(keys, start, stop, cfg)
    intervals = load_intervals(mask.data, sequence, h, rows, rows < M, cfg)
    visible = in_spans(keys, visible, intervals, cfg)
    if cfg.MASK_TILE_M > 0:
        visible = in_block_mask(rows, keys, visible, sequence, h, mask, cfg)
    # (BLOCK_M, BLOCK_D), (BLOCK_N, BLOCK_D)
    q_tile = load_query_tile(q, sequence, h, m0, cfg.D, cfg.BLOCK_D, cfg.ALIGNMENT, cfg)
    if cfg.PAGE_SIZE > 0:
        k_source = k.ptr + kv_head.to(tl.int64) * k.head
    else:
        k_source = rows_base(k, key_row_of_batch(lengths, b), start_k, kv_head)
    pages = page_list(lengths, b)
    k_tile = load_keys(k_source, k, pages, n0, sequence, cfg, True, cfg.D, cfg.BLOCK_D)
    # (BLOCK_M, BLOCK_N)
    qk = product(operand(q_tile, cfg), operand(k_tile, cfg), cfg)
    corners = Corners(m0, m0 + BLOCK_M - 1, n0, n0 + BLOCK_N - 1)
    s = scores_of(qk, rows, keys, M, corners, sequence, h, score, cfg)
    stats_row = stats_start(sequence, h)
    # (BLOCK_M,)
    lse = tl.load(lse_ptr + stats_row + offs_m, mask=offs_m < M, other=-float("inf"))
    pivot = pivot_of_lse(lse, cfg.HAS_LARGE_SCORES)
    # (BLOCK_M, BLOCK_N)
    p = exponentials(s, pivot[:, None], exponent_factor(score, cfg), cfg)
    if cfg.HAS_DROPOUT:
        dropout = Dropout(dropout_key(rng_ptr), first_kept)
        p = tl.where(kept(dropout, rows, n0, sequence, h, cfg), p, -p)
    row = (b * lengths.heads + h).to(tl.int64) * lengths.M + rows
    offs = row * lengths.N + keys
    tl.store(probs_ptr + offs, p.to(probs_ptr.dtype.element_ty), mask=visible)
