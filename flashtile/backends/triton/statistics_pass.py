"""Statistics of the probabilities.

`row_statistics_kernel` owns a tile of queries and loops over the keys that they see;
`column_sum_kernel` owns a tile of keys and loops over the queries that see them. Both compute the
scores again; neither reads the values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.intrinsics import LN2, LOG2E, rows_base, tanh
from ...gpu.rows import HeadRows
from ...gpu.score_source import Corners
from .arguments import Blocks, Lengths, Mask, RowPositions, Score, unspecialised
from .cache import load_keys, page_list
from .forward_pass import first_sums
from .masks import in_spans, load_intervals
from .products import operand, product
from .tiles import (
    as_pivot,
    between,
    exponent_factor,
    exponentials,
    in_block_mask,
    key_row_of_batch,
    key_span,
    load_rows,
    masked_tile,
    pivot_of_lse,
    query_span,
    scores_of,
    seeing_rows,
    stats_start,
    tile_phases,
    visible_keys,
)

NO_WEIGHT = tl.constexpr(-1000.0)  # an exponent whose power of 2 is 0; times 0 it is 0


@triton.jit
def scores_of_tile(
    q_tile, k_tile, b, h, m0, n0, start_q, M, N, positions, lengths, mask, score, blocks,
    IS_MASKED: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Q K^T and the scores of one tile, both (BLOCK_M, BLOCK_N); scores are -inf where hidden."""
    rows = m0 + tl.arange(0, cfg.BLOCK_M)[:, None]
    keys = n0 + tl.arange(0, cfg.BLOCK_N)[None, :]
    # (BLOCK_M, BLOCK_D) @ (BLOCK_D, BLOCK_N) -> (BLOCK_M, BLOCK_N)
    qk = product(q_tile, operand(k_tile, cfg), cfg)
    corners = Corners(m0, m0 + cfg.BLOCK_M - 1, n0, n0 + cfg.BLOCK_N - 1)
    s = scores_of(qk, rows, keys, M, corners, positions, b, h, score, cfg)
    if IS_MASKED:
        start, stop = visible_keys(rows, N, positions, mask, cfg)
        visible = (rows < M) & between(keys, start, stop, cfg)
        intervals = load_intervals(mask.data, b, h, start_q, rows, rows < M, N, cfg)
        visible = in_spans(keys, visible, intervals, cfg)
        if cfg.MASK_TILE_M > 0:
            visible = in_block_mask(rows, keys, visible, b, h, blocks, cfg)
        s = tl.where(visible, s, -float("inf"))
    return qk, s


@triton.jit
def step_of_rows(s, qk, largest, row_max, row_sum, weighted, score, cfg: tl.constexpr):
    """The running statistics of the rows with the scores of one more tile: the largest scaled
    product, maximum and sum of the online softmax, and sum of exp(s - max) log2 exp(s - max).
    """
    largest = tl.maximum(largest, tl.max(tl.where(s == -float("inf"), s, qk * score.data.scale), 1))
    factor = exponent_factor(score, cfg)
    new_max = tl.maximum(row_max, as_pivot(tl.max(s, 1), factor, cfg))
    pivot = tl.where(new_max == -float("inf"), 0.0, new_max)
    unit = LOG2E if cfg.HAS_LARGE_SCORES else 1.0
    drop = tl.maximum((row_max - pivot) * unit, NO_WEIGHT)
    rescale = tl.math.exp2(drop)
    if cfg.HAS_LARGE_SCORES:
        exponent = (s - pivot[:, None]) * LOG2E
    else:
        exponent = s * factor - pivot[:, None]
    p = tl.math.exp2(exponent)
    weighted = rescale * (weighted + row_sum * drop) + tl.sum(
        p * tl.maximum(exponent, NO_WEIGHT), 1
    )
    row_sum = rescale * row_sum + tl.sum(p, 1)
    return largest, new_max, row_sum, weighted


@triton.jit(do_not_specialize=unspecialised("q", "k"))
def row_statistics_kernel(
    q_ptr, q_batch, q_row, q_head, k_ptr, k_batch, k_row, k_head, largest_ptr, entropy_ptr,
    pivot_ptr, log_sum_ptr, sink_ptr, at, score_data, bias, mask_data, B, M, N, total_q, total_k,
    page_columns, left, right, chunk, heads, mask_rows, mask_columns, first_kept, cfg: tl.constexpr,
):  # fmt: skip
    """The largest scaled and capped score of each row, and its entropy.

    `pivot_ptr`, `log_sum_ptr`: also what makes exponentials probabilities; None if not needed.
    """
    q = HeadRows(q_ptr, q_batch, q_row, q_head)
    k = HeadRows(k_ptr, k_batch, k_row, k_head)
    lengths = Lengths(B, M, N, total_q, total_k, page_columns, at)
    mask = Mask(left, right, chunk, mask_data)
    score = Score(score_data, bias)
    blocks = Blocks(mask_data, mask_rows, mask_columns, heads)
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    HAS_FULL_TILES: tl.constexpr = cfg.SPANS == 0 and cfg.MASK_TILE_M == 0
    h = tl.program_id(1) % heads
    b = tl.program_id(1) // heads
    kv_head = h // cfg.GROUP
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    m0 = tl.program_id(0) * BLOCK_M
    if m0 >= M:
        return
    positions = RowPositions(N - M, at, b)
    # (BLOCK_M, BLOCK_D)
    q_base = rows_base(q, b, start_q, h)
    q_tile = load_rows(q, q_base, m0, M, True, cfg.D, BLOCK_M, cfg.BLOCK_D, cfg.ALIGNMENT)
    q_tile = operand(q_tile, cfg)
    if cfg.PAGE_SIZE > 0:
        k_source = k.ptr + kv_head.to(tl.int64) * k.head
    else:
        k_source = rows_base(k, key_row_of_batch(lengths, b), start_k, kv_head)
    pages = page_list(lengths, b)
    row_max, row_sum = first_sums(sink_ptr, h, 0, cfg)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    weighted = tl.zeros([BLOCK_M], tl.float32)

    last_row = tl.minimum(m0 + BLOCK_M, M) - 1
    first_start, first_stop = visible_keys(m0, N, positions, mask, cfg)
    last_start, last_stop = visible_keys(last_row, N, positions, mask, cfg)
    begin, full_begin, full_end, end = tile_phases(
        tl.maximum(first_start, 0), first_stop, last_start, tl.minimum(last_stop, N), BLOCK_N
    )
    # Rows from M on have scores, which nobody stores.
    full_count = full_end - full_begin if HAS_FULL_TILES else 0
    for i in range(0, full_count):
        n0 = (full_begin + i) * BLOCK_N
        # (BLOCK_N, BLOCK_D)
        k_tile = load_keys(
            k_source, k, pages, start_k, n0, N, lengths, cfg, False, cfg.D, BLOCK_N, cfg.BLOCK_D
        )
        qk, s = scores_of_tile(
            q_tile, k_tile, b, h, m0, n0, start_q, M, N, positions, lengths, mask, score, blocks,
            False, cfg,
        )  # fmt: skip
        largest, row_max, row_sum, weighted = step_of_rows(
            s, qk, largest, row_max, row_sum, weighted, score, cfg
        )
    for i in range(0, end - begin - full_count):
        if HAS_FULL_TILES:
            n0 = masked_tile(i, begin, full_begin, full_end) * BLOCK_N
        else:
            n0 = (begin + i) * BLOCK_N
        k_tile = load_keys(
            k_source, k, pages, start_k, n0, N, lengths, cfg, True, cfg.D, BLOCK_N, cfg.BLOCK_D
        )
        qk, s = scores_of_tile(
            q_tile, k_tile, b, h, m0, n0, start_q, M, N, positions, lengths, mask, score, blocks,
            True, cfg,
        )  # fmt: skip
        largest, row_max, row_sum, weighted = step_of_rows(
            s, qk, largest, row_max, row_sum, weighted, score, cfg
        )

    offs_m = m0 + tl.arange(0, BLOCK_M)
    offs = stats_start(lengths, b, h, heads) + start_q + offs_m
    seen = row_sum != 0.0  # NaN was seen
    total = tl.where(seen, row_sum, 1.0)
    log_sum = tl.math.log2(total)
    if cfg.HAS_SOFTCAP:
        cap = score.data.softcap
        largest = tl.where(largest == -float("inf"), largest, tanh(largest / cap) * cap)
    tl.store(largest_ptr + offs, largest, mask=offs_m < M)
    entropy = tl.where(seen, (log_sum - weighted / total) * LN2, 0.0)
    tl.store(entropy_ptr + offs, entropy, mask=offs_m < M)
    if pivot_ptr is not None:
        pivot = tl.where(seen, row_max, float("inf"))
        tl.store(pivot_ptr + offs, pivot, mask=offs_m < M)
        tl.store(log_sum_ptr + offs, log_sum, mask=offs_m < M)


@triton.jit
def add_column_sums(
    sums, q, q_base, k_tile, pivot_ptr, log_sum_ptr, stats, b, h, m0, n0, start_q, M, N, positions,
    lengths, mask, score, blocks, IS_MASKED: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """`sums` (BLOCK_N,) plus the probabilities of the queries of a tile."""
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    # (BLOCK_M, BLOCK_D)
    q_tile = load_rows(q, q_base, m0, M, IS_MASKED, cfg.D, BLOCK_M, cfg.BLOCK_D, cfg.ALIGNMENT)
    _, s = scores_of_tile(
        operand(q_tile, cfg), k_tile, b, h, m0, n0, start_q, M, N, positions, lengths, mask, score,
        blocks, IS_MASKED, cfg,
    )  # fmt: skip
    offs_m = m0 + tl.arange(0, BLOCK_M)
    pivot = tl.load(pivot_ptr + stats + offs_m, mask=offs_m < M, other=float("inf"))
    log_sum = None
    if log_sum_ptr is not None:
        log_sum = tl.load(log_sum_ptr + stats + offs_m, mask=offs_m < M, other=0.0)[:, None]
    else:
        pivot = pivot_of_lse(pivot, cfg.HAS_LARGE_SCORES)
    p = exponentials(s, pivot[:, None], exponent_factor(score, cfg), cfg, log_sum)
    return sums + tl.sum(p, 0)


@triton.jit(do_not_specialize=unspecialised("q", "k"))
def column_sum_kernel(
    q_ptr, q_batch, q_row, q_head, k_ptr, k_batch, k_row, k_head, sums_ptr, pivot_ptr, log_sum_ptr,
    at, score_data, bias, mask_data, B, M, N, total_q, total_k, page_columns, left, right, chunk,
    heads, mask_rows, mask_columns, first_kept, cfg: tl.constexpr,
):  # fmt: skip
    """The probabilities of each key, added up over the queries of one head.

    `log_sum_ptr`: as `row_statistics_kernel` stores it; None if `pivot_ptr` is the log-sum-exp.
    """
    q = HeadRows(q_ptr, q_batch, q_row, q_head)
    k = HeadRows(k_ptr, k_batch, k_row, k_head)
    lengths = Lengths(B, M, N, total_q, total_k, page_columns, at)
    mask = Mask(left, right, chunk, mask_data)
    score = Score(score_data, bias)
    blocks = Blocks(mask_data, mask_rows, mask_columns, heads)
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    HAS_FULL_TILES: tl.constexpr = cfg.SPANS == 0 and cfg.MASK_TILE_M == 0
    h = tl.program_id(1) % heads
    b = tl.program_id(1) // heads
    kv_head = h // cfg.GROUP
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    n0 = tl.program_id(0) * BLOCK_N
    if n0 >= N:
        return
    positions = RowPositions(N - M, at, b)
    if cfg.PAGE_SIZE > 0:
        k_source = k.ptr + kv_head.to(tl.int64) * k.head
    else:
        k_source = rows_base(k, key_row_of_batch(lengths, b), start_k, kv_head)
    pages = page_list(lengths, b)
    # (BLOCK_N, BLOCK_D)
    k_tile = load_keys(
        k_source, k, pages, start_k, n0, N, lengths, cfg, True, cfg.D, BLOCK_N, cfg.BLOCK_D
    )
    q_base = rows_base(q, b, start_q, h)
    stats = stats_start(lengths, b, h, heads) + start_q
    sums = tl.zeros([BLOCK_N], tl.float32)

    last_key = tl.minimum(n0 + BLOCK_N, N) - 1
    first_start, first_stop = seeing_rows(n0, M, positions, mask, cfg)
    last_start, last_stop = seeing_rows(last_key, M, positions, mask, cfg)
    begin, full_begin, full_end, end = tile_phases(
        tl.maximum(first_start, 0), tl.minimum(first_stop, M), last_start, tl.minimum(last_stop, M),
        BLOCK_M,
    )  # fmt: skip
    full_count = full_end - full_begin if HAS_FULL_TILES else 0
    for i in range(0, full_count):
        sums = add_column_sums(
            sums, q, q_base, k_tile, pivot_ptr, log_sum_ptr, stats, b, h,
            (full_begin + i) * BLOCK_M, n0, start_q, M, N, positions, lengths, mask, score, blocks,
            False, cfg,
        )  # fmt: skip
    for i in range(0, end - begin - full_count):
        if HAS_FULL_TILES:
            tile = masked_tile(i, begin, full_begin, full_end)
        else:
            tile = begin + i
        sums = add_column_sums(
            sums, q, q_base, k_tile, pivot_ptr, log_sum_ptr, stats, b, h, tile * BLOCK_M, n0,
            start_q, M, N, positions, lengths, mask, score, blocks, True, cfg,
        )  # fmt: skip

    offs_n = n0 + tl.arange(0, BLOCK_N)
    if at.cu_seqlens_k is not None and cfg.PAGE_SIZE == 0:
        row = h.to(tl.int64) * total_k
    else:
        row = (b * heads + h).to(tl.int64) * lengths.N
    tl.store(sums_ptr + row + start_k + offs_n, sums, mask=offs_n < N)
