"""Attention over a list of keys for each query: `Operands.key_index`.

A list stands for runs of `RUN` adjacent keys: blocks (NSA) or single keys (DSA). Tiles have the
query heads of one query as rows, because they share its list, and gather the keys.

A tile of keys would need the queries that list them for dK and dV, and adjacent single keys share
few. So the kernel of dQ adds the part of its query to dK and dV, with atomics and in float32
(`plan.adds_to_listed_keys`). Long runs, and sums in a fixed order, have a program for each tile of
keys: `queries_of_runs` sorts all entries by run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...gpu.intrinsics import LOG2E, rows_base
from ...gpu.kernel import kernel
from ...gpu.rows import HeadRows
from ...problem import AttentionProblem, Operands
from .arguments import UNSPECIALISED, Lengths, Mask, RowStats, Score, Sequence
from .backward_pass import recompute_p
from .forward_pass import store_lse, weighted_sum
from .products import add_product, operand, product
from .tiles import (
    as_pivot,
    between,
    exponent_factor,
    exponentials,
    key_span,
    load_columns,
    load_rows,
    product_gradient,
    query_span,
    rescaling,
    scores_of,
    stats_start,
    store_rows,
    visible_keys,
    without_hidden,
)


class QueriesOfRuns(NamedTuple):
    """The entries of all lists, sorted by the run that they list."""

    rows: Tensor  # int32 (entries,): the query, counted over the rows of all sequences
    runs: Tensor  # int32 (entries,): (sequence, list head, run) as one number
    starts: Tensor  # int32 (runs of all sequences and list heads + 1,): the first entry of each


def queries_of_runs(problem: AttentionProblem, operands: Operands) -> QueriesOfRuns:
    """Sort the entries of a call's lists on their device."""
    index, cu_seqlens = operands.key_index, operands.cu_seqlens_q
    assert index is not None
    heads, top = index.shape[2:]
    runs = -(-problem.N // problem.options.key_run)
    if cu_seqlens is None:
        sequence = torch.arange(problem.B, device=index.device)[:, None, None]
    else:
        rows = torch.arange(index.shape[1], device=index.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)[None, :, None]
    first = (sequence * heads + torch.arange(heads, device=index.device)) * runs
    count = problem.B * heads * runs
    is_run = (index >= 0) & (index < runs) & (sequence < problem.B)[..., None]
    numbers = torch.where(is_run, first[..., None] + index, count).flatten().int()
    numbers, order = numbers.sort(stable=True)
    every = torch.arange(count + 1, device=index.device, dtype=torch.int32)
    starts = torch.searchsorted(numbers, every, out_int32=True)
    return QueriesOfRuns((order // (heads * top)).int(), numbers, starts)


@triton.jit
def place_of(program, lengths, cfg: tl.constexpr):
    """(sequence, query, key head, rows of the tile) of a program. Rows are heads of the group."""
    PARTS: tl.constexpr = (cfg.GROUP + cfg.BLOCK_M - 1) // cfg.BLOCK_M
    kv_heads = lengths.heads // cfg.GROUP
    kv_head = program // PARTS % kv_heads
    row = program // (PARTS * kv_heads)
    # (BLOCK_M,)
    member = program % PARTS * cfg.BLOCK_M + tl.arange(0, cfg.BLOCK_M)
    return row // lengths.M, row % lengths.M, kv_head, member


@triton.jit
def listed_keys(entries, n0, top, N, RUN: tl.constexpr, cfg: tl.constexpr):
    """The keys (BLOCK_N,) of a list from its key `n0` on; N where an entry lists none."""
    place = n0 + tl.arange(0, cfg.BLOCK_N)
    entry = tl.load(entries + place // RUN, mask=place < top * RUN, other=-1)
    is_run = (entry >= 0) & (entry < tl.cdiv(N, RUN))
    return tl.where(is_run, entry * RUN + place % RUN, N)


@triton.jit
def gather(x, base, keys, visible, cfg: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """The rows `keys` of keys or values, (BLOCK_N, BLOCK_DIM); zero where not `visible`."""
    pointers = base + keys.to(tl.int64)[:, None] * x.row
    return load_columns(pointers, visible[:, None], 0, DIM, BLOCK_DIM, cfg.ALIGNMENT)


@triton.jit
def add_rows(
    x, base, keys, visible, tile, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Add `tile` (BLOCK_DIM, BLOCK_N) to the rows `keys` where they are `visible`, in any order."""
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    # (BLOCK_N, BLOCK_DIM)
    pointers = base + keys.to(tl.int64)[:, None] * x.row + dims
    pointers = tl.multiple_of(pointers, [1, ALIGNMENT])
    inside = visible[:, None] & (dims < DIM)
    tl.atomic_add(pointers, tl.trans(tile), mask=inside, sem="relaxed")


@triton.jit
def store_heads(
    x, rows, tile, inside, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ALIGNMENT: tl.constexpr
):
    """Write `tile` (BLOCK_M, BLOCK_DIM) to the pointers `rows` (BLOCK_M, 1) where `inside`."""
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    pointers = tl.multiple_of(rows + dims, [1, ALIGNMENT])
    tl.store(pointers, tile.to(x.ptr.dtype.element_ty), mask=inside & (dims < DIM))


@kernel(*UNSPECIALISED, "top")
def listed_forward_kernel(
    q: HeadRows, k: HeadRows, v: HeadRows, out: HeadRows, lse_ptr, sink_ptr, index: HeadRows, top,
    score: Score, lengths: Lengths, mask: Mask, RUN: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one query and the heads of one key head."""
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    BLOCK_D: tl.constexpr = cfg.BLOCK_D
    BLOCK_DV: tl.constexpr = cfg.BLOCK_DV
    b, m, kv_head, member = place_of(tl.program_id(0), lengths, cfg)
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    written = M if lengths.at.cu_seqlens_q is not None else lengths.M
    if m >= written:
        return
    sequence = Sequence(b, start_q, M, start_k, N, lengths)
    # (BLOCK_M, 1)
    is_head = (member < cfg.GROUP)[:, None]
    h = (kv_head * cfg.GROUP + member)[:, None]
    # (BLOCK_M, BLOCK_D)
    q_rows = rows_base(q, b, start_q + m, h)
    q_tile = load_columns(q_rows, is_head & (m < M), 0, cfg.D, BLOCK_D, cfg.ALIGNMENT)
    q_operand = operand(q_tile, cfg)
    start, stop = visible_keys(m, sequence, mask, cfg)
    stop = tl.where(m < M, stop, start)  # padding sees nothing
    entries = rows_base(index, b, start_q + m, kv_head)
    k_base, v_base = rows_base(k, b, start_k, kv_head), rows_base(v, b, start_k, kv_head)
    # (BLOCK_M,), and (BLOCK_M, BLOCK_DV)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sink_ptr is not None:  # a key of logit `sink` whose value is zero
        own = kv_head * cfg.GROUP + member
        sink = tl.load(sink_ptr + own, mask=member < cfg.GROUP, other=0.0).to(tl.float32)
        row_max = as_pivot(sink, LOG2E, cfg)
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    factor = exponent_factor(score, cfg)
    for n0 in range(0, top * RUN, BLOCK_N):
        # (BLOCK_N,)
        keys = listed_keys(entries, n0, top, N, RUN, cfg)
        visible = between(keys, start, stop, cfg)
        # (BLOCK_N, BLOCK_D), (BLOCK_N, BLOCK_DV)
        k_tile = gather(k, k_base, keys, visible, cfg, cfg.D, BLOCK_D)
        v_tile = gather(v, v_base, keys, visible, cfg, cfg.DV, BLOCK_DV)
        # (BLOCK_M, BLOCK_D) @ (BLOCK_D, BLOCK_N) -> (BLOCK_M, BLOCK_N)
        qk = product(q_operand, operand(k_tile, cfg), cfg)
        s = scores_of(qk, m, keys[None, :], M, None, sequence, h, score, cfg)
        s = tl.where(visible[None, :], s, -float("inf"))
        new_max = tl.maximum(row_max, as_pivot(tl.max(s, 1), factor, cfg))
        pivot = tl.where(new_max == -float("inf"), 0.0, new_max)  # -inf - -inf would be NaN
        p = exponentials(s, pivot[:, None], factor, cfg)
        rescale = rescaling(row_max, pivot, cfg)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = weighted_sum(acc, rescale, p, v_tile, None, cfg)
        row_max = new_max
    # (BLOCK_M, 1)
    row_max, row_sum = row_max[:, None], row_sum[:, None]
    seen = (row_sum != 0.0) & (m < M)
    safe_sum = tl.where(seen, row_sum, 1.0)
    rows = tl.where(is_head, m, written)
    store_lse(lse_ptr, row_max, safe_sum, seen, rows, written, sequence, h, cfg)
    acc = tl.where(seen, acc / safe_sum, 0.0)
    out_rows = rows_base(out, b, start_q + m, h)
    store_heads(out, out_rows, acc, is_head, cfg.DV, BLOCK_DV, cfg.OUT_ALIGNMENT)


@kernel(*UNSPECIALISED, "top")
def listed_query_gradient_kernel(
    q: HeadRows, k: HeadRows, v: HeadRows, dout: HeadRows, dq: HeadRows, dk: HeadRows, dv: HeadRows,
    pivot_ptr, delta_ptr, index: HeadRows, top, score: Score, lengths: Lengths, mask: Mask,
    RUN: tl.constexpr, HAS_KEY_GRADIENTS: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """dQ of one query and the heads of one key head.

    HAS_KEY_GRADIENTS: also add the query's part of dK and dV to what they hold, float32.
    """
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    BLOCK_D: tl.constexpr = cfg.BLOCK_D
    BLOCK_DV: tl.constexpr = cfg.BLOCK_DV
    b, m, kv_head, member = place_of(tl.program_id(0), lengths, cfg)
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    if m >= M:
        return
    sequence = Sequence(b, start_q, M, start_k, N, lengths)
    # (BLOCK_M, 1)
    is_head = (member < cfg.GROUP)[:, None]
    h = (kv_head * cfg.GROUP + member)[:, None]
    # (BLOCK_M, BLOCK_D), (BLOCK_M, BLOCK_DV)
    q_rows = rows_base(q, b, start_q + m, h)
    q_tile = load_columns(q_rows, is_head, 0, cfg.D, BLOCK_D, cfg.ALIGNMENT)
    do_rows = rows_base(dout, b, start_q + m, h)
    do_tile = load_columns(do_rows, is_head, 0, cfg.DV, BLOCK_DV, cfg.OUT_ALIGNMENT)
    q_operand, do_operand = operand(q_tile, cfg), operand(do_tile, cfg)
    stats = stats_of(pivot_ptr, delta_ptr, m, is_head, sequence, h)
    start, stop = visible_keys(m, sequence, mask, cfg)
    entries = rows_base(index, b, start_q + m, kv_head)
    k_base, v_base = rows_base(k, b, start_k, kv_head), rows_base(v, b, start_k, kv_head)
    dk_base, dv_base = rows_base(dk, b, start_k, kv_head), rows_base(dv, b, start_k, kv_head)
    # (BLOCK_M, BLOCK_D)
    dq_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n0 in range(0, top * RUN, BLOCK_N):
        # (BLOCK_N,)
        keys = listed_keys(entries, n0, top, N, RUN, cfg)
        visible = between(keys, start, stop, cfg)
        # (BLOCK_N, BLOCK_D), (BLOCK_N, BLOCK_DV)
        k_tile = gather(k, k_base, keys, visible, cfg, cfg.D, BLOCK_D)
        v_tile = gather(v, v_base, keys, visible, cfg, cfg.DV, BLOCK_DV)
        k_operand = operand(k_tile, cfg)
        # (BLOCK_M, BLOCK_D) @ (BLOCK_D, BLOCK_N) -> (BLOCK_M, BLOCK_N)
        qk = product(q_operand, k_operand, cfg)
        # (BLOCK_M, BLOCK_DV) @ (BLOCK_DV, BLOCK_N) -> (BLOCK_M, BLOCK_N)
        dp = product(do_operand, operand(v_tile, cfg), cfg, 0.5 * stats.delta)
        p, ds = score_gradient(
            qk, dp, stats, m, keys[None, :], visible[None, :], sequence, h, score, cfg
        )
        ds_operand = operand(ds.to(k_tile.dtype), cfg)
        # (BLOCK_M, BLOCK_N) @ (BLOCK_N, BLOCK_D) -> (BLOCK_M, BLOCK_D)
        dq_acc = add_product(dq_acc, ds_operand, k_operand, cfg)
        if HAS_KEY_GRADIENTS:  # transposed: head dims fill the rows of a product, heads may not
            # (BLOCK_DV, BLOCK_M) @ (BLOCK_M, BLOCK_N) -> (BLOCK_DV, BLOCK_N)
            dv_tile = tl.zeros([BLOCK_DV, BLOCK_N], tl.float32)
            p_operand = operand(p.to(v_tile.dtype), cfg)
            dv_tile = add_product(dv_tile, operand(tl.trans(do_tile), cfg), p_operand, cfg)
            add_rows(dv, dv_base, keys, visible, dv_tile, cfg.DV, BLOCK_DV, cfg.OUT_ALIGNMENT)
            # (BLOCK_D, BLOCK_M) @ (BLOCK_M, BLOCK_N) -> (BLOCK_D, BLOCK_N)
            dk_tile = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
            dk_tile = add_product(dk_tile, operand(tl.trans(q_tile), cfg), ds_operand, cfg)
            dk_tile *= score.data.scale
            add_rows(dk, dk_base, keys, visible, dk_tile, cfg.D, BLOCK_D, cfg.OUT_ALIGNMENT)
    dq_rows = rows_base(dq, b, start_q + m, h)
    dq_acc = dq_acc * score.data.scale
    store_heads(dq, dq_rows, dq_acc, is_head, cfg.D, BLOCK_D, cfg.OUT_ALIGNMENT)


@kernel(*UNSPECIALISED, "list_heads")
def listed_key_gradient_kernel(
    q: HeadRows, k: HeadRows, v: HeadRows, dout: HeadRows, dk: HeadRows, dv: HeadRows, pivot_ptr,
    delta_ptr, rows_ptr, runs_ptr, starts_ptr, list_heads, score: Score, lengths: Lengths,
    mask: Mask, RUN: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys of one key head. Tiles of scores are transposed; their columns
    are pairs of an entry of `queries_of_runs` and a head of the group.
    """
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    BLOCK_D: tl.constexpr = cfg.BLOCK_D
    BLOCK_DV: tl.constexpr = cfg.BLOCK_DV
    kv_heads = lengths.heads // cfg.GROUP
    kv_head = tl.program_id(0) % kv_heads
    n0 = tl.program_id(0) // kv_heads % tl.cdiv(lengths.N, BLOCK_N) * BLOCK_N
    b = tl.program_id(0) // (kv_heads * tl.cdiv(lengths.N, BLOCK_N))
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b)
    if n0 >= N:
        return
    sequence = Sequence(b, start_q, M, start_k, N, lengths)
    # (BLOCK_N, BLOCK_D), (BLOCK_N, BLOCK_DV)
    k_base, v_base = rows_base(k, b, start_k, kv_head), rows_base(v, b, start_k, kv_head)
    k_tile = load_rows(k, k_base, n0, N, True, cfg.D, BLOCK_N, BLOCK_D, cfg.ALIGNMENT)
    v_tile = load_rows(v, v_base, n0, N, True, cfg.DV, BLOCK_N, BLOCK_DV, cfg.ALIGNMENT)
    k_operand, v_operand = operand(k_tile, cfg), operand(v_tile, cfg)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    # (BLOCK_N, 1)
    keys = n0 + tl.arange(0, BLOCK_N)[:, None]
    # The runs that the tile touches: of the sequence and head, and in all.
    first_row = start_q if lengths.at.cu_seqlens_q is not None else b * lengths.M
    first_run = (b * list_heads + kv_head % list_heads) * tl.cdiv(lengths.N, RUN)
    last = first_run + (tl.minimum(n0 + BLOCK_N, N) - 1) // RUN
    begin = tl.load(starts_ptr + first_run + n0 // RUN)
    end = tl.load(starts_ptr + last + 1)
    for column in range(0, (end - begin) * cfg.GROUP, BLOCK_M):
        # (BLOCK_M,)
        pair = column + tl.arange(0, BLOCK_M)
        entry = begin + pair // cfg.GROUP
        h = kv_head * cfg.GROUP + pair % cfg.GROUP
        m = tl.load(rows_ptr + entry, mask=entry < end, other=0) - first_row
        run = tl.load(runs_ptr + entry, mask=entry < end, other=0) - first_run
        inside = (entry < end) & (m >= 0) & (m < M)
        m = tl.where(inside, m, 0)
        # (BLOCK_M, BLOCK_D), (BLOCK_M, BLOCK_DV)
        q_rows = rows_base(q, b, (start_q + m)[:, None], h[:, None])
        q_tile = load_columns(q_rows, inside[:, None], 0, cfg.D, BLOCK_D, cfg.ALIGNMENT)
        do_rows = rows_base(dout, b, (start_q + m)[:, None], h[:, None])
        do_tile = load_columns(do_rows, inside[:, None], 0, cfg.DV, BLOCK_DV, cfg.OUT_ALIGNMENT)
        q_operand, do_operand = operand(q_tile, cfg), operand(do_tile, cfg)
        # (1, BLOCK_M)
        m, h, run, inside = m[None, :], h[None, :], run[None, :], inside[None, :]
        stats = stats_of(pivot_ptr, delta_ptr, m, inside, sequence, h)
        start, stop = visible_keys(m, sequence, mask, cfg)
        # (BLOCK_N, BLOCK_M)
        visible = between(keys, start, stop, cfg) & (keys // RUN == run) & inside
        # (BLOCK_N, BLOCK_D) @ (BLOCK_D, BLOCK_M) -> (BLOCK_N, BLOCK_M)
        qk = product(k_operand, q_operand, cfg)
        # (BLOCK_N, BLOCK_DV) @ (BLOCK_DV, BLOCK_M) -> (BLOCK_N, BLOCK_M)
        dp = product(v_operand, do_operand, cfg, 0.5 * stats.delta)
        p, ds = score_gradient(qk, dp, stats, m, keys, visible, sequence, h, score, cfg)
        if cfg.HAS_DEAD_ROWS:
            do_operand = operand(without_hidden(do_tile, p), cfg)
        # (BLOCK_N, BLOCK_M) @ (BLOCK_M, BLOCK_DV) -> (BLOCK_N, BLOCK_DV)
        dv_acc = add_product(dv_acc, operand(p.to(do_tile.dtype), cfg), do_operand, cfg)
        # (BLOCK_N, BLOCK_M) @ (BLOCK_M, BLOCK_D) -> (BLOCK_N, BLOCK_D)
        dk_acc = add_product(dk_acc, operand(ds.to(q_tile.dtype), cfg), q_operand, cfg)
    dk_base, dv_base = rows_base(dk, b, start_k, kv_head), rows_base(dv, b, start_k, kv_head)
    dk_acc = dk_acc * score.data.scale
    store_rows(dk, dk_base, n0, N, dk_acc, cfg.D, BLOCK_N, BLOCK_D, cfg.OUT_ALIGNMENT)
    store_rows(dv, dv_base, n0, N, dv_acc, cfg.DV, BLOCK_N, BLOCK_DV, cfg.OUT_ALIGNMENT)


@triton.jit
def stats_of(pivot_ptr, delta_ptr, m, inside, sequence, h):
    """The statistics of the query `m` for the heads `h`, in the shape of `inside`; P is zero
    elsewhere.
    """
    offs = stats_start(sequence, h) + m
    pivot = tl.load(pivot_ptr + offs, mask=inside, other=float("inf"))
    delta = tl.load(delta_ptr + offs, mask=inside, other=0.0)
    return RowStats(pivot, pivot, delta)


@triton.jit
def score_gradient(qk, dp, stats, m, keys, visible, sequence, h, score, cfg: tl.constexpr):
    """(P, the gradient of the scaled products) of a tile or of a transposed tile."""
    M = sequence.M
    p = recompute_p(qk, stats, m, keys, visible, None, sequence, h, score, M, True, cfg)
    ds = p * (dp - stats.delta)
    ds = product_gradient(ds, qk, p, m, keys, None, sequence, h, score, True, cfg)
    return p, tl.where(p != 0.0, ds, 0.0)
