"""The probabilities of each key, added up over the queries that see it.

A program owns a tile of keys of one query head, and loops over the queries. It computes the scores
again from the log-sum-exps of the forward, and does not read the values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.intrinsics import rows_base
from ...gpu.kernel import kernel
from ...gpu.rows import HeadRows
from ...gpu.score_source import Corners
from .arguments import UNSPECIALISED, Lengths, Mask, Score, Sequence
from .cache import load_keys, page_list
from .masks import in_spans, load_intervals
from .products import operand, product
from .tiles import (
    between,
    exponent_factor,
    exponentials,
    in_block_mask,
    key_row_of_batch,
    key_span,
    load_tile,
    masked_tile,
    pivot_of_lse,
    query_span,
    scores_of,
    seeing_rows,
    stats_start,
    tile_phases,
    tile_source,
    visible_keys,
)


@triton.jit
def load_lse(lse_ptr, stats, tile, M, BLOCK_M: tl.constexpr):
    """The log-sum-exps of a tile of queries, (BLOCK_M,)."""
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    return tl.load(lse_ptr + stats + offs_m, mask=offs_m < M, other=-float("inf"))


@triton.jit
def add_column_sums(
    sums, q, q_source, k_tile, lse, lost_ptr, stats, m0, n0, sequence, h, mask, score,
    IS_MASKED: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """`sums` (BLOCK_M, BLOCK_N) plus the probabilities of a tile of queries; `lse` (BLOCK_M,)."""
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    M = sequence.M
    # (BLOCK_M, BLOCK_D)
    q_tile = load_tile(
        q_source, q, m0, M, cfg, IS_MASKED, cfg.D, BLOCK_M, cfg.BLOCK_D, cfg.ALIGNMENT
    )
    offs_m = m0 + tl.arange(0, BLOCK_M)
    rows = offs_m[:, None]
    keys = n0 + tl.arange(0, cfg.BLOCK_N)[None, :]
    # (BLOCK_M, BLOCK_D) @ (BLOCK_D, BLOCK_N) -> (BLOCK_M, BLOCK_N)
    qk = product(operand(q_tile, cfg), operand(k_tile, cfg), cfg)
    corners = Corners(m0, m0 + BLOCK_M - 1, n0, n0 + cfg.BLOCK_N - 1)
    s = scores_of(qk, rows, keys, M, corners, sequence, h, score, cfg)
    if IS_MASKED:
        start, stop = visible_keys(rows, sequence, mask, cfg)
        visible = (rows < M) & between(keys, start, stop, cfg)
        intervals = load_intervals(mask.data, sequence, h, rows, rows < M, cfg)
        visible = in_spans(keys, visible, intervals, cfg)
        if cfg.MASK_TILE_M > 0:
            visible = in_block_mask(rows, keys, visible, sequence, h, mask, cfg)
        s = tl.where(visible, s, -float("inf"))
    # (BLOCK_M,)
    pivot = pivot_of_lse(lse, cfg.HAS_LARGE_SCORES)
    lost = None
    if lost_ptr is not None:
        lost = tl.load(lost_ptr + stats + offs_m, mask=offs_m < M, other=0.0)[:, None]
    p = exponentials(s, pivot[:, None], exponent_factor(score, cfg), cfg, lost)
    return sums + p


@kernel(*UNSPECIALISED)
def column_sum_kernel(
    q: HeadRows, k: HeadRows, sums_ptr, lse_ptr, lost_ptr, score: Score, lengths: Lengths,
    mask: Mask, cfg: tl.constexpr,
):  # fmt: skip
    """The probabilities of each key, added up over the queries of one head.

    `lost_ptr`: what `forward_pass.store_statistics` stores; None without HAS_LARGE_SCORES.
    """
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    HAS_FULL_TILES: tl.constexpr = cfg.SPANS == 0 and cfg.MASK_TILE_M == 0
    h = tl.program_id(1) % lengths.heads
    b = tl.program_id(1) // lengths.heads
    kv_head = h // cfg.GROUP
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    n0 = tl.program_id(0) * BLOCK_N
    if n0 >= N:
        return
    sequence = Sequence(b, start_q, M, start_k, N, lengths)
    if cfg.PAGE_SIZE > 0:
        k_source = k.ptr + kv_head.to(tl.int64) * k.head
    else:
        k_base = rows_base(k, key_row_of_batch(lengths, b), start_k, kv_head)
        k_source = tile_source(k, k_base, N, cfg, cfg.D, BLOCK_N, cfg.BLOCK_D)
    pages = page_list(lengths, b)
    # (BLOCK_N, BLOCK_D)
    k_tile = load_keys(k_source, k, pages, n0, sequence, cfg, True, cfg.D, cfg.BLOCK_D)
    q_base = rows_base(q, b, start_q, h)
    q_source = tile_source(q, q_base, M, cfg, cfg.D, BLOCK_M, cfg.BLOCK_D)
    stats = stats_start(sequence, h)
    # (BLOCK_M, BLOCK_N): each thread adds up its own, and reads no other thread's in the loop
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    last_key = tl.minimum(n0 + BLOCK_N, N) - 1
    first_start, first_stop = seeing_rows(n0, sequence, mask, cfg)
    last_start, last_stop = seeing_rows(last_key, sequence, mask, cfg)
    begin, full_begin, full_end, end = tile_phases(
        tl.maximum(first_start, 0), tl.minimum(first_stop, M), last_start, tl.minimum(last_stop, M),
        BLOCK_M,
    )  # fmt: skip
    full_count = full_end - full_begin if HAS_FULL_TILES else 0
    # Log-sum-exps are loaded a step ahead: a product would wait for those that it is followed by.
    lse = load_lse(lse_ptr, stats, full_begin, M, BLOCK_M)
    for i in range(0, full_count):
        tile = full_begin + i
        next_lse = load_lse(lse_ptr, stats, tile + 1, M, BLOCK_M)
        sums = add_column_sums(
            sums, q, q_source, k_tile, lse, lost_ptr, stats, tile * BLOCK_M, n0, sequence, h, mask,
            score, False, cfg,
        )  # fmt: skip
        lse = next_lse
    for i in range(0, end - begin - full_count):
        if HAS_FULL_TILES:
            tile = masked_tile(i, begin, full_begin, full_end)
        else:
            tile = begin + i
        lse = load_lse(lse_ptr, stats, tile, M, BLOCK_M)
        sums = add_column_sums(
            sums, q, q_source, k_tile, lse, lost_ptr, stats, tile * BLOCK_M, n0, sequence, h, mask,
            score, True, cfg,
        )  # fmt: skip

    offs_n = n0 + tl.arange(0, BLOCK_N)
    if lengths.at.cu_seqlens_k is not None and cfg.PAGE_SIZE == 0:
        row = h.to(tl.int64) * lengths.total_k
    else:
        row = (b * lengths.heads + h).to(tl.int64) * lengths.N
    tl.store(sums_ptr + row + start_k + offs_n, tl.sum(sums, 0), mask=offs_n < N)
