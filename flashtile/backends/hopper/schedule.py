"""Which tile of queries comes next, and which keys it sees.

Programs are persistent, one for each multiprocessor. The producer of a program takes the number of
its next tile from a counter that all programs share, and hands it to its consumers: whoever is
early takes more, so long and short tiles even out.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .verbs import aggregate


@aggregate
class Work:
    """A tile of queries of one head, and the blocks of keys that some row of it sees."""

    b: gl.tensor
    h: gl.tensor
    m0: gl.tensor  # first row of the tile, counted in the sequence
    start_q: gl.tensor  # first row of the sequence
    M: gl.tensor  # queries of the sequence
    start_k: gl.tensor
    N: gl.tensor
    begin: gl.tensor  # first block of keys; at least one block is visited
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, b, h, m0, start_q, M, start_k, N, begin, end):
        self.b = b
        self.h = h
        self.m0 = m0
        self.start_q = start_q
        self.M = M
        self.start_k = start_k
        self.N = N
        self.begin = begin
        self.end = end


@gluon.jit
def section_order(tile, m_tiles, heads, section):
    """(tile of queries, head): all tiles of `section` heads, heads fastest, then the next section.

    The heads of a section share the cache, and equal tiles of all of them run together.
    """
    number = tile // (m_tiles * section)
    first = number * section
    width = gl.minimum(section, heads - first)
    rest = tile - number * (m_tiles * section)
    return rest // width, first + rest % width


@gluon.jit
def sequence(b, cu_seqlens, seqused, total, bound):
    """First row and number of rows of sequence `b`, kept inside the tensor."""
    start = b * 0
    count = start + bound
    if cu_seqlens is not None:
        start = gl.minimum(gl.maximum(gl.load(cu_seqlens + b), 0), total)
        stop = gl.minimum(gl.load(cu_seqlens + b + 1), total)
        count = gl.minimum(gl.maximum(stop - start, 0), count)
    if seqused is not None:
        count = gl.minimum(gl.maximum(gl.load(seqused + b), 0), count)
    return start, count


@gluon.jit
def floor_to(x, size):
    """`x` rounded down to a multiple of `size`, also below zero."""
    rest = x % size
    return x - gl.where(rest < 0, rest + size, rest)


@gluon.jit
def visible_keys(p, N, mask, cfg: gl.constexpr):
    """Keys [start, stop) that a query at position `p` sees: `masks.Visibility.key_range`."""
    start = p * 0
    stop = start + N
    if cfg.HAS_LEFT:
        start = gl.maximum(start, p - mask.left)
    if cfg.HAS_RIGHT:
        stop = gl.minimum(stop, p + mask.right + 1)
    if cfg.HAS_CHUNK:
        chunk = floor_to(p, mask.chunk)
        start = gl.maximum(start, chunk)
        stop = gl.minimum(stop, chunk + mask.chunk)
    return start, stop


@gluon.jit
def work_of(tile, sizes, at, mask, cfg: gl.constexpr):
    """The work of a tile number."""
    m_tiles = gl.cdiv(sizes.M, cfg.BLOCK_M)
    m, bh = section_order(tile, m_tiles, sizes.B * sizes.heads, sizes.section)
    if cfg.HAS_RIGHT or cfg.HAS_CHUNK:
        m = m_tiles - 1 - m  # the longest walks first
    b = bh // sizes.heads
    m0 = m * cfg.BLOCK_M
    start_q, M = sequence(b, at.cu_seqlens_q, at.seqused_q, sizes.total_q, sizes.M)
    start_k, N = sequence(b, at.cu_seqlens_k, at.seqused_k, sizes.total_k, sizes.N)
    begin, end = blocks_of(m0, gl.minimum(m0 + cfg.BLOCK_M, M) - 1, M, N, mask, cfg)
    return Work(b, bh % sizes.heads, m0, start_q, M, start_k, N, begin, end)


@gluon.jit
def blocks_of(first, last, M, N, mask, cfg: gl.constexpr):
    """Blocks of keys [begin, end) that a row of [first, last] sees; the first block if none."""
    start, _ = visible_keys(first + N - M, N, mask, cfg)
    _, stop = visible_keys(last + N - M, N, mask, cfg)
    seen = (first <= last) & (start < stop)
    begin = gl.where(seen, start // cfg.BLOCK_N, 0)
    end = gl.where(seen, gl.cdiv(stop, cfg.BLOCK_N), 1)
    return begin, end


@gluon.jit
def full_blocks(first, last, work, mask, cfg: gl.constexpr):
    """Blocks of keys [begin, end) that every row of [first, last] sees whole."""
    shift = work.N - work.M
    _, stop = visible_keys(first + shift, work.N, mask, cfg)
    start, _ = visible_keys(last + shift, work.N, mask, cfg)
    end = gl.minimum(gl.maximum(stop // cfg.BLOCK_N, work.begin), work.end)
    begin = gl.minimum(gl.maximum(gl.cdiv(start, cfg.BLOCK_N), work.begin), end)
    return begin, end


@gluon.jit
def existing_tile(tile, counter, sizes, at, cfg: gl.constexpr):
    """`tile`, or the first one after it that this program takes and that holds a query."""
    if cfg.IS_PACKED:
        while _is_empty(tile, sizes, at, cfg):
            tile = next_number(counter)
    return tile


@gluon.jit
def _is_empty(tile, sizes, at, cfg: gl.constexpr):
    m_tiles = gl.cdiv(sizes.M, cfg.BLOCK_M)
    inside = tile < sizes.tiles
    m, bh = section_order(gl.where(inside, tile, 0), m_tiles, sizes.B * sizes.heads, sizes.section)
    if cfg.HAS_RIGHT or cfg.HAS_CHUNK:
        m = m_tiles - 1 - m
    _, M = sequence(bh // sizes.heads, at.cu_seqlens_q, at.seqused_q, sizes.total_q, sizes.M)
    return inside & (m * cfg.BLOCK_M >= M)


@gluon.jit
def next_number(counter):
    """A tile number that no program has had; the first ones are the programs' own."""
    return gl.atomic_add(counter, 1) + gl.num_programs(0)


@gluon.jit
def retire(counter):
    """The last program to come here leaves both counters at zero for the next launch."""
    done = gl.atomic_add(counter + 1, 1)
    if done == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)
