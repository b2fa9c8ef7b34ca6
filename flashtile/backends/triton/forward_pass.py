"""The forward pass: FlashAttention-2 (Dao 2023), algorithm 1, one program per tile of queries.

Read `backends/cpu/tiles.py` first: the same algorithm in plain PyTorch. A program keeps its tile of
Q, loops over the tiles of K and V that some row of it sees (the KV loop), and keeps a running
maximum, a running sum and an unnormalised output.

With few queries and many keys, most of a GPU would be idle. Then several programs share a KV loop
(`IS_SPLIT`; flash-decoding): each writes a partial (out, lse) for its share of the keys, and
`ops/merge` merges them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.dropout import dropout_key
from ...gpu.intrinsics import (
    LN2,
    LOG2E,
    let_next_kernel_start,
    rows_base,
    tanh,
    wait_for_earlier_kernels,
)
from ...gpu.kernel import kernel
from ...gpu.rows import HeadRows
from ...gpu.score_source import Corners
from .arguments import UNSPECIALISED, Dropout, Lengths, Mask, Score, Sequence
from .cache import (
    append_tokens,
    first_key_block,
    head_scale,
    key_block_scale,
    load_keys,
    load_packed_rows,
    load_queries,
    page_list,
    query_scales,
    rotated_queries,
)
from .masks import (
    full_tile_of,
    in_spans,
    key_ranges,
    listed_steps,
    load_intervals,
    masked_tile_of,
    step_counts,
    within_tiles,
)
from .products import add_product_in_halves, operand, product
from .tiles import (
    as_float16,
    as_pivot,
    between,
    exponent_factor,
    exponentials,
    in_block_mask,
    kept,
    key_row_of_batch,
    key_span,
    load_columns,
    log_sum_exp,
    query_span,
    rescaling,
    scores_of,
    split_columns,
    stats_count,
    stats_start,
    tile_of_queries,
    tile_source,
    unpack_pairs,
    visible_keys,
    without_hidden,
)

NO_WEIGHT = tl.constexpr(-1000.0)  # an exponent whose power of 2 is 0; times 0 it is 0


@triton.jit
def attend_keys(
    acc, sums, q_tile, q_tail, n0, k, k_source, v, v_source, pages, rows, start, stop, intervals,
    sequence, h, h_mask, qk_scale, scale_block, mask, score, dropout, IS_MASKED: tl.constexpr,
    cfg: tl.constexpr,
):  # fmt: skip
    """One step of the KV loop: update the output and `sums`, which `first_sums` describes, with the
    keys [n0, n0 + BLOCK_N) (online softmax)."""
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    PAIR: tl.constexpr = cfg.PAIR
    row_max, row_sum = sums[0], sums[1]
    keys = n0 + tl.arange(0, BLOCK_N)[None, :]
    if cfg.UNPACK_KEYS is not None:
        # PAIR tiles (BLOCK_N, BLOCK_D / PAIR), and perhaps factors (BLOCK_N, 1)
        k_tiles = load_packed_rows(
            k_source, k, pages, n0, sequence, cfg, IS_MASKED, cfg.D // PAIR, cfg.BLOCK_D // PAIR,
            cfg.UNPACK_KEYS,
        )  # fmt: skip
        # (BLOCK_M, BLOCK_N)
        if PAIR == 1:
            qk = product(q_tile, operand(k_tiles[0], cfg), cfg)
        else:
            qk = tl.dot(q_tile[0], tl.trans(k_tiles[0]))
            for n in tl.static_range(1, PAIR):
                qk = tl.dot(q_tile[n], tl.trans(k_tiles[n]), qk)
        if len(k_tiles) > PAIR:
            qk *= tl.trans(k_tiles[PAIR])
    else:
        # (BLOCK_N, BLOCK_D / PAIR)
        k_tile = load_keys(
            k_source, k, pages, n0, sequence, cfg, IS_MASKED, cfg.D // PAIR, cfg.BLOCK_D // PAIR
        )
        # (BLOCK_M, BLOCK_N)
        if PAIR == 2:
            even_tile, odd_tile = unpack_pairs(tl.trans(k_tile))
            qk = tl.dot(q_tile[0], even_tile)
            qk = tl.dot(q_tile[1], odd_tile, qk)
        else:
            if cfg.HAS_FLOAT8_KEYS:
                k_tile = k_tile.to(tl.float16)
            qk = product(q_tile, operand(k_tile, cfg), cfg)
    if cfg.TAIL_D > 0:
        # (BLOCK_N, BLOCK_TAIL)
        if cfg.UNPACK_TAIL is not None:
            (k_tail,) = load_packed_rows(
                k_source, k, pages, n0, sequence, cfg, IS_MASKED, cfg.TAIL_D, cfg.BLOCK_TAIL,
                cfg.UNPACK_TAIL,
            )  # fmt: skip
        else:
            k_tail = load_keys(
                k_source + cfg.D, k, pages, n0, sequence, cfg, IS_MASKED, cfg.TAIL_D, cfg.BLOCK_TAIL
            )
        qk += product(q_tail, operand(k_tail, cfg), cfg)
    if cfg.HAS_FLOAT8_KEYS:
        qk *= qk_scale
        k_scale = key_block_scale(score.data.k_block_descale, scale_block, n0, BLOCK_N)
        if k_scale is not None:
            qk *= k_scale
    corners = Corners(tl.min(rows), tl.max(rows), n0, n0 + BLOCK_N - 1)
    # (BLOCK_M, BLOCK_N)
    s = scores_of(qk, rows, keys, sequence.lengths.M, corners, sequence, h, score, cfg)
    if IS_MASKED:
        visible = in_spans(keys, between(keys, start, stop, cfg), intervals, cfg)
        if cfg.MASK_TILE_M > 0:
            visible = in_block_mask(rows, keys, visible, sequence, h_mask, mask, cfg)
        s = tl.where(visible, s, -float("inf"))
    factor = exponent_factor(score, cfg)
    new_max = tl.maximum(row_max, as_pivot(tl.max(s, 1), factor, cfg))
    pivot = new_max
    if IS_MASKED or not cfg.IS_LINEAR:  # nothing visible yet: -inf - -inf would be NaN
        pivot = tl.where(new_max == -float("inf"), 0.0, new_max)
    # (BLOCK_M, BLOCK_N), and (BLOCK_M,)
    p = exponentials(s, pivot[:, None], factor, cfg)
    rescale = rescaling(row_max, pivot, cfg)
    new_sums = new_max, row_sum * rescale + tl.sum(p, 1)
    if cfg.HAS_STATISTICS:
        new_sums = new_sums + statistics_of(sums, s, qk, p, pivot, rescale, score, IS_MASKED, cfg)
    if cfg.HAS_DROPOUT:  # after the row sum: dropout does not change the normalisation
        p = tl.where(kept(dropout, rows, n0, sequence, h, cfg), p, 0.0)
    IS_HIDING: tl.constexpr = cfg.HAS_HIDDEN_KEYS and (IS_MASKED or score.bias.ptr is not None)
    if cfg.UNPACK_VALUES is not None:
        acc = add_packed_values(
            acc, rescale, p, v, v_source, pages, n0, sequence, IS_MASKED, IS_HIDING, cfg
        )
    else:
        # (BLOCK_N, BLOCK_DV / PAIR)
        if cfg.HAS_VALUES_IN_KEYS:
            v_tile = k_tile
        else:
            v_tile = load_keys(
                v_source, v, pages, n0, sequence, cfg, IS_MASKED, cfg.DV // PAIR,
                cfg.BLOCK_DV // PAIR,
            )  # fmt: skip
        if cfg.HAS_FLOAT8_KEYS and PAIR == 1:
            v_tile = v_tile.to(tl.float16)
        if IS_HIDING:
            v_tile = without_hidden(v_tile, p)
        v_scale = key_block_scale(score.data.v_block_descale, scale_block, n0, BLOCK_N)
        if PAIR == 2:
            even_tile, odd_tile = unpack_pairs(v_tile)
            even = weighted_sum(acc[0], rescale, p, even_tile, v_scale, cfg)
            odd = weighted_sum(acc[1], rescale, p, odd_tile, v_scale, cfg)
            acc = even, odd
        else:
            acc = weighted_sum(acc, rescale, p, v_tile, v_scale, cfg)
    return acc, new_sums


@triton.jit
def add_packed_values(
    acc, rescale, p, v, v_source, pages, n0, sequence, IS_MASKED: tl.constexpr,
    IS_HIDING: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """The output so far, rescaled, plus P V of packed values; without keys whose `p` are all 0, if
    IS_HIDING."""
    PAIR: tl.constexpr = cfg.PAIR
    # PAIR tiles (BLOCK_N, BLOCK_DV / PAIR), and perhaps factors (BLOCK_N, 1)
    v_tiles = load_packed_rows(
        v_source, v, pages, n0, sequence, cfg, IS_MASKED, cfg.DV // PAIR, cfg.BLOCK_DV // PAIR,
        cfg.UNPACK_VALUES,
    )  # fmt: skip
    weights = p
    if len(v_tiles) > PAIR:
        factors = v_tiles[PAIR]
        weights = p * tl.trans(without_hidden(factors, p) if IS_HIDING else factors)
    found = ()
    for n in tl.static_range(PAIR):
        tile = without_hidden(v_tiles[n], p) if IS_HIDING else v_tiles[n]
        part = weighted_sum(acc if PAIR == 1 else acc[n], rescale, weights, tile, None, cfg)
        more = (part,)
        found = found + more  # type: ignore[assignment]  # more tiles
    return found[0] if PAIR == 1 else found  # type: ignore[misc]


@triton.jit
def statistics_of(
    sums, s, qk, p, pivot, rescale, score, IS_MASKED: tl.constexpr, cfg: tl.constexpr
):
    """The last two of `sums` with the scores `s` of one more tile, relative to its `pivot`."""
    row_max, row_sum, largest, weighted = sums[0], sums[1], sums[2], sums[3]
    if cfg.IS_LINEAR:
        tile_max = tl.max(s, 1) * score.data.scale
    else:  # before softcap, which is monotonic, score function and biases
        tile_max = tl.max(tl.where(s == -float("inf"), s, qk * score.data.scale), 1)
    drop = row_max - pivot
    # (BLOCK_M, BLOCK_N)
    if cfg.HAS_LARGE_SCORES:
        drop *= LOG2E
        exponent = (s - pivot[:, None]) * LOG2E
    else:
        exponent = s * exponent_factor(score, cfg) - pivot[:, None]
    if IS_MASKED or not cfg.IS_LINEAR:  # 0 times -inf would be NaN
        exponent = tl.maximum(exponent, NO_WEIGHT)
    weighted = rescale * (weighted + row_sum * tl.maximum(drop, NO_WEIGHT))
    return tl.maximum(largest, tile_max), weighted + tl.sum(p * exponent, 1)


@triton.jit
def attend_tiles(
    acc, sums, steps, full_start, full_count, masked_start, masked_count, q_tile, q_tail, k,
    k_source, v, v_source, pages, rows, start, stop, intervals, sequence, h, h_mask, qk_scale,
    scale_block, mask, score, dropout, cfg: tl.constexpr,
):  # fmt: skip
    """The steps [full_start, full_count) over the full tiles and [masked_start, masked_count) over
    the masked tiles. `steps`: see `masks.steps_of_queries`.
    """
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    # The loop counts keys, not tiles, which keeps wgmma asynchronous. LLVM would convert a count of
    # tiles on the path around the loop, too, where ptxas allows nothing but wgmma (C7515).
    for offset in range(full_start * BLOCK_N, full_count * BLOCK_N, BLOCK_N):
        n0 = full_tile_of(offset // BLOCK_N, steps, cfg) * BLOCK_N
        acc, sums = attend_keys(
            acc, sums, q_tile, q_tail, n0, k, k_source, v, v_source, pages, rows, start, stop,
            intervals, sequence, h, h_mask, qk_scale, scale_block, mask, score, dropout, False, cfg,
        )  # fmt: skip
    for i in range(masked_start, masked_count):
        n0 = masked_tile_of(i, steps, cfg) * BLOCK_N
        acc, sums = attend_keys(
            acc, sums, q_tile, q_tail, n0, k, k_source, v, v_source, pages, rows, start, stop,
            intervals, sequence, h, h_mask, qk_scale, scale_block, mask, score, dropout, True, cfg,
        )  # fmt: skip
    return acc, sums


@triton.jit
def weighted_sum(acc, rescale, p, v_tile, v_scale, cfg: tl.constexpr):
    """The output so far, rescaled, plus P V; `v_scale` is the scale of the values, or None."""
    # (BLOCK_M, BLOCK_N) @ (BLOCK_N, BLOCK_DV / PAIR) -> (BLOCK_M, BLOCK_DV / PAIR)
    acc = acc * rescale[:, None]
    if v_scale is None:
        p = p.to(v_tile.dtype)
        acc = add_product_in_halves(acc, operand(p, cfg), operand(v_tile, cfg), cfg)
    else:
        acc += tl.dot(p.to(v_tile.dtype), v_tile) * v_scale
    return acc


@triton.jit
def first_sums(sink_ptr, h, part, cfg: tl.constexpr):
    """What a program sums up for every row, before the KV loop of a part; each (BLOCK_M,).

    They are the running maximum and sum of the online softmax, and with HAS_STATISTICS also the
    largest product, scaled, and the sum of exp(s - maximum) log2 exp(s - maximum).
    """
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    if sink_ptr is not None:  # a key of logit `sink` whose value is zero
        sink = as_pivot(tl.load(sink_ptr + h).to(tl.float32), LOG2E, cfg)
        row_max = sink + tl.zeros([BLOCK_M, 1], tl.float32)
        row_max = tl.reshape(row_max, [BLOCK_M])
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
        if cfg.IS_SPLIT or cfg.PART_KEYS > 0:  # only the first part has the sink
            row_max = tl.where(part == 0, row_max, -float("inf"))  # elsewhere its weight is 0
    else:
        row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    sums = row_max, row_sum
    if cfg.HAS_STATISTICS:
        largest, weighted = tl.full([BLOCK_M], -float("inf"), tl.float32), tl.zeros_like(row_sum)
        sums = row_max, row_sum, largest, weighted  # type: ignore[assignment]  # more fields
    return sums


@triton.jit
def split_range(full_count, masked_count):
    """The steps of this program, [start, stop) of the full tiles and of the masked tiles: its share
    of the KV loop, which is split evenly among the programs of the grid's second axis.
    """
    steps = full_count + masked_count
    part = tl.cdiv(steps, tl.num_programs(1))
    start = tl.minimum(tl.program_id(1) * part, steps)
    stop = tl.minimum(start + part, steps)
    full_start = tl.minimum(start, full_count)
    full_stop = tl.minimum(stop, full_count)
    return full_start, full_stop, start - full_start, stop - full_stop


@triton.jit
def merged(whole, part, cfg: tl.constexpr):
    """(output, maximum, sum) of the parts so far and of the next part, none of them normalised. A
    part without a key changes no bit; nor does it what it is merged with first.
    """
    acc, row_max, row_sum = whole
    part_acc, part_max, part_sum = part
    new_max = tl.maximum(row_max, part_max)
    pivot = tl.where(new_max == -float("inf"), 0.0, new_max)  # -inf - -inf would be NaN
    old, new = rescaling(row_max, pivot, cfg), rescaling(part_max, pivot, cfg)
    # Fused by hand: every kernel has to round alike.
    row_sum = tl.fma(row_sum, old, part_sum * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), part_acc * new[:, None])
    return acc, new_max, row_sum


@triton.jit
def store_lse(lse_ptr, row_max, row_sum, seen, rows, count, sequence, h, cfg: tl.constexpr):
    """Store the log-sum-exp of those of `rows` below `count`, -inf where nothing was `seen`."""
    lse = tl.where(seen, log_sum_exp(row_max, row_sum, cfg), -float("inf"))
    offs = stats_start(sequence, h) + rows
    if cfg.IS_SPLIT:
        count_of_part = stats_count(sequence.lengths)
        offs += tl.program_id(1) * count_of_part
        if cfg.HAS_LARGE_SCORES or cfg.IS_INVARIANT:
            # The sum for itself: a large maximum would swallow it.
            sum_offs = offs + tl.num_programs(1) * count_of_part
            if not cfg.IS_INVARIANT:
                row_sum = tl.math.log2(row_sum) * LN2
            tl.store(lse_ptr + sum_offs, row_sum, mask=rows < count)
            lse = tl.where(seen, row_max, -float("inf"))
    tl.store(lse_ptr + offs, lse, mask=rows < count)


@triton.jit
def store_statistics(
    lse_ptr, sums, row_sum, seen, rows, count, sequence, h, score, cfg: tl.constexpr
):
    """Store behind the log-sum-exps the largest score of each row, scaled and capped, its entropy
    and, with HAS_LARGE_SCORES, log2 of the factor that rounding the log-sum-exp has lost."""
    # (BLOCK_M, 1)
    largest = tl.where(seen, sums[2][:, None], -float("inf"))
    if cfg.HAS_SOFTCAP:
        cap = score.data.softcap
        largest = tl.where(largest == -float("inf"), largest, tanh(largest / cap) * cap)
    log_sum = tl.math.log2(row_sum)
    entropy = tl.where(seen, (log_sum - sums[3][:, None] / row_sum) * LN2, 0.0)
    step = stats_count(sequence.lengths)
    offs = stats_start(sequence, h) + rows + step
    tl.store(lse_ptr + offs, largest, mask=rows < count)
    tl.store(lse_ptr + offs + step, entropy, mask=rows < count)
    if cfg.HAS_LARGE_SCORES:
        row_max = sums[0][:, None]
        lost = (row_max - log_sum_exp(row_max, row_sum, cfg)) * LOG2E + log_sum
        tl.store(lse_ptr + offs + 2 * step, tl.where(seen, lost, 0.0), mask=rows < count)


@kernel(*UNSPECIALISED, "added", "table_rows")
def forward_kernel(
    q: HeadRows, k: HeadRows, v: HeadRows, out: HeadRows, lse_ptr, sink_ptr, score: Score, lists,
    rng_ptr, new, lengths: Lengths, mask: Mask, first_kept, added, table_rows, cfg: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one tile of queries; see `arguments.py` for what each argument
    holds.

    IS_SPLIT: only for the program's part of the keys; `out` (float32) and `lse_ptr` then have one
    slice per part. HAS_STATISTICS: `lse_ptr` has slices for what `store_statistics` stores.
    """
    if cfg.IS_CHAINED:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    BLOCK_D: tl.constexpr = cfg.BLOCK_D
    BLOCK_DV: tl.constexpr = cfg.BLOCK_DV
    PAIR: tl.constexpr = cfg.PAIR
    OUT_ALIGNMENT: tl.constexpr = cfg.OUT_ALIGNMENT
    # Rows of a tile: queries of one head or, packed, of all the heads that share a key head.
    ROWS_PER_QUERY: tl.constexpr = cfg.GROUP if cfg.IS_PACKED_GROUP else 1
    tile, m_tiles, b, program_head = tile_of_queries(lengths, cfg, ROWS_PER_QUERY)
    start_q, M = query_span(lengths, b)
    start_k, N = key_span(lengths, b, added if cfg.APPENDING is not None else 0)
    written = M if lengths.at.cu_seqlens_q is not None else lengths.M
    sequence = Sequence(b, start_q, M, start_k, N, lengths)

    # (BLOCK_M, 1)
    flat = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    rows = flat // ROWS_PER_QUERY
    first = tile * BLOCK_M // ROWS_PER_QUERY
    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // ROWS_PER_QUERY, M - 1)
    if first >= written:
        return
    if cfg.IS_PACKED_GROUP:
        kv_head = program_head
        h = kv_head * cfg.GROUP + flat % cfg.GROUP
        h_mask = kv_head
    else:
        h = program_head
        kv_head = h // cfg.GROUP
        h_mask = h

    # (BLOCK_M, BLOCK_D)
    q_base = q.ptr + b.to(tl.int64) * q.batch + start_q.to(tl.int64) * q.row
    q_rows = q_base + rows.to(tl.int64) * q.row + h.to(tl.int64) * q.head
    if cfg.APPENDING is not None:
        q_parts = load_queries(q_rows, rows, M, b, new, table_rows, cfg)
    else:
        q_tile = operand(load_columns(q_rows, rows < M, 0, cfg.D, BLOCK_D, cfg.ALIGNMENT), cfg)
    q_tail = None
    if cfg.TAIL_D > 0:
        # (BLOCK_M, BLOCK_TAIL)
        q_tail = load_columns(q_rows, rows < M, cfg.D, cfg.TAIL_D, cfg.BLOCK_TAIL, cfg.ALIGNMENT)
        q_tail = operand(q_tail, cfg)

    if cfg.PART_KEYS > 0:  # each part has sums of its own; these are of the parts so far
        sums = first_sums(None, h, 0, cfg)
    else:
        sums = first_sums(sink_ptr, h, tl.program_id(1) if cfg.IS_SPLIT else 0, cfg)
    # (BLOCK_M, BLOCK_DV / PAIR)
    acc = tl.zeros([BLOCK_M, BLOCK_DV // PAIR], tl.float32)
    if PAIR == 2:  # even columns, odd columns
        acc = acc, acc
    if PAIR == 4:  # every fourth column
        acc = acc, acc, acc, acc

    key_row = key_row_of_batch(lengths, b)
    if cfg.PAGE_SIZE > 0:
        k_source = k.ptr + kv_head.to(tl.int64) * k.head
        v_source = v.ptr + kv_head.to(tl.int64) * v.head
    else:
        k_base = rows_base(k, key_row, start_k, kv_head)
        v_base = rows_base(v, key_row, start_k, kv_head)
        k_source = tile_source(k, k_base, N, cfg, cfg.D // PAIR, BLOCK_N, BLOCK_D // PAIR)
        v_source = tile_source(v, v_base, N, cfg, cfg.DV // PAIR, BLOCK_N, BLOCK_DV // PAIR)
    pages = page_list(lengths, b)
    dropout = Dropout(dropout_key(rng_ptr) if cfg.HAS_DROPOUT else 0, first_kept)
    start, stop = visible_keys(rows, sequence, mask, cfg)
    if cfg.HAS_HIDDEN_KEYS:  # padding sees nothing, so that no key counts as seen
        stop = tl.where(rows < M, stop, start)
    intervals = load_intervals(mask.data, sequence, h, rows, rows < M, cfg)

    if cfg.MASK_TILE_M > 0:
        full_count, masked_count, steps = listed_steps(lists, sequence, h_mask, tile, m_tiles, cfg)
    else:
        first_start, first_stop = visible_keys(first, sequence, mask, cfg)
        last_start, last_stop = visible_keys(last, sequence, mask, cfg)
        last_stop = tl.where(first < M, last_stop, 0)
        steps = key_ranges(
            first_start, first_stop, last_start, last_stop, intervals, rows < M, N, cfg
        )
        full_count, masked_count = step_counts(steps, cfg)
        if cfg.PART_KEYS > 0:
            first_part = steps[0][0] * BLOCK_N // cfg.PART_KEYS
            last_part = tl.cdiv(steps[0][3] * BLOCK_N, cfg.PART_KEYS)
            if sink_ptr is not None:  # the first part has the sink, whatever keys it has
                first_part, last_part = first_part * 0, tl.maximum(last_part, 1)
            if cfg.IS_SPLIT:
                first_part = tl.program_id(1)
                last_part = first_part + 1
        if cfg.APPENDING is not None:
            begin, full_begin, full_end, end = steps[0]
            append_tokens(
                k, v, new, added, table_rows, sequence, kv_head, pages, begin, full_begin, full_end,
                end, score, cfg,
            )  # fmt: skip
            q_tile = operand(rotated_queries(q_parts, q, cfg), cfg)
    qk_scale, scale_block = 1.0, 0
    if cfg.HAS_FLOAT8_KEYS:
        q_tile, q_factor = as_float16(q_tile)
        qk_scale = q_factor * query_scales(score, sequence, h, kv_head, rows, cfg)
        scale_block = first_key_block(sequence, kv_head, cfg)
    if PAIR > 1:
        q_tile = split_columns(q_tile, PAIR)
    v_scale = head_scale(score.data.v_descale, sequence, kv_head, cfg)
    if cfg.PART_KEYS > 0:
        whole = acc, sums[0], sums[1]
        part_tiles = cfg.PART_KEYS // BLOCK_N
        for part in range(first_part, last_part):
            first = part * part_tiles
            own = (within_tiles(steps[0], first, first + part_tiles),)
            full_count, masked_count = step_counts(own, cfg)
            sums = first_sums(sink_ptr, h, part, cfg)
            acc, sums = attend_tiles(
                tl.zeros_like(acc), sums, own, 0, full_count, 0, masked_count, q_tile, q_tail, k,
                k_source, v, v_source, pages, rows, start, stop, intervals, sequence, h, h_mask,
                qk_scale, scale_block, mask, score, dropout, cfg,
            )  # fmt: skip
            whole = merged(whole, (acc, sums[0], sums[1]), cfg)
        acc, row_max, row_sum = whole
        sums = row_max, row_sum
    else:
        full_start, masked_start = 0, 0
        if cfg.IS_SPLIT:
            bounds = split_range(full_count, masked_count)
            full_start, full_count, masked_start, masked_count = bounds
        acc, sums = attend_tiles(
            acc, sums, steps, full_start, full_count, masked_start, masked_count, q_tile, q_tail, k,
            k_source, v, v_source, pages, rows, start, stop, intervals, sequence, h, h_mask,
            qk_scale, scale_block, mask, score, dropout, cfg,
        )  # fmt: skip

    # (BLOCK_M, 1). Rows past the used length are padding: 0 and -inf, even with a sink.
    row_max = sums[0][:, None]
    row_sum = sums[1][:, None]
    seen = (row_sum != 0.0) & (rows < M)  # NaN was seen
    safe_sum = tl.where(seen, row_sum, 1.0)
    store_lse(lse_ptr, row_max, safe_sum, seen, rows, written, sequence, h, cfg)
    if cfg.HAS_STATISTICS:
        store_statistics(lse_ptr, sums, safe_sum, seen, rows, written, sequence, h, score, cfg)
    # (BLOCK_M, BLOCK_DV)
    if PAIR == 2:
        acc = tl.interleave(acc[0], acc[1])
    elif PAIR == 4:
        acc = tl.interleave(tl.interleave(acc[0], acc[2]), tl.interleave(acc[1], acc[3]))
    if cfg.IS_SPLIT and cfg.IS_INVARIANT:
        acc = tl.where(seen, acc, 0.0)
    else:
        acc = tl.where(seen, acc * (score.data.drop_scale * v_scale / safe_sum), 0.0)
    out_base = out.ptr + b.to(tl.int64) * out.batch + start_q.to(tl.int64) * out.row
    if cfg.IS_SPLIT:
        out_base += tl.program_id(1) * stats_count(lengths) * cfg.DV
    out_offs = rows.to(tl.int64) * out.row + h.to(tl.int64) * out.head
    dims_v = tl.arange(0, BLOCK_DV)[None, :]
    inside = (rows < written) & (dims_v < cfg.DV)
    pointers = tl.multiple_of(out_base + out_offs + dims_v, [1, OUT_ALIGNMENT])
    tl.store(pointers, acc.to(out.ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits", "rows", "heads"])
def merge_in_order_kernel(
    out_parts, lse_parts, out, lse, scale, splits, rows, heads, BLOCK_DV: tl.constexpr,
    cfg: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row of one head, as a program that has all of them does.

    Args:
        lse_parts: the maximum of each part, and `splits` parts later its sum.
        scale: what `forward_kernel` has as `drop_scale`: not a constant, so that it divides alike.
    """
    if cfg.IS_CHAINED:
        wait_for_earlier_kernels()
    program = tl.program_id(0)
    h = program % heads
    row = program // heads % rows
    b = program // heads // rows
    stats = rows_base(lse_parts, b, row, h) + tl.arange(0, 1)
    dims = tl.arange(0, BLOCK_DV)[None, :]
    pointers = rows_base(out_parts, b, row, h) + dims
    # (1, BLOCK_DV), (1,), (1,)
    zero = tl.zeros([1], tl.float32)
    whole = tl.zeros([1, BLOCK_DV], tl.float32), tl.full([1], -float("inf"), tl.float32), zero
    for part in range(0, splits):
        index = tl.cast(part, tl.int64)
        part_max = tl.load(stats + index * lse_parts.part)
        part_sum = tl.load(stats + (splits + index) * lse_parts.part)
        part_acc = tl.load(pointers + index * out_parts.part, mask=dims < cfg.DV, other=0.0)
        # What no program has written is no number.
        is_seen = part_max != -float("inf")
        part_acc = tl.where(is_seen[:, None], part_acc, 0.0)
        whole = merged(whole, (part_acc, part_max, tl.where(is_seen, part_sum, 0.0)), cfg)
    acc, row_max, row_sum = whole
    seen = row_sum != 0.0
    safe_sum = tl.where(seen, row_sum, 1.0)
    value = tl.where(seen, log_sum_exp(row_max, safe_sum, cfg), -float("inf"))
    tl.store(rows_base(lse, b, row, h) + tl.arange(0, 1), value)
    acc = tl.where(seen[:, None], acc * (scale / safe_sum[:, None]), 0.0)
    out_ptr = rows_base(out, b, row, h) + dims
    tl.store(out_ptr, acc.to(out.ptr.dtype.element_ty), mask=dims < cfg.DV)
