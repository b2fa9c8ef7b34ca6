"""Short sequences: one program has all queries and keys of a head.

With at most `plan.SHORT` queries and keys, a head has one tile of scores. A forward needs no online
softmax. A backward is one launch: a program recomputes P and dP of a key head's query heads, one
after the other, and writes dQ, dK and dV once. It needs no output and no kernel that runs first,
because

    delta = rowsum(dO * O) = rowsum(P * dP), with the P that dropout keeps

is a sum over its own tile. Each sum has one fixed order, so results are bitwise reproducible.

What limits these kernels is latency, so their tiles are small enough for several programs to share
a multiprocessor (`plan.short_tile`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.dropout import dropout_key
from ...gpu.intrinsics import reciprocal, rows_base
from ...gpu.kernel import kernel
from ...gpu.rows import HeadRows
from ...gpu.score_source import Corners
from .arguments import UNSPECIALISED, Dropout, Lengths, Mask, RowStats, Score, Sequence
from .backward_pass import drop, recompute_p
from .forward_pass import first_sums, store_lse
from .tiles import (
    as_pivot,
    between,
    exponent_factor,
    exponentials,
    kept,
    key_span,
    load_columns,
    load_key_tile,
    load_query_tile,
    load_rows,
    pivot_of_lse,
    product_gradient,
    query_span,
    rescaling,
    scores_of,
    stats_count,
    stats_start,
    store_key_tile,
    store_rows,
    visible_keys,
    without_hidden,
)


@kernel(*UNSPECIALISED)
def short_forward_kernel(
    q: HeadRows, k: HeadRows, v: HeadRows, out: HeadRows, lse_ptr, sink_ptr, score: Score, rng_ptr,
    lengths: Lengths, mask: Mask, first_kept, cfg: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of all queries of one head."""
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    BLOCK_DV: tl.constexpr = cfg.BLOCK_DV
    h = tl.program_id(0) % lengths.heads
    b = tl.program_id(0) // lengths.heads
    kv_head = h // cfg.GROUP
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    sequence = Sequence(b, start_q, M, start_k, N, lengths)
    written = M if lengths.at.cu_seqlens_q is not None else lengths.M
    first = b * 0
    rows = tl.arange(0, BLOCK_M)[:, None]
    keys = tl.arange(0, BLOCK_N)[None, :]
    corners = Corners(first, first + BLOCK_M - 1, first, first + BLOCK_N - 1)
    # (BLOCK_M, BLOCK_D)
    q_tile = load_query_tile(q, sequence, h, first, cfg.D, cfg.BLOCK_D, cfg.ALIGNMENT, cfg)
    start, stop = visible_keys(rows, sequence, mask, cfg)
    if cfg.HAS_HIDDEN_KEYS:  # padding sees nothing, so that no key counts as seen
        stop = tl.where(rows < M, stop, start)
    dropout = Dropout(dropout_key(rng_ptr) if cfg.HAS_DROPOUT else 0, first_kept)
    # (BLOCK_N, BLOCK_D), (BLOCK_N, BLOCK_DV)
    k_tile = load_key_tile(k, sequence, kv_head, first, cfg.D, cfg.BLOCK_D, cfg.ALIGNMENT, cfg)
    v_tile = load_key_tile(v, sequence, kv_head, first, cfg.DV, cfg.BLOCK_DV, cfg.ALIGNMENT, cfg)
    # (BLOCK_M, BLOCK_N)
    qk = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    s = scores_of(qk, rows, keys, lengths.M, corners, sequence, h, score, cfg)
    s = tl.where(between(keys, start, stop, cfg), s, -float("inf"))
    factor = exponent_factor(score, cfg)
    sink_max, sink_sum = first_sums(sink_ptr, h, 0, cfg)
    row_max = tl.maximum(sink_max, as_pivot(tl.max(s, 1), factor, cfg))
    pivot = tl.where(row_max == -float("inf"), 0.0, row_max)  # -inf - -inf would be NaN
    # (BLOCK_M, BLOCK_N), and (BLOCK_M,)
    p = exponentials(s, pivot[:, None], factor, cfg)
    row_sum = sink_sum * rescaling(sink_max, pivot, cfg) + tl.sum(p, 1)
    if cfg.HAS_DROPOUT:  # after the row sum: dropout does not change the normalisation
        p = tl.where(kept(dropout, rows, first, sequence, h, cfg), p, 0.0)
    if cfg.HAS_HIDDEN_KEYS:
        v_tile = without_hidden(v_tile, p)
    # (BLOCK_M, BLOCK_N) @ (BLOCK_N, BLOCK_DV) -> (BLOCK_M, BLOCK_DV)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
    # (BLOCK_M, 1). Rows past the used length are padding: 0 and -inf, even with a sink.
    row_max = row_max[:, None]
    row_sum = row_sum[:, None]
    seen = (row_sum != 0.0) & (rows < M)  # NaN was seen
    safe_sum = tl.where(seen, row_sum, 1.0)
    store_lse(lse_ptr, row_max, safe_sum, seen, rows, written, sequence, h, cfg)
    acc = tl.where(seen, acc * (score.data.drop_scale / safe_sum), 0.0)
    store_rows(
        out, rows_base(out, b, start_q, h), first, written, acc, cfg.DV, BLOCK_M, BLOCK_DV,
        cfg.OUT_ALIGNMENT,
    )  # fmt: skip


@triton.jit
def normalised(p, pivot, sink_ptr, h, score, cfg: tl.constexpr):
    """P of a whole row, divided by its sum, and log2 of that sum, (BLOCK_M,): what a large
    log-sum-exp has lost, see `row_sums_kernel`.
    """
    # (BLOCK_M, 1)
    row_sum = tl.sum(p, 1)[:, None]
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + h).to(tl.float32)
        row_sum += exponentials(sink, pivot, exponent_factor(score, cfg), cfg)
    row_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
    return p * reciprocal(row_sum), tl.sum(tl.math.log2(row_sum), 1)


@kernel(*UNSPECIALISED)
def short_backward_kernel(
    q: HeadRows, k: HeadRows, v: HeadRows, dout: HeadRows, dq: HeadRows, dk: HeadRows, dv: HeadRows,
    ds_ptr, lse_ptr, dlse_ptr, pivot_ptr, delta_ptr, sink_ptr, score: Score, rng_ptr,
    lengths: Lengths, mask: Mask, first_kept, cfg: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of one key head and the query heads of its group.

    Args:
        ds_ptr: dS (B, Hq, M, N), whose sums are the gradient of a bias; or None.
        pivot_ptr, delta_ptr: as `backward_pass.delta_kernel` and `row_sums_kernel` write them, for
            the kernels of other gradients; or None.
    """
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    BLOCK_D: tl.constexpr = cfg.BLOCK_D
    BLOCK_DV: tl.constexpr = cfg.BLOCK_DV
    kv_heads = lengths.heads // cfg.GROUP
    kv_head = tl.program_id(0) % kv_heads
    b = tl.program_id(0) // kv_heads
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    sequence = Sequence(b, start_q, M, start_k, N, lengths)
    first = b * 0
    # Queries of a sequence without keys, and keys of one without queries, may hold anything.
    queries = tl.where(N > 0, M, 0)
    loaded_keys = tl.where(M > 0, N, 0)
    offs_m = tl.arange(0, BLOCK_M)
    rows = offs_m[:, None]
    keys = tl.arange(0, BLOCK_N)[None, :]
    corners = Corners(first, first + BLOCK_M - 1, first, first + BLOCK_N - 1)
    start, stop = visible_keys(rows, sequence, mask, cfg)
    visible = (rows < M) & between(keys, start, stop, cfg)
    dropout = Dropout(dropout_key(rng_ptr) if cfg.HAS_DROPOUT else 0, first_kept)
    # (BLOCK_N, BLOCK_D), (BLOCK_N, BLOCK_DV)
    k_tile = load_rows(
        k, rows_base(k, b, start_k, kv_head), first, loaded_keys, True, cfg.D, BLOCK_N, BLOCK_D,
        cfg.ALIGNMENT,
    )  # fmt: skip
    v_tile = load_rows(
        v, rows_base(v, b, start_k, kv_head), first, loaded_keys, True, cfg.DV, BLOCK_N, BLOCK_DV,
        cfg.ALIGNMENT,
    )  # fmt: skip
    # (BLOCK_N, BLOCK_D), (BLOCK_N, BLOCK_DV)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for g in range(cfg.GROUP):
        h = kv_head * cfg.GROUP + g
        # (BLOCK_M, BLOCK_D)
        q_tile = load_rows(
            q, rows_base(q, b, start_q, h), first, queries, True, cfg.D, BLOCK_M, BLOCK_D,
            cfg.ALIGNMENT,
        )  # fmt: skip
        stats = stats_start(sequence, h) + offs_m
        # (BLOCK_M,)
        lse = tl.load(lse_ptr + stats, mask=offs_m < M, other=-float("inf"))
        pivot = pivot_of_lse(lse, cfg.HAS_LARGE_SCORES)
        zero = tl.zeros([BLOCK_M, 1], tl.float32)
        # (BLOCK_M, BLOCK_N)
        qk = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        p = recompute_p(
            qk, RowStats(pivot[:, None], zero, zero), rows, keys, visible, corners, sequence, h,
            score, M, True, cfg,
        )  # fmt: skip
        if cfg.HAS_LARGE_SCORES:
            p, log_sum = normalised(p, pivot[:, None], sink_ptr, h, score, cfg)
        has_lse = (offs_m < M) & (lse != -float("inf"))
        sees = has_lse & (offs_m < queries)
        if cfg.HAS_DEAD_ROWS and sink_ptr is not None:  # a sink alone makes a log-sum-exp
            sees = sees & (tl.max(p, 1) != 0.0)
        # (BLOCK_M, BLOCK_DV). The gradient of a query that sees no key may be anything.
        do_rows = rows_base(dout, b, start_q, h) + rows.to(tl.int64) * dout.row
        do_tile = load_columns(do_rows, sees[:, None], 0, cfg.DV, BLOCK_DV, cfg.OUT_ALIGNMENT)
        seen_k, seen_v = k_tile, v_tile
        if cfg.HAS_HIDDEN_KEYS:
            seen_k, seen_v = without_hidden(k_tile, p), without_hidden(v_tile, p)
        keep = visible
        if cfg.HAS_DROPOUT:
            keep = kept(dropout, rows, first, sequence, h, cfg)
        p_kept = drop(p, keep, score.data.drop_scale, cfg).to(do_tile.dtype)
        # (BLOCK_N, BLOCK_M) @ (BLOCK_M, BLOCK_DV) -> (BLOCK_N, BLOCK_DV)
        dv_acc = tl.dot(tl.trans(p_kept), do_tile, dv_acc, input_precision="ieee")
        # (BLOCK_M, BLOCK_N)
        dp = tl.dot(do_tile, tl.trans(seen_v), input_precision="ieee")
        dp = drop(dp, keep, score.data.drop_scale, cfg)
        # (BLOCK_M,)
        delta = tl.sum(p * dp, 1)
        if dlse_ptr is not None:
            delta -= tl.load(dlse_ptr + stats, mask=has_lse, other=0.0)
        ds = p * (dp - delta[:, None])
        if ds_ptr is not None:
            scores = ds_ptr + (b * lengths.heads + h).to(tl.int64) * lengths.M * lengths.N
            inside = (rows < lengths.M) & (keys < lengths.N)
            ds_rows = scores + rows * lengths.N + keys
            tl.store(ds_rows, ds.to(ds_ptr.dtype.element_ty), mask=inside)
        if delta_ptr is not None:
            tl.store(pivot_ptr + stats, pivot, mask=offs_m < M)
            tl.store(delta_ptr + stats, delta, mask=offs_m < M)
            if cfg.HAS_LARGE_SCORES:
                log_sums = stats + stats_count(lengths)
                tl.store(pivot_ptr + log_sums, log_sum, mask=offs_m < M)
        ds = product_gradient(ds, qk, p, rows, keys, corners, sequence, h, score, True, cfg)
        if cfg.HAS_HIDDEN_KEYS:
            ds = tl.where(p != 0.0, ds, 0.0)
        ds = ds.to(q_tile.dtype)
        # (BLOCK_N, BLOCK_M) @ (BLOCK_M, BLOCK_D) -> (BLOCK_N, BLOCK_D)
        dk_acc = tl.dot(tl.trans(ds), q_tile, dk_acc, input_precision="ieee")
        # (BLOCK_M, BLOCK_D)
        dq_tile = tl.dot(ds, seen_k, input_precision="ieee") * score.data.scale
        store_rows(
            dq, rows_base(dq, b, start_q, h), first, M, dq_tile, cfg.D, BLOCK_M, BLOCK_D,
            cfg.OUT_ALIGNMENT,
        )  # fmt: skip
    store_key_tile(dk, sequence, kv_head, first, dk_acc * score.data.scale, cfg.D, cfg.BLOCK_D, cfg)
    store_key_tile(dv, sequence, kv_head, first, dv_acc, cfg.DV, cfg.BLOCK_DV, cfg)
