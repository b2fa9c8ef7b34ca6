"""The gradients of numbers that scores add by distance: ALiBi's slopes and a relative bias.

Both need only the sums of dS over all scores of equal distance. A program owns the tiles of one
band, whose first key minus first row is the same. In all of them, an element has the same distance,
so the program adds up whole tiles of dS, and sums over the diagonals once, at the end. Tiles are
square. Neighbouring bands share distances and write to different buffers, so every sum has one
fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...gpu.dropout import dropout_key
from ...gpu.rows import HeadRows
from ...problem import Operands, Options
from .arguments import Blocks, Lengths, Mask, RowPositions, Score, unspecialised
from .bias_gradient import score_gradient_tile
from .tiles import key_span, query_span


@triton.jit
def band_offset(lengths, SIDE: tl.constexpr):
    """First key minus first row of the tiles of the program's band; under a causal mask, the
    longest bands that are not empty come first (LPT order).
    """
    return (tl.cdiv(lengths.N, SIDE) - 1 - tl.program_id(1)) * SIDE


@triton.jit
def rows_of_band(offset, M, N, positions, mask, cfg: tl.constexpr):
    """Rows [start, stop) of a band for M queries and N keys; none if no score is visible.

    A band has the scores whose key minus row is within (offset - SIDE, offset + SIDE).
    """
    SIDE: tl.constexpr = cfg.BLOCK_M
    start = tl.maximum(-offset, 0)
    stop = tl.minimum(M, N - offset)
    if cfg.RUNS == 0:
        if cfg.HAS_LEFT:
            stop = tl.where(offset + SIDE <= positions.shift - mask.left, start, stop)
        if cfg.HAS_RIGHT:
            stop = tl.where(offset - SIDE >= positions.shift + mask.right, start, stop)
        if cfg.HAS_CHUNK:
            is_near = (offset + SIDE > positions.shift - mask.chunk) & (
                offset - SIDE < positions.shift + mask.chunk
            )
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
    moved = tl.gather(x, (columns + rows) % SIDE, 1)
    is_wrapped = columns + rows >= SIDE
    return tl.sum(tl.where(is_wrapped, 0.0, moved), 0), tl.sum(tl.where(is_wrapped, moved, 0.0), 0)


@triton.jit(do_not_specialize=unspecialised("q", "k", "v", "dout"))
def distance_gradient_kernel(
    q_ptr, q_batch, q_row, q_head, k_ptr, k_batch, k_row, k_head, v_ptr, v_batch, v_row, v_head,
    dout_ptr, dout_batch, dout_row, dout_head, sums_ptr, pivot_ptr, delta_ptr, at, score_data,
    bias, mask_data, rng_ptr, B, M, N, total_q, total_k, page_columns, left, right, chunk, heads,
    mask_rows, mask_columns, first_kept, cfg: tl.constexpr,
):  # fmt: skip
    """Sums of dS over the diagonals of one band of tiles, for one sequence and query head.

    `sums_ptr`: (2, B, heads, M + N - 1), zeros; the last dimension is the distance plus N - 1.
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
    SIDE: tl.constexpr = cfg.BLOCK_M
    h = tl.program_id(0) % heads
    b = tl.program_id(0) // heads
    _, own_M = query_span(lengths, b)
    _, own_N = key_span(lengths, b)
    positions = RowPositions(own_N - own_M, at, b)
    offset = band_offset(lengths, SIDE)
    start, stop = rows_of_band(offset, own_M, own_N, positions, mask, cfg)
    acc = tl.zeros([SIDE, SIDE], tl.float32)
    for m0 in range(start, stop, SIDE):
        found = score_gradient_tile(
            q, k, v, dout, pivot_ptr, delta_ptr, lengths, mask, score, blocks, first_kept,
            drop_key, heads, b, h, m0, m0 + offset, cfg,
        )  # fmt: skip
        acc += found[0]
    above, wrapped = diagonal_sums(acc)
    width = lengths.M + lengths.N - 1
    row = (tl.program_id(1) % 2).to(tl.int64) * lengths.B + b
    sums = sums_ptr + (row * heads + h) * width
    slots = tl.arange(0, SIDE) + offset - (own_N - own_M) + lengths.N - 1
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
