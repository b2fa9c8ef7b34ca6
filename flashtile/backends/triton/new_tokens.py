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

# Largest tile of queries that is rotated after the append, so that its loads and those of the new
# tokens are in flight together; taller ones would fill the registers.
LATE_ROWS = tl.constexpr(16)


@triton.jit
def load_to_rotate(
    pointers, step, inside, position, new, table_rows, ALIGNMENT: tl.constexpr, cfg: tl.constexpr
):
    """What `rotated` needs of rows whose elements are `step` apart: the features, those they are
    paired with, and the cosine and sine of their angles; each (rows, BLOCK_D).

    `pointers` to the rows, `inside` and `position` are (rows, 1). Positions outside of the table
    are not rotated.
    """
    APPENDING: tl.constexpr = cfg.APPENDING
    PAIRS: tl.constexpr = APPENDING.pairs
    dims = tl.arange(0, cfg.BLOCK_D)[None, :]
    elements = pointers + dims * step
    if ALIGNMENT > 1:
        elements = tl.multiple_of(elements, [1, ALIGNMENT])
    tile = tl.load(elements, mask=inside & (dims < cfg.D), other=0.0)
    partner, c, s = tile, tile, tile  # unused without pairs
    if PAIRS > 0:
        if APPENDING.is_interleaved:
            pair = dims // 2
            is_first = dims % 2 == 0
            other = tl.where(is_first, dims + 1, dims - 1)
        else:
            is_first = dims < PAIRS
            pair = tl.where(is_first, dims, dims - PAIRS)
            other = tl.where(is_first, dims + PAIRS, dims - PAIRS)
        is_rotated = inside & (dims < 2 * PAIRS)
        partner = tl.load(pointers + other * step, mask=is_rotated, other=0.0)
        known = is_rotated & (position >= 0) & (position < table_rows)
        offs = position.to(tl.int64) * PAIRS + pair
        c = tl.load(new.cos + offs, mask=known, other=1.0)
        s = tl.load(new.sin + offs, mask=known, other=0.0)
    return tile, partner, c, s


@triton.jit
def rotated(parts, cfg: tl.constexpr):
    """The rows of `load_to_rotate`, rotated in float32."""
    APPENDING: tl.constexpr = cfg.APPENDING
    PAIRS: tl.constexpr = APPENDING.pairs
    tile, partner, c, s = parts
    if PAIRS > 0:
        dims = tl.arange(0, cfg.BLOCK_D)[None, :]
        is_first = dims % 2 == 0 if APPENDING.is_interleaved else dims < PAIRS
        s = s.to(tl.float32)
        rotated_partner = partner.to(tl.float32) * tl.where(is_first, -s, s)
        tile = tile.to(tl.float32)
        tile = tl.where(dims < 2 * PAIRS, tile * c.to(tl.float32) + rotated_partner, tile)
    return tile


@triton.jit
def load_queries(pointers, rows, count, b, new, table_rows, cfg: tl.constexpr):
    """What `rotated_queries` needs of the tile of queries at `pointers` (BLOCK_M, 1)."""
    APPENDING: tl.constexpr = cfg.APPENDING
    position = rows * 0
    if APPENDING.pairs > 0:
        position += tl.load(new.base + b)
        if APPENDING.has_own_positions:
            position += rows
    parts = load_to_rotate(
        pointers, 1, rows < count, position, new, table_rows, cfg.ALIGNMENT, cfg
    )  # fmt: skip
    if cfg.BLOCK_M > LATE_ROWS:
        tile = rotated(parts, cfg).to(pointers.dtype.element_ty)
        parts = tile, tile, tile, tile
    return parts


@triton.jit
def rotated_queries(parts, q, cfg: tl.constexpr):
    """The tile of queries from `load_queries`, (BLOCK_M, BLOCK_D)."""
    tile = parts[0]
    if cfg.BLOCK_M <= LATE_ROWS:
        tile = rotated(parts, cfg).to(q.ptr.dtype.element_ty)
    return tile


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

        # All loads come before the first store, to wait for memory only once.
        source = new.k + b.to(tl.int64) * new.k_batch + kv_head.to(tl.int64) * new.k_head
        source += index.to(tl.int64) * new.k_row
        key_parts = load_to_rotate(source, new.k_dim, stored, position, new, table_rows, 1, cfg)
        source = new.v + b.to(tl.int64) * new.v_batch + kv_head.to(tl.int64) * new.v_head
        source += index.to(tl.int64) * new.v_row
        dims = tl.arange(0, cfg.BLOCK_DV)[None, :]
        values = tl.load(source + dims * new.v_dim, mask=stored & (dims < cfg.DV), other=0.0)
        store_tokens(
            rotated(key_parts, cfg), new.k_cache, k, row, slot, stored, kv_head,
            score.data.k_descale, head, cfg.D, cfg.BLOCK_D, PAIR, cfg.ALIGNMENT,
        )  # fmt: skip
        store_tokens(
            values, new.v_cache, v, row, slot, stored, kv_head, score.data.v_descale, head, cfg.DV,
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
