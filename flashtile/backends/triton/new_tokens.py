"""A decoding step: rotate the queries and append the new tokens to the cache while attending to it.

One program has all queries of a key head, or, if the KV loop is split, one part of their keys. It
appends the new tokens whose tiles it visits, and then reads them like all other keys. So no program
reads what another one writes. The rules are those of `ops/append/formula.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.rows import HeadRows
from ...ops.rotary.kernel import as_stored


@triton.jit
def load_rotated(
    pointers, step, inside, position, new, table_rows, ALIGNMENT: tl.constexpr, cfg: tl.constexpr
):
    """Rows whose elements are `step` apart, rotated in float32 by the angles of `position`;
    unchanged outside of the table.

    `pointers` to the rows, `inside` and `position` are (rows, 1); the result is (rows, BLOCK_D).
    """
    APPENDING: tl.constexpr = cfg.APPENDING
    PAIRS: tl.constexpr = APPENDING.pairs
    dims = tl.arange(0, cfg.BLOCK_D)[None, :]
    elements = pointers + dims * step
    if ALIGNMENT > 1:
        elements = tl.multiple_of(elements, [1, ALIGNMENT])
    tile = tl.load(elements, mask=inside & (dims < cfg.D), other=0.0)
    if PAIRS > 0:
        if APPENDING.is_interleaved:
            pair = dims // 2
            is_first = dims % 2 == 0
            partner = tl.where(is_first, dims + 1, dims - 1)
        else:
            is_first = dims < PAIRS
            pair = tl.where(is_first, dims, dims - PAIRS)
            partner = tl.where(is_first, dims + PAIRS, dims - PAIRS)
        is_rotated = inside & (dims < 2 * PAIRS)
        known = is_rotated & (position >= 0) & (position < table_rows)
        offs = position.to(tl.int64) * PAIRS + pair
        c = tl.load(new.cos + offs, mask=known, other=1.0).to(tl.float32)
        s = tl.load(new.sin + offs, mask=known, other=0.0).to(tl.float32)
        other = tl.load(pointers + partner * step, mask=is_rotated, other=0.0).to(tl.float32)
        rotated = tile.to(tl.float32) * c + other * tl.where(is_first, -s, s)
        tile = tl.where(is_rotated, rotated, tile.to(tl.float32))
    return tile


@triton.jit
def load_rotated_queries(pointers, rows, count, b, new, table_rows, cfg: tl.constexpr):
    """The tile of queries at `pointers` (BLOCK_M, 1), rotated: (BLOCK_M, BLOCK_D)."""
    APPENDING: tl.constexpr = cfg.APPENDING
    position = rows * 0
    if APPENDING.pairs > 0:
        position += tl.load(new.base + b)
        if APPENDING.has_own_positions:
            position += rows
    tile = load_rotated(pointers, 1, rows < count, position, new, table_rows, cfg.ALIGNMENT, cfg)
    return tile.to(pointers.dtype.element_ty)


@triton.jit
def part_of_tile(tile, begin, full_begin, full_end, end):
    """The program of a split KV loop that visits `tile` (see `split_range`); 0 if none does."""
    after_full = full_end - full_begin + tile - begin
    step = tl.where(tile < full_begin, after_full, tile - begin)
    step = tl.where((tile >= full_begin) & (tile < full_end), tile - full_begin, step)
    steps_of_part = tl.maximum(tl.cdiv(end - begin, tl.num_programs(1)), 1)
    return tl.where((tile >= begin) & (tile < end), step // steps_of_part, 0)


@triton.jit
def append_tokens(
    k, v, new, added, table_rows, b, kv_head, heads, start_k, pages, begin, full_begin, full_end,
    end, lengths, score, cfg: tl.constexpr,
):  # fmt: skip
    """Store the new tokens whose tiles this program visits; drop those that do not fit.

    `lengths.at.seqused_k` has the lengths before the append. The four bounds are those of
    `tile_phases`.
    """
    APPENDING: tl.constexpr = cfg.APPENDING
    PAIR: tl.constexpr = cfg.PAIR
    # (tokens, 1)
    index = tl.arange(0, APPENDING.tokens)[:, None]
    position = tl.load(lengths.at.seqused_k + b).to(tl.int32) + index
    stored = (index < added) & (position >= 0) & (position < lengths.N)
    if cfg.IS_SPLIT:
        tile_of_keys = (position - start_k) // cfg.BLOCK_N
        part = part_of_tile(tile_of_keys, begin, full_begin, full_end, end)
        stored = stored & (part == tl.program_id(1))
    if tl.max(stored.to(tl.int32)) > 0:
        if cfg.PAGE_SIZE > 0:
            row = tl.load(pages + position // cfg.PAGE_SIZE, mask=stored, other=-1)
            slot = position % cfg.PAGE_SIZE
        else:
            row = index * 0 + b
            if lengths.at.cache_batch_idx is not None:
                row = index * 0 + tl.load(lengths.at.cache_batch_idx + b)
            slot = position
        stored = stored & (row >= 0) & (row < lengths.total_k)
        if APPENDING.pairs > 0:
            position = tl.load(new.base + b) + index
        head = b * (heads // cfg.GROUP) + kv_head

        source = new.k + b.to(tl.int64) * new.k_batch + kv_head.to(tl.int64) * new.k_head
        source += index.to(tl.int64) * new.k_row
        tile = load_rotated(source, new.k_dim, stored, position, new, table_rows, 1, cfg)
        store_tokens(
            tile, new.k_cache, k, row, slot, stored, kv_head, score.data.k_descale, head, cfg.D,
            cfg.BLOCK_D, PAIR, cfg.ALIGNMENT,
        )  # fmt: skip

        source = new.v + b.to(tl.int64) * new.v_batch + kv_head.to(tl.int64) * new.v_head
        source += index.to(tl.int64) * new.v_row
        dims = tl.arange(0, cfg.BLOCK_DV)[None, :]
        tile = tl.load(source + dims * new.v_dim, mask=stored & (dims < cfg.DV), other=0.0)
        store_tokens(
            tile, new.v_cache, v, row, slot, stored, kv_head, score.data.v_descale, head, cfg.DV,
            cfg.BLOCK_DV, PAIR, cfg.ALIGNMENT,
        )  # fmt: skip
        tl.debug_barrier()  # the threads of the program read what others of them have written


@triton.jit
def store_tokens(
    tile, ptr, cache, row, slot, stored, kv_head, descale_ptr, head, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, PAIR: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Store `tile` (tokens, BLOCK_DIM) in the slots (tokens, 1) of cache rows or pages.

    `ptr` is the cache in its own dtype; `cache` has its strides in words of PAIR numbers.
    """
    own = HeadRows(ptr, cache.batch * PAIR, cache.row * PAIR, cache.head * PAIR)
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    offs = row.to(tl.int64) * own.batch + slot.to(tl.int64) * own.row
    offs += kv_head.to(tl.int64) * own.head
    inside = stored & (dims < DIM)
    tile = as_stored(tile, own, descale_ptr, head, inside)
    tl.store(tl.multiple_of(ptr + offs + dims, [1, ALIGNMENT]), tile, mask=inside)
