"""Which tiles of a block mask to visit: a compact list for every tile of queries (or of keys, for
dK and dV).

The tiles of a kernel need not have the size of the block mask's tiles. The block mask and the mask
rules together make a tile empty, full or partial: empty tiles are in no list, and full tiles are
not masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arguments import NUMBERS, Blocks, Lengths, Mask, RowPositions
from .spans import span_kind
from .tiles import block_mask_start, key_span, query_span, visible_keys


@triton.jit
def block_mask_kind(m0, m1, n0, n1, kind_offs, blocks, cfg: tl.constexpr):
    """(any visible, all visible) in the tiles [m0, m1) x [n0, n1), by the block mask only."""
    ROWS: tl.constexpr = cfg.MASK_COVER_M
    COLUMNS: tl.constexpr = cfg.MASK_COVER_N
    any_seen = (m0 + n0) < 0
    all_seen = (m0 + n0) >= 0
    for i in range(ROWS):
        row = m0 // cfg.MASK_TILE_M + i
        for j in range(COLUMNS):
            column = n0 // cfg.MASK_TILE_N + j
            covered = (row * cfg.MASK_TILE_M < m1) & (column * cfg.MASK_TILE_N < n1)
            inside = covered & (row < blocks.rows) & (column < blocks.columns)
            kind = tl.load(
                blocks.data.kinds + kind_offs + row * blocks.columns + column, mask=inside, other=0
            )
            any_seen = any_seen | (kind != 0)
            all_seen = all_seen & ((kind == 1) | (covered == 0))
    return any_seen, all_seen


@triton.jit(do_not_specialize=NUMBERS)
def list_tiles_kernel(
    lists, at, mask_data, B, M, N, total_q, total_k, page_columns, left, right, chunk,
    heads, mask_rows, mask_columns, first_kept, cfg: tl.constexpr, IS_BY_KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Write one row of `lists`: the tiles that one tile of queries (IS_BY_KEYS: of keys) visits, in
    ascending order.
    """
    lengths = Lengths(B, M, N, total_q, total_k, page_columns, at)
    mask = Mask(left, right, chunk, mask_data)
    blocks = Blocks(mask_data, mask_rows, mask_columns, heads)
    list_heads = 1 + lists.has_heads * (heads - 1)
    if IS_BY_KEYS:
        capacity = tl.cdiv(M, cfg.BLOCK_M)
    else:
        capacity = tl.cdiv(N, cfg.BLOCK_N)
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    own_tile = tl.program_id(1)
    h = tl.program_id(0) % list_heads
    b = tl.program_id(0) // list_heads
    start_q, M = query_span(lengths, b)
    _, N = key_span(lengths, b)
    positions = RowPositions(N - M, at, b)
    kind_offs = block_mask_start(blocks, b, h)
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + own_tile
    full_count = own_tile * 0
    masked_count = own_tile * 0
    for chunk in range(0, capacity, CHUNK):
        # (CHUNK,)
        other_tile = chunk + tl.arange(0, CHUNK)
        if IS_BY_KEYS:
            m0 = other_tile * BLOCK_M
            n0 = other_tile * 0 + own_tile * BLOCK_N
        else:
            m0 = other_tile * 0 + own_tile * BLOCK_M
            n0 = other_tile * BLOCK_N
        m1 = tl.minimum(m0 + BLOCK_M, M)
        n1 = tl.minimum(n0 + BLOCK_N, N)
        exists = (m0 < M) & (n0 < N)
        first_start, first_stop = visible_keys(m0, N, positions, mask, cfg)
        last_start, last_stop = visible_keys(m1 - 1, N, positions, mask, cfg)
        if cfg.MASK_TILE_M > 0:
            any_seen, all_seen = block_mask_kind(m0, m1, n0, n1, kind_offs, blocks, cfg)
        else:
            any_seen, all_seen = exists, exists
        if cfg.SPANS > 0:
            any_in_spans, all_in_spans = span_kind(m0, m1, n0, n1, mask_data, b, h, start_q, N, cfg)
            any_seen, all_seen = any_seen & any_in_spans, all_seen & all_in_spans
        visited = exists & any_seen & (n1 > first_start) & (n0 < last_stop)
        whole = (m0 + BLOCK_M <= M) & (n0 + BLOCK_N <= N)
        full = visited & all_seen & whole & (last_start <= n0) & (n1 <= first_stop)
        masked = visited & (full == 0)
        full_index = full_count + tl.cumsum(full.to(tl.int32), 0) - 1
        masked_index = capacity - masked_count - tl.cumsum(masked.to(tl.int32), 0)
        tiles = lists.tiles + row * capacity
        tl.store(tiles + full_index, other_tile, mask=full)
        tl.store(tiles + masked_index, other_tile, mask=masked)
        full_count += tl.sum(full.to(tl.int32), 0)
        masked_count += tl.sum(masked.to(tl.int32), 0)
    tl.store(lists.counts + 2 * row, full_count)
    tl.store(lists.counts + 2 * row + 1, masked_count)
