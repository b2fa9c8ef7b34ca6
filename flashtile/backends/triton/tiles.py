"""Operations on one tile, from which the kernels are built.

A tile of scores has rows (queries) and keys. Row and key indices are tensors that broadcast against
each other, (BLOCK_M, 1) with (1, BLOCK_N) or, in kernels that hold the transposed tile, (1,
BLOCK_M) with (BLOCK_N, 1): every operation below works for both. Exponents are in base 2 (suffix
`_log2`), because the hardware's exponential is 2**x.

Arguments are grouped into the tuples of `arguments.py`; an absent tensor is None, which costs
nothing at run time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...gpu.dropout import BLOCK_KEYS, LOWER_BITS, philox_block
from ...gpu.intrinsics import IS_INTERPRETED, LN2, LOG2E, load_each, rows_base, tanh
from ...gpu.score_source import Corners

# The rows of a sequence


@triton.jit
def query_span(lengths, b):
    """First row and number of queries of sequence `b`, clamped to the tensor."""
    start = b * 0
    count = lengths.M
    if lengths.at.cu_seqlens_q is not None:
        start = tl.minimum(tl.maximum(tl.load(lengths.at.cu_seqlens_q + b), 0), lengths.total_q)
        stop = tl.minimum(tl.load(lengths.at.cu_seqlens_q + b + 1), lengths.total_q)
        count = tl.minimum(tl.maximum(stop - start, 0), count)
    if lengths.at.seqused_q is not None:
        count = tl.minimum(tl.maximum(tl.load(lengths.at.seqused_q + b), 0), count)
    return start, count


@triton.jit
def key_span(lengths, b, added=0):
    """First row (after the left pad) and number of keys of sequence `b`, clamped to the tensor.

    `added`: number of new keys that are not counted in `seqused_k` yet.
    """
    start = b * 0
    count = lengths.N
    if lengths.at.cu_seqlens_k is not None:
        start = tl.minimum(tl.maximum(tl.load(lengths.at.cu_seqlens_k + b), 0), lengths.total_k)
        stop = tl.minimum(tl.load(lengths.at.cu_seqlens_k + b + 1), lengths.total_k)
        count = tl.minimum(tl.maximum(stop - start, 0), count)
    if lengths.at.seqused_k is not None:
        used = tl.load(lengths.at.seqused_k + b) + added
        count = tl.minimum(tl.maximum(used, 0), count)
    if lengths.at.leftpad_k is not None:
        pad = tl.minimum(tl.maximum(tl.load(lengths.at.leftpad_k + b), 0), count)
        start += pad
        count -= pad
    return start, count


@triton.jit
def key_row_of_batch(lengths, b):
    """The row of k and v that holds sequence `b`."""
    row = b
    if lengths.at.cache_batch_idx is not None:
        row = tl.minimum(
            tl.maximum(tl.load(lengths.at.cache_batch_idx + b), 0), lengths.total_k - 1
        )
    return row


@triton.jit
def head_swizzle(pid, blocks, heads, SWIZZLE: tl.constexpr):
    """(block, head) of a program: all blocks of SWIZZLE heads, then those of the next heads.

    The SWIZZLE heads share the L2 cache. The head varies fastest, so the same block of all of them
    runs at the same time, and the order of the blocks (such as LPT) is also the order in time.
    """
    group = pid // (blocks * SWIZZLE)
    first = group * SWIZZLE
    width = tl.minimum(SWIZZLE, heads - first)
    index = pid - group * (blocks * SWIZZLE)
    return index // width, first + index % width


@triton.jit
def tile_of_queries(lengths, cfg: tl.constexpr, HEADS: tl.constexpr = 1):
    """(tile, tiles of a head, sequence, head) of a program. HEADS query heads share its tile, and
    count as one.
    """
    heads = lengths.heads // HEADS
    tiles = tl.cdiv(lengths.M * HEADS, cfg.BLOCK_M)
    tile, bh = head_swizzle(tl.program_id(0), tiles, lengths.B * heads, cfg.HEAD_SWIZZLE)
    if cfg.HAS_RIGHT or cfg.SPANS > 0:
        tile = tiles - 1 - tile  # LPT order: the longest KV loops first
    return tile, tiles, bh // heads, bh % heads


@triton.jit
def stats_start(sequence, h):
    """Offset of the rows of a sequence and head in a log-sum-exp, (B, Hq, M) or, packed,
    (Hq, total_q).
    """
    lengths = sequence.lengths
    if lengths.at.cu_seqlens_q is None:
        start = (sequence.b * lengths.heads + h).to(tl.int64) * lengths.M
    else:
        start = h.to(tl.int64) * lengths.total_q
    return start + sequence.start_q


@triton.jit
def stats_count(lengths):
    """Number of elements of a log-sum-exp, the rows of all heads; 64-bit."""
    if lengths.at.cu_seqlens_q is None:
        rows = tl.cast(lengths.B, tl.int64) * lengths.M
    else:
        rows = tl.cast(lengths.total_q, tl.int64)
    return rows * lengths.heads


# Which keys a row sees


@triton.jit
def floor_to(x, size):
    """`x` rounded down to a multiple of `size`, also below zero."""
    remainder = x % size
    return x - tl.where(remainder < 0, remainder + size, remainder)


@triton.jit
def visible_keys(rows, sequence, mask, cfg: tl.constexpr):
    """Keys [start, stop) that the queries `rows` see: `masks.Visibility.key_range`."""
    p = query_positions(rows, sequence, cfg)
    start = p * 0
    stop = start + sequence.N
    if cfg.HAS_LEFT:
        start = tl.maximum(start, keys_before(p - mask.left, sequence, cfg))
    if cfg.HAS_RIGHT:
        stop = tl.minimum(stop, keys_before(p + mask.right + 1, sequence, cfg))
    if cfg.HAS_CHUNK:
        chunk = floor_to(p, mask.chunk)
        start = tl.maximum(start, keys_before(chunk, sequence, cfg))
        stop = tl.minimum(stop, keys_before(chunk + mask.chunk, sequence, cfg))
    return start, stop


@triton.jit
def between(keys, start, stop, cfg: tl.constexpr):
    """Which keys are in the [start, stop) of `visible_keys`."""
    visible = keys < stop
    if cfg.HAS_LEFT or cfg.HAS_CHUNK:
        visible = visible & (keys >= start)
    return visible


@triton.jit
def seeing_rows(key, sequence, mask, cfg: tl.constexpr):
    """Rows [start, stop) that see `key`: the inverse of `visible_keys`."""
    j = key_positions(key, sequence, cfg)
    start = j * 0
    stop = start + sequence.M
    if cfg.HAS_RIGHT:
        start = tl.maximum(start, queries_before(j - mask.right, sequence, cfg))
    if cfg.HAS_LEFT:
        stop = tl.minimum(stop, queries_before(j + mask.left + 1, sequence, cfg))
    if cfg.HAS_CHUNK:
        chunk = floor_to(j, mask.chunk)
        start = tl.maximum(start, queries_before(chunk, sequence, cfg))
        stop = tl.minimum(stop, queries_before(chunk + mask.chunk, sequence, cfg))
    return start, stop


@triton.jit
def tile_phases(first_start, first_stop, last_start, last_stop, BLOCK: tl.constexpr):
    """Cut the loop over tiles into masked, full and masked tiles: four bounds, counted in tiles.

    `first_*` is the interval of the first row (or key) of the program's own tile, `last_*` that of
    the last. Tiles outside of [first_start, last_stop) are empty; tiles within [last_start,
    first_stop) are full.
    """
    begin = first_start // BLOCK
    end = tl.maximum(begin, (last_stop + BLOCK - 1) // BLOCK)
    full_begin = tl.minimum(end, tl.maximum(begin, (last_start + BLOCK - 1) // BLOCK))
    full_end = tl.minimum(end, tl.maximum(full_begin, first_stop // BLOCK))
    return begin, full_begin, full_end, end


@triton.jit
def masked_tile(i, begin, full_begin, full_end):
    """The tile of step `i` over the masked tiles, which are before and after the full ones."""
    before = full_begin - begin
    return tl.where(i < before, begin + i, full_end + i - before)


@triton.jit
def block_mask_start(mask, lengths, b, h):
    """Offset of the tiles of (b, h) in `kinds`."""
    heads = 1 + mask.data.has_heads * (lengths.heads - 1)
    return (b * mask.data.has_batch * heads + h * mask.data.has_heads).to(tl.int64) * (
        mask.rows * mask.columns
    )


@triton.jit
def in_block_mask(rows, keys, visible, sequence, h, mask, cfg: tl.constexpr):
    """`visible` and the block mask, which is looked up element by element."""
    tile_row = rows // cfg.MASK_TILE_M
    tile_column = keys // cfg.MASK_TILE_N
    visible = visible & (tile_row < mask.rows) & (tile_column < mask.columns)
    offs = block_mask_start(mask, sequence.lengths, sequence.b, h)
    offs += tile_row * mask.columns + tile_column
    # The shape of `visible`, as all that follows.
    kind = tl.load(mask.data.kinds + offs, mask=visible, other=0)
    index = tl.load(mask.data.partial_index + offs, mask=visible & (kind == 2), other=0)
    inside = rows % cfg.MASK_TILE_M * cfg.MASK_TILE_N + keys % cfg.MASK_TILE_N
    element = index.to(tl.int64) * (cfg.MASK_TILE_M * cfg.MASK_TILE_N) + inside
    seen = tl.load(mask.data.partial_tiles + element, mask=visible & (kind == 2), other=0) != 0
    return visible & (seen | (kind == 1))


@triton.jit
def list_row(lists, sequence, h, tile, tiles, capacity):
    """Pointers to the counts and list of tiles that `tile`, of the `tiles` of (b, h), visits."""
    list_heads = 1 + lists.has_heads * (sequence.lengths.heads - 1)
    row = sequence.b * lists.has_batch * list_heads + h * lists.has_heads
    row = row.to(tl.int64) * tiles + tile
    return lists.counts + 2 * row, lists.tiles + row * capacity


# From products to scores


@triton.jit
def score_slope(qk, score, cfg: tl.constexpr):
    """The derivative of softcap, ``1 - tanh(s / cap)**2``; only for calls with a softcap."""
    t = tanh(qk * (score.data.scale / score.data.softcap))
    return 1.0 - t * t


@triton.jit
def capped_score(qk, score, cfg: tl.constexpr):
    """What a score function gets: the scaled product, after the softcap if there is one."""
    s = qk * score.data.scale
    if cfg.HAS_SOFTCAP:
        s = tanh(s / score.data.softcap) * score.data.softcap
    return s


@triton.jit
def product_gradient(
    ds, qk, p, rows, keys, corners, sequence, h, score, IS_MASKED: tl.constexpr, cfg: tl.constexpr
):
    """The gradient of the scaled products, from that of the scores, `ds`, whose weights are `p`."""
    if cfg.SCORE_MOD is not None:
        s = capped_score(qk, score, cfg)
        values, integers = score.data.captured, score.data.captured_integers
        b, head, i, j = indices_of_scores(rows, keys, sequence, h, cfg)
        indices = corners_of_scores(corners, sequence, h, cfg)
        ds = cfg.SCORE_GRADIENT(s, b, head, i, j, indices, ds, values, integers)
        if IS_MASKED:
            ds = tl.where(p != 0.0, ds, 0.0)  # where nothing is seen, the derivative may be NaN
    if cfg.HAS_SOFTCAP:
        ds = ds * score_slope(qk, score, cfg)
    return ds


@triton.jit
def add_relative_bias(s, data, rows, keys, corners, sequence, h, cfg: tl.constexpr):
    """Scores plus a relative bias.

    Most tiles of a long sequence are farther from the diagonal than a short table reaches. All
    their scores add the same number, so the kernel loads it once instead of once for each score.
    The branch reads no scores, so its loads overlap the product that computes them.
    """
    R = data.table_reach
    middle = data.table_ptr + h * (2 * R + 1) + R
    first_i = query_positions(corners.first_row, sequence, cfg)
    last_i = query_positions(corners.last_row, sequence, cfg)
    first_j = key_positions(corners.first_key, sequence, cfg)
    last_j = key_positions(corners.last_key, sequence, cfg)
    nearest, farthest = first_j - last_i, last_j - first_i
    # (BLOCK_M, 1), (1, BLOCK_N); transposed in tiles of dK and dV
    i, j = query_positions(rows, sequence, cfg), key_positions(keys, sequence, cfg)
    if (nearest >= R) | (farthest <= -R):
        bias = tl.load(middle + tl.where(nearest >= R, R, -R)).to(tl.float32)
        bias = tl.broadcast_to(bias, s.shape)
    else:
        d = (j - first_i) - (i - first_i)  # fewer instructions than j - i
        d = tl.minimum(tl.maximum(d, -R), R)
        bias = load_each(middle + d).to(tl.float32)
    return s + bias


@triton.jit
def scores_of(qk, rows, keys, M, corners, sequence, h, score, cfg: tl.constexpr):
    """Scores from q k^T: scale, softcap, score function, ALiBi, biases. Times `exponent_factor`,
    they are exponents of 2.

    If a score is only a product times a positive scale (cfg.IS_LINEAR), this returns `qk`, and the
    factor has the scale. The bias of rows from `M` is not read.
    """
    # (BLOCK_M, BLOCK_N) or, in tiles of dK and dV, (BLOCK_N, BLOCK_M)
    if cfg.IS_LINEAR:
        s = qk
    else:
        s = capped_score(qk, score, cfg)
        if cfg.SCORE_MOD is not None:
            values, integers = score.data.captured, score.data.captured_integers
            b, head, i, j = indices_of_scores(rows, keys, sequence, h, cfg)
            indices = corners_of_scores(corners, sequence, h, cfg)
            s = cfg.SCORE_MOD(s, b, head, i, j, indices, values, integers)
        if score.data.alibi_ptr is not None:
            slope = score.data.alibi_ptr + sequence.b * score.data.alibi_batch + h
            slope = tl.load(slope).to(tl.float32)
            distance = query_positions(rows, sequence, cfg) - key_positions(keys, sequence, cfg)
            s -= slope * tl.abs(distance).to(tl.float32)
        if score.data.table_ptr is not None:
            s = add_relative_bias(s, score.data, rows, keys, corners, sequence, h, cfg)
        if score.bias.ptr is not None:
            bias = load_bias(score.bias, sequence.b, h, rows, keys, M).to(tl.float32)
            s += bias
            if cfg.HAS_HIDDEN_KEYS:  # the product may be NaN
                s = tl.where(bias == -float("inf"), bias, s)
    return s


@triton.jit
def without_hidden(tile, p):
    """`tile` (BLOCK_N, ...) of keys or values, with zeros where all probabilities `p` (BLOCK_M,
    BLOCK_N) are 0: a hidden key may hold NaN, and 0 times NaN is NaN. Likewise a tile of gradients
    of queries, with transposed probabilities.
    """
    return tl.where((tl.max(p, 0) > 0.0)[:, None], tile, tl.zeros_like(tile))


@triton.jit
def load_bias(bias, b, h, rows, keys, M):
    """The bias of a tile, 0 for rows from `M`; broadcast dimensions have stride 0.

    The mask compares with the keys of the tensor, not of the sequence: where 16 divides them, the
    compiler knows that neighbouring keys are all inside or all outside, and loads 16 bytes at once.
    """
    offs = b.to(tl.int64) * bias.batch + h.to(tl.int64) * bias.head
    offs += rows.to(tl.int64) * bias.row + keys.to(tl.int64) * bias.key
    return tl.load(bias.ptr + offs, mask=(rows < M) & (keys < bias.keys), other=0.0)


@triton.jit
def as_float16(q_tile):
    """Queries in float16, and a factor for each row's products: (BLOCK_M, 1).

    float16 holds every float8 number, and needs fewer instructions than bfloat16. The factor is a
    power of two, so only numbers 2**17 below their row's largest number are rounded.
    """
    # (BLOCK_M, 1)
    largest = tl.max(tl.abs(q_tile.to(tl.float32)), 1)[:, None]
    factor = tl.math.exp2(tl.math.floor(tl.math.log2(tl.where(largest > 0.0, largest, 1.0))))
    return (q_tile.to(tl.float32) / factor).to(tl.float16), factor


@triton.jit
def unpack_pairs(pairs):
    """The even and the odd columns of a float8 tile, in float16, from 16-bit words that hold two
    neighbouring columns each.

    The tensor cores read two neighbouring numbers of the summed dimension from one register. Loads
    from shared memory can transpose 16-bit words, but single bytes would be loaded and packed one
    by one. The assembly is explicit because the compiler emits four times as many instructions.
    """
    if IS_INTERPRETED:
        even = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return even, odd


@triton.jit
def split_columns(tile, COUNT: tl.constexpr):
    """COUNT tiles, 2 or 4, of every such column: (ROWS, COLUMNS / COUNT) each."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    even, odd = tl.split(tl.reshape(tile, [ROWS, COLUMNS // 2, 2]))
    found = even, odd
    if COUNT == 4:
        first, third = tl.split(tl.reshape(even, [ROWS, COLUMNS // 4, 2]))
        second, fourth = tl.split(tl.reshape(odd, [ROWS, COLUMNS // 4, 2]))
        found = first, second, third, fourth  # type: ignore[assignment]  # more tiles
    return found


# Dropout: the definition is flashtile/dropout.py


@triton.jit
def kept(dropout, rows, n0, sequence, h, cfg: tl.constexpr):
    """Which scores of a tile dropout keeps, bool (BLOCK_M, BLOCK_N).

    `rows` are (BLOCK_M, 1), `h` is a scalar or (BLOCK_M, 1); `n0` is a multiple of BLOCK_N.
    """
    b, h, queries = indices_of_queries(rows, sequence, h, cfg)
    numbers = random_bytes(dropout.key, b, h, queries, n0, sequence, 0, cfg)
    if cfg.DROPOUT_BITS == 16:
        lower = random_bytes(dropout.key, b, h, queries, n0, sequence, LOWER_BITS, cfg)
        numbers = numbers << 8 | lower
    return numbers >= dropout.first_kept


@triton.jit
def random_bytes(key, b, h, queries, n0, sequence, ADDED: tl.constexpr, cfg: tl.constexpr):
    """The random byte of each score, int32 (BLOCK_M, BLOCK_N); the counters of the Philox blocks
    have ADDED.
    """
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    BLOCKS: tl.constexpr = (BLOCK_N + 63) // 64
    WORDS: tl.constexpr = BLOCK_N // (16 * BLOCKS)  # of a Philox block for keys of the tile
    if cfg.HAS_LONE_KEYS:  # which may stand anywhere: a Philox block for each score
        keys = key_positions(n0 + tl.arange(0, BLOCK_N)[None, :], sequence, cfg)
        groups = keys // BLOCK_KEYS * 4 + keys % 8 // 2 + ADDED
        words = word_of(keys, philox_block(key, b, h, queries, groups))
        number = byte_of(words, keys // 8 % 2 * 2 + keys % 2)
    else:
        # (1, 4 BLOCKS)
        group = tl.arange(0, 4 * BLOCKS)[None, :]
        block = key_positions((n0 // BLOCK_KEYS + group // 4) * BLOCK_KEYS, sequence, cfg)
        groups = block // BLOCK_KEYS * 4 + group % 4 + ADDED
        # four of (BLOCK_M, 4 BLOCKS)
        words = philox_block(key, b, h, queries, groups)
        if WORDS == 4:
            words = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
        elif WORDS == 2:
            words = tl.join(word_of(n0, words), word_of(n0 + 16, words))
        else:
            words = word_of(n0, words)
        # (BLOCK_M, BLOCKS, pairs of every eight keys, words, bytes)
        words = tl.reshape(words, [BLOCK_M, BLOCKS, 4, WORDS, 1])
        number = byte_of(words, tl.arange(0, 4)[None, None, None, None, :])
        # A thread that has scores of a query has all of them of a block, in this order.
        number = tl.reshape(number, [BLOCK_M, BLOCKS, 4, 2 * WORDS, 2])
        number = tl.reshape(tl.permute(number, (0, 1, 3, 2, 4)), [BLOCK_M, BLOCK_N])
    return number


@triton.jit
def word_of(keys, words):
    """The word of the four of a Philox block that has the bytes of a key."""
    word = keys // 16 % 4
    return tl.where(
        word < 2, tl.where(word == 0, words[0], words[1]), tl.where(word == 2, words[2], words[3])
    )


@triton.jit
def byte_of(words, byte):
    return ((words >> (8 * byte).to(tl.uint32)) & 0xFF).to(tl.int32)


# Tiles of rows from memory


@triton.jit
def load_columns(
    rows, inside, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """The columns [FIRST, FIRST + DIM) of the rows that the pointers `rows` (BLOCK, 1) start,
    (BLOCK, BLOCK_DIM); zero outside of `inside` (BLOCK, 1).
    """
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    # (BLOCK, BLOCK_DIM)
    pointers = tl.multiple_of(rows + FIRST + dims, [1, ALIGNMENT])
    return tl.load(pointers, mask=inside & (dims < DIM), other=0.0)


@triton.jit
def load_rows(
    x,
    base,
    n0,
    count,
    IS_MASKED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Load rows [n0, n0 + BLOCK) from `base`, (BLOCK, BLOCK_DIM); zero past `count` (if IS_MASKED)
    and past DIM.
    """
    offs = tl.arange(0, BLOCK)[:, None]
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    # (BLOCK, BLOCK_DIM)
    pointers = base + tl.cast(n0, tl.int64) * x.row + offs * x.row + dims
    pointers = tl.multiple_of(pointers, [1, ALIGNMENT])
    if IS_MASKED:
        if DIM == BLOCK_DIM:
            tile = tl.load(pointers, mask=n0 + offs < count, other=0.0)
        else:
            tile = tl.load(pointers, mask=(n0 + offs < count) & (dims < DIM), other=0.0)
    else:
        if DIM == BLOCK_DIM:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=dims < DIM, other=0.0)
    return tile


@triton.jit
def tile_source(
    x,
    base,
    count,
    cfg: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """The source of `load_tile` for `count` rows from `base`: the pointer, or a TMA descriptor.

    TMA copies whole tiles without registers and fills zeros past the last row and past DIM.
    """
    if cfg.HAS_DESCRIPTORS:
        source = tl.make_tensor_descriptor(
            base,
            shape=[count, DIM],
            strides=[tl.cast(x.row, tl.int64), 1],
            block_shape=[BLOCK, BLOCK_DIM],
        )
    else:
        source = base
    return source


@triton.jit
def load_tile(
    source, x, n0, count, cfg: tl.constexpr, IS_MASKED: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """`load_rows` from a `tile_source`."""
    # (BLOCK, BLOCK_DIM)
    if cfg.HAS_DESCRIPTORS:
        tile = source.load([n0, 0])
    elif cfg.IS_INVARIANT and IS_MASKED:  # a tile of queries may begin before the first one
        rows = (n0 + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
        inside = (rows >= 0) & (rows < count)
        tile = load_columns(source + rows * x.row, inside, 0, DIM, BLOCK_DIM, ALIGNMENT)
    else:
        tile = load_rows(x, source, n0, count, IS_MASKED, DIM, BLOCK, BLOCK_DIM, ALIGNMENT)
    return tile


@triton.jit
def store_rows(
    x,
    base,
    m0,
    count,
    tile,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Write `tile` (BLOCK, BLOCK_DIM) to the rows [m0, m0 + BLOCK) from `base`, up to `count`."""
    offs = tl.arange(0, BLOCK)[:, None]
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    # (BLOCK, BLOCK_DIM)
    pointers = base + tl.cast(m0, tl.int64) * x.row + offs * x.row + dims
    pointers = tl.multiple_of(pointers, [1, ALIGNMENT])
    inside = m0 + offs < count
    if DIM != BLOCK_DIM:
        inside = inside & (dims < DIM)
    tl.store(pointers, tile.to(x.ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_query_tile(
    x, sequence, h, m0, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ALIGNMENT: tl.constexpr,
    cfg: tl.constexpr,
):  # fmt: skip
    """The rows of the queries [m0, m0 + BLOCK_M) of a sequence and head, (BLOCK_M, BLOCK_DIM)."""
    base = rows_base(x, sequence.b, sequence.start_q, h)
    return load_rows(x, base, m0, sequence.M, True, DIM, cfg.BLOCK_M, BLOCK_DIM, ALIGNMENT)


@triton.jit
def load_key_tile(
    x, sequence, kv_head, n0, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ALIGNMENT: tl.constexpr,
    cfg: tl.constexpr,
):  # fmt: skip
    """The rows of the keys [n0, n0 + BLOCK_N) of a sequence and head, (BLOCK_N, BLOCK_DIM)."""
    base = rows_base(x, sequence.b, sequence.start_k, kv_head)
    return load_rows(x, base, n0, sequence.N, True, DIM, cfg.BLOCK_N, BLOCK_DIM, ALIGNMENT)


@triton.jit
def store_key_tile(
    x, sequence, kv_head, n0, tile, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, cfg: tl.constexpr
):
    """Write `tile` to the rows that `load_key_tile` reads; a gradient of keys or values."""
    base = rows_base(x, sequence.b, sequence.start_k, kv_head)
    N = sequence.N
    store_rows(x, base, n0, N, tile, DIM, cfg.BLOCK_N, BLOCK_DIM, cfg.OUT_ALIGNMENT)


# Where queries and keys stand in their sequence, when the tensors hold only parts of it.
#
# The positions of `flashtile.masks` on the GPU: a few runs describe the positions of a sequence's
# rows, which increase from row to row. What a query sees is therefore an interval of rows of k, and
# kernels compute it once for each tile; their loops over tiles know rows only. Without runs
# (`cfg.RUNS` is 0) query i stands at i + N - M and key j at j, which costs nothing.


@triton.jit
def query_positions(rows, sequence, cfg: tl.constexpr):
    """The positions of the queries `rows`, of any shape."""
    if cfg.RUNS > 0:
        p = positions_of(rows, runs_of(sequence.lengths.at.q_runs, sequence.b, cfg), cfg)
    else:
        p = rows + (sequence.N - sequence.M)
    return p


@triton.jit
def key_positions(keys, sequence, cfg: tl.constexpr):
    """The positions of `keys`, of any shape."""
    if cfg.RUNS > 0:
        j = positions_of(keys, runs_of(sequence.lengths.at.k_runs, sequence.b, cfg), cfg)
    else:
        j = keys
    return j


@triton.jit
def queries_before(p, sequence, cfg: tl.constexpr):
    """The first query row at position `p` or later. May be outside of [0, M] without runs."""
    if cfg.RUNS > 0:
        row = rows_before(p, runs_of(sequence.lengths.at.q_runs, sequence.b, cfg), sequence.M, cfg)
    else:
        row = p - (sequence.N - sequence.M)
    return row


@triton.jit
def keys_before(p, sequence, cfg: tl.constexpr):
    """The first key at position `p` or later. May be outside of [0, N] without runs."""
    if cfg.RUNS > 0:
        key = rows_before(p, runs_of(sequence.lengths.at.k_runs, sequence.b, cfg), sequence.N, cfg)
    else:
        key = p
    return key


@triton.jit
def indices_of_queries(rows, sequence, h, cfg: tl.constexpr):
    """The indices of a sequence, heads and queries in the whole call, which dropout and score
    functions use."""
    b = sequence.b
    if sequence.lengths.at.numbers is not None:
        shift = tl.load(sequence.lengths.at.numbers + 2 * b + 1)
        queries = query_positions(rows, sequence, cfg) - shift
        b = tl.load(sequence.lengths.at.numbers + 2 * b)
        h = h + sequence.lengths.at.first_head
    elif cfg.RUNS > 0:
        queries = query_positions(rows, sequence, cfg) - (sequence.N - sequence.M)
    else:
        queries = rows
    return b, h, queries


@triton.jit
def indices_of_scores(rows, keys, sequence, h, cfg: tl.constexpr):
    """`indices_of_queries` with keys: what a score function gets beside the score."""
    b, h, queries = indices_of_queries(rows, sequence, h, cfg)
    return b, h, queries, key_positions(keys, sequence, cfg)


@triton.jit
def corners_of_scores(corners, sequence, h, cfg: tl.constexpr):
    """The least and the greatest index of a tile's queries and keys, as `indices_of_scores` numbers
    them."""
    _, _, first_row, first_key = indices_of_scores(
        corners.first_row, corners.first_key, sequence, h, cfg
    )
    _, _, last_row, last_key = indices_of_scores(
        corners.last_row, corners.last_key, sequence, h, cfg
    )
    return Corners(first_row, last_row, first_key, last_key)


@triton.jit
def runs_of(runs_ptr, b, cfg: tl.constexpr):
    """The runs of sequence `b`: `cfg.RUNS` pairs of first row and position."""
    return runs_ptr + b.to(tl.int64) * (2 * cfg.RUNS)


@triton.jit
def positions_of(rows, runs_ptr, cfg: tl.constexpr):
    """`Positions.at`; the first run begins at row 0, and unused ones after the last row."""
    RUNS: tl.constexpr = cfg.RUNS
    p = rows + tl.load(runs_ptr + 1)
    for run in tl.static_range(1, RUNS):
        first = tl.load(runs_ptr + 2 * run)
        p = tl.where(rows >= first, rows - first + tl.load(runs_ptr + 2 * run + 1), p)
    return p


@triton.jit
def rows_before(p, runs_ptr, count, cfg: tl.constexpr):
    """`Positions.below`, for a sequence of `count` rows."""
    RUNS: tl.constexpr = cfg.RUNS
    total = p * 0
    for run in tl.static_range(RUNS):
        stop = count
        if run + 1 < RUNS:
            stop = tl.minimum(tl.load(runs_ptr + 2 * run + 2), count)
        length = tl.maximum(stop - tl.load(runs_ptr + 2 * run), 0)
        total += tl.minimum(tl.maximum(p - tl.load(runs_ptr + 2 * run + 1), 0), length)
    return total


# Exponentials of scores relative to a pivot of their row: the running maximum in the forward, the
# log-sum-exp in the backward.
#
# A kernel that multiplies scores only by a scale, caps them or adds ALiBi keeps pivots in base 2.
# The exponent ``s * factor - pivot`` is then one fused multiply-add. It multiplies exactly, but the
# pivot has been rounded, so the exponent of the largest score is off by up to half of the pivot's
# last digit. This is nothing for scores below 2**20, and infinity for those above 2**31.
#
# Masks made of numbers, such as -1e30 or ``torch.finfo(dtype).min``, are that large. They come as a
# bias or from a score function (HAS_LARGE_SCORES). Those kernels keep pivots in natural units and
# subtract them first, which costs one more instruction for each score and is exact at the largest.


@triton.jit
def exponent_factor(score, cfg: tl.constexpr):
    """The positive factor that makes the results of `scores_of` exponents of 2."""
    factor = LOG2E
    if cfg.IS_LINEAR:
        factor = score.data.scale * LOG2E
    return factor


@triton.jit
def as_pivot(s, factor, cfg: tl.constexpr):
    """Scores in the units of pivots. `factor` is `exponent_factor`."""
    if not cfg.HAS_LARGE_SCORES:
        s = s * factor
    return s


@triton.jit
def exponentials(s, pivot, factor, cfg: tl.constexpr, log_sum=None):
    """exp(s - pivot) of results of `scores_of`, divided by 2**log_sum; `factor` is
    `exponent_factor`.
    """
    if cfg.HAS_LARGE_SCORES:
        exponent = (s - pivot) * LOG2E
        if log_sum is not None:
            exponent -= log_sum
        p = tl.math.exp2(exponent)
    else:
        p = tl.math.exp2(s * factor - pivot)
    return p


@triton.jit
def rescaling(old, new, cfg: tl.constexpr):
    """The factor that makes sums relative to the pivot `old` relative to `new`."""
    if cfg.HAS_LARGE_SCORES:
        factor = tl.math.exp2((old - new) * LOG2E)
    else:
        factor = tl.math.exp2(old - new)
    return factor


@triton.jit
def log_sum_exp(pivot, row_sum, cfg: tl.constexpr):
    """The log-sum-exp in natural units, of a sum of exponentials relative to `pivot`."""
    if cfg.HAS_LARGE_SCORES:
        lse = pivot + tl.math.log2(row_sum) * LN2
    else:
        lse = (pivot + tl.math.log2(row_sum)) * LN2
    return lse


@triton.jit
def pivot_of_lse(lse, HAS_LARGE_SCORES: tl.constexpr):
    """A log-sum-exp as a pivot. Rows that saw no key get +inf, which makes P zero."""
    pivot = lse
    if not HAS_LARGE_SCORES:
        pivot = lse * LOG2E
    return tl.where(lse == -float("inf"), float("inf"), pivot)
