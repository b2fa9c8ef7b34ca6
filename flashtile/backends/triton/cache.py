"""Tiles of a cache: its pages, the tokens that a decoding step appends, and float8 scales."""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.rows import HeadRows
from ...ops.rotary.kernel import as_stored
from ...problem import FLOAT8_KEY_BLOCK, FLOAT8_QUERY_BLOCK
from .tiles import load_rows, load_tile

# Tiles of keys and values from a paged cache, through a page table


@triton.jit
def page_list(lengths, b):
    """Pointer to the page indices of sequence `b`; None without pages."""
    pages = None
    if lengths.at.page_table is not None:
        pages = lengths.at.page_table + b.to(tl.int64) * lengths.page_columns
    return pages


@triton.jit
def load_paged_rows(
    x, base, pages, n0, sequence, IS_MASKED: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Rows [n0, n0 + BLOCK) of a sequence cut into pages of PAGE rows, (BLOCK, BLOCK_DIM); zero
    past its end (if IS_MASKED) and past DIM."""
    count, lengths = sequence.N, sequence.lengths
    if PAGE % BLOCK == 0 and lengths.at.leftpad_k is None:  # the tile is inside one page
        page = page_number(tl.load(pages + n0 // PAGE), lengths)
        page_base = base + page.to(tl.int64) * x.batch
        left = count - n0 + n0 % PAGE
        tile = load_rows(x, page_base, n0 % PAGE, left, IS_MASKED, DIM, BLOCK, BLOCK_DIM, ALIGNMENT)
    else:
        offs = tl.arange(0, BLOCK)
        dims = tl.arange(0, BLOCK_DIM)[None, :]
        inside = n0 + offs < count
        if BLOCK % PAGE == 0 and lengths.at.leftpad_k is None:  # the tile consists of whole pages
            column = n0 // PAGE + tl.arange(0, BLOCK // PAGE)
            slot = offs % PAGE
            is_used = column * PAGE < count
        else:
            row = n0 + offs
            if lengths.at.leftpad_k is not None:
                row += sequence.start_k
            column = row // PAGE
            slot = row % PAGE
            is_used = inside
        if IS_MASKED:
            page = tl.load(pages + column, mask=is_used, other=0)
        else:
            page = tl.load(pages + column)
        page = page_number(page, lengths)
        if BLOCK % PAGE == 0 and lengths.at.leftpad_k is None:  # repeat each page for its rows
            # (pages,) -> (pages, PAGE) -> (BLOCK,)
            page = tl.broadcast_to(page[:, None], [BLOCK // PAGE, PAGE])
            page = tl.reshape(page, [BLOCK])
        # (BLOCK, BLOCK_DIM)
        pointers = (base + dims) + (slot * x.row)[:, None]
        pointers += page_offset(page, x)[:, None]
        pointers = tl.multiple_of(pointers, [1, ALIGNMENT])
        if IS_MASKED:
            tile = tl.load(pointers, mask=inside[:, None] & (dims < DIM), other=0.0)
        elif DIM == BLOCK_DIM:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=dims < DIM, other=0.0)
    return tile


@triton.jit
def page_offset(page, x):
    """Elements of `x` before a page, 64-bit; by a 32-bit multiplication if the stride fits."""
    stride = page * 0 + x.batch  # Triton passes the stride in 32 or 64 bits
    if stride.dtype == tl.int32:
        wide = stride.to(tl.uint32).to(tl.uint64)
        offset = (page.to(tl.uint32).to(tl.uint64) * wide).to(tl.int64)
    else:
        offset = page.to(tl.int64) * stride
    return offset


@triton.jit
def page_number(page, lengths):
    """A page index, clamped to the cache."""
    return tl.minimum(tl.maximum(page, 0), lengths.total_k - 1)


@triton.jit
def row_pointers(
    source, x, pages, n0, sequence, cfg: tl.constexpr, IS_MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Pointers to the rows [n0, n0 + BLOCK) of a sequence, paged or not, (BLOCK, 1): of its last
    row, instead of rows past the end (if IS_MASKED).
    """
    ALIGNMENT: tl.constexpr = cfg.ROW_ALIGNMENT
    lengths = sequence.lengths
    IS_IN_ONE_PAGE: tl.constexpr = cfg.PAGE_SIZE % BLOCK == 0 and lengths.at.leftpad_k is None
    # (BLOCK, 1)
    offs = tl.arange(0, BLOCK)[:, None]
    if IS_MASKED or (cfg.PAGE_SIZE > 0 and not IS_IN_ONE_PAGE):
        rows = tl.minimum(n0 + offs, tl.maximum(sequence.N - 1, 0))
        if cfg.PAGE_SIZE > 0:
            if lengths.at.leftpad_k is not None:
                rows += sequence.start_k
            page = page_number(tl.load(pages + rows // cfg.PAGE_SIZE), lengths)
            pointers = source + page_offset(page, x) + rows % cfg.PAGE_SIZE * x.row
        else:
            pointers = source + rows.to(tl.int64) * x.row
    else:  # only the first pointer changes from tile to tile
        if cfg.PAGE_SIZE > 0:
            page = page_number(tl.load(pages + n0 // cfg.PAGE_SIZE), lengths)
            source += page.to(tl.int64) * x.batch
            n0 = n0 % cfg.PAGE_SIZE
        pointers = source + tl.cast(n0, tl.int64) * x.row + offs * x.row
    return tl.multiple_of(pointers, [1, ALIGNMENT])


@triton.jit
def load_packed_rows(
    source, x, pages, n0, sequence, cfg: tl.constexpr, IS_MASKED: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, unpack: tl.constexpr,
):  # fmt: skip
    """What `unpack` makes of packed rows, paged or not: tiles of keys or values (BLOCK, BLOCK_DIM),
    `cfg.PAIR` of them or one of a tail, and perhaps a factor of each row (BLOCK, 1).
    """
    # (1, BLOCK_DIM)
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    rows = row_pointers(source, x, pages, n0, sequence, cfg, IS_MASKED, cfg.BLOCK_N)
    return unpack(dims, dims < DIM, rows)


@triton.jit
def load_keys(
    source, x, pages, n0, sequence, cfg: tl.constexpr, IS_MASKED: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values, paged or not: (BLOCK_N, BLOCK_DIM)."""
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    if cfg.PAGE_SIZE > 0:
        tile = load_paged_rows(
            x, source, pages, n0, sequence, IS_MASKED, cfg.PAGE_SIZE, DIM, BLOCK_N, BLOCK_DIM,
            cfg.ALIGNMENT,
        )  # fmt: skip
    else:
        tile = load_tile(
            source, x, n0, sequence.N, cfg, IS_MASKED, DIM, BLOCK_N, BLOCK_DIM, cfg.ALIGNMENT
        )
    return tile


# A decoding step: rotate the queries and append the new tokens to the cache while attending to it.
#
# One program has all queries of a key head, or, if the KV loop is split, one part of their keys. It
# appends the new tokens whose tiles it visits, and then reads them like all other keys. So no
# program reads what another one writes. The rules are those of `ops/append/formula.py`.


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
    # (rows, BLOCK_D), as all that follows
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
    parts = load_to_rotate(pointers, 1, rows < count, position, new, table_rows, cfg.ALIGNMENT, cfg)
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
def part_of_tile(tile, begin, full_begin, full_end, end, cfg: tl.constexpr):
    """The program of a split KV loop that visits `tile` (see `split_range`); 0 if none does."""
    after_full = full_end - full_begin + tile - begin
    step = tl.where(tile < full_begin, after_full, tile - begin)
    step = tl.where((tile >= full_begin) & (tile < full_end), tile - full_begin, step)
    steps_of_part = tl.maximum(tl.cdiv(end - begin, tl.num_programs(1)), 1)
    if cfg.PART_KEYS > 0:
        step, steps_of_part = tile, cfg.PART_KEYS // cfg.BLOCK_N
    return tl.where((tile >= begin) & (tile < end), step // steps_of_part, 0)


@triton.jit
def append_tokens(
    k, v, new, added, table_rows, sequence, kv_head, pages, begin, full_begin, full_end, end, score,
    cfg: tl.constexpr,
):  # fmt: skip
    """Store the new tokens whose tiles this program visits; drop those that do not fit.

    `seqused_k` has the lengths before the append. The four bounds are those of
    `tile_phases`.
    """
    APPENDING: tl.constexpr = cfg.APPENDING
    PAIR: tl.constexpr = cfg.PAIR
    b, lengths = sequence.b, sequence.lengths
    # (tokens, 1)
    index = tl.arange(0, APPENDING.tokens)[:, None]
    position = tl.load(lengths.at.seqused_k + b).to(tl.int32) + index
    stored = (index < added) & (position >= 0) & (position < lengths.N)
    if cfg.IS_SPLIT:
        tile_of_keys = (position - sequence.start_k) // cfg.BLOCK_N
        part = part_of_tile(tile_of_keys, begin, full_begin, full_end, end, cfg)
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
        head = b * (lengths.heads // cfg.GROUP) + kv_head

        # All loads come before the first store, to wait for memory only once.
        source = new.k + b.to(tl.int64) * new.k_batch + kv_head.to(tl.int64) * new.k_head
        source += index.to(tl.int64) * new.k_row
        key_parts = load_to_rotate(source, new.k_dim, stored, position, new, table_rows, 1, cfg)
        source = new.v + b.to(tl.int64) * new.v_batch + kv_head.to(tl.int64) * new.v_head
        source += index.to(tl.int64) * new.v_row
        dims = tl.arange(0, cfg.BLOCK_DV)[None, :]
        # (tokens, BLOCK_DV)
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


# Load the scales of float8 queries, keys and values in the forward.
#
# A per-head scale is the same for all tiles of a KV loop. A per-block scale belongs to
# `FLOAT8_QUERY_BLOCK` queries of a head, (B, Hq, blocks of M), or to `FLOAT8_KEY_BLOCK` keys of a
# key head, (B, Hk, blocks of N). Blocks are counted from the start of each sequence.


QUERY_BLOCK = tl.constexpr(FLOAT8_QUERY_BLOCK)
KEY_BLOCK = tl.constexpr(FLOAT8_KEY_BLOCK)


@triton.jit
def head_scale(descale, sequence, kv_head, cfg: tl.constexpr):
    """The per-head scale, from (B, Hk); 1 without scales."""
    scale = 1.0
    if descale is not None:
        kv_heads = sequence.lengths.heads // cfg.GROUP
        scale = tl.load(descale + sequence.b * kv_heads + kv_head).to(tl.float32)
    return scale


@triton.jit
def query_scales(score, sequence, h, kv_head, rows, cfg: tl.constexpr):
    """The factor of every row's products: the product of the scales of q and k, a scalar; or, with
    per-block scales, only that of q, (BLOCK_M, 1), and `key_block_scale` is another factor.
    """
    if score.data.q_block_descale is not None:
        lengths = sequence.lengths
        block = (sequence.b * lengths.heads + h) * tl.cdiv(lengths.M, QUERY_BLOCK)
        block += rows // QUERY_BLOCK
        # (BLOCK_M, 1), as `rows`
        scales = tl.load(score.data.q_block_descale + block, mask=rows < sequence.M, other=1.0)
        scales = scales.to(tl.float32)
    else:
        scales = head_scale(score.data.q_descale, sequence, kv_head, cfg)
        scales *= head_scale(score.data.k_descale, sequence, kv_head, cfg)
    return scales


@triton.jit
def first_key_block(sequence, kv_head, cfg: tl.constexpr):
    """Index of the first per-block scale of a sequence's keys and values."""
    lengths = sequence.lengths
    return (sequence.b * (lengths.heads // cfg.GROUP) + kv_head) * tl.cdiv(lengths.N, KEY_BLOCK)


@triton.jit
def key_block_scale(descale, first, n0, BLOCK_N: tl.constexpr):
    """The scale of the keys or values [n0, n0 + BLOCK_N), which are in one block; None without
    per-block scales.
    """
    tl.static_assert(KEY_BLOCK % BLOCK_N == 0)
    scale = None
    if descale is not None:
        scale = tl.load(descale + first + n0 // KEY_BLOCK).to(tl.float32)
    return scale
