"""A block mask in a kernel: the lists of `block_lists.py`, and the bits of partial tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .intrinsics import empty_accumulator

# Lists


@gluon.jit
def list_of(b, h, m0, sizes, mask, cfg: gl.constexpr):
    """The index of the list of a block mask for the tile of queries from row `m0`."""
    number = b * mask.blocks.batch_step + h * mask.blocks.head_step
    return number * gl.cdiv(sizes.M, cfg.BLOCK_M) + m0 // cfg.BLOCK_M


@gluon.jit
def first_entry(number, sizes, mask, cfg: gl.constexpr):
    """The pointer to the first entry of a list: the first key of a block and its tile of bits."""
    return mask.blocks.entries + 2 * number.to(gl.int64) * gl.cdiv(sizes.N, cfg.BLOCK_N)


@gluon.jit
def first_key(block, listed, cfg: gl.constexpr):
    """The first key of a block of the tile; with a block mask, of an entry of its list."""
    n0 = block * cfg.BLOCK_N
    if cfg.HAS_BLOCK_MASK:
        n0 = gl.load(listed.entries + 2 * block)
    return n0


@gluon.jit
def bits_of(block, listed, cfg: gl.constexpr):
    """The bits of a block of a block mask, for the rows of this consumer."""
    bits = block
    if cfg.HAS_BLOCK_MASK:
        tile = gl.load(listed.entries + 2 * block + 1).to(gl.int64)
        bits = load_bits(listed.bits + tile * (cfg.BLOCK_M * cfg.BLOCK_N // 32), cfg)
    return bits


# Bits


@gluon.constexpr_function
def words_of(LAYOUT):
    """The layout of bits in words (64, BLOCK_N / 32), shifted for each of four pairs of keys, (64,
    BLOCK_N / 32, 4), from that of scores (64, BLOCK_N / 32, 4 eights, 4 pairs, 2).
    """
    return gl.SliceLayout(2, gl.SliceLayout(4, LAYOUT))


@gluon.jit
def load_bits(ptr, cfg: gl.constexpr):
    """A bit for each key of a block, 1 if a row sees it: int32 (64, BLOCK_N / 32)."""
    WORDS: gl.constexpr = cfg.BLOCK_N // 32
    scores = empty_accumulator(cfg.BLOCK_N).reshape([64, WORDS, 4, 4, 2])
    LAYOUT: gl.constexpr = gl.SliceLayout(2, words_of(scores.type.layout))
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(ptr + row[:, None] * WORDS + word[None, :])


@gluon.jit
def masked_by_bits(s, words, cfg: gl.constexpr):
    """-inf where the bit of a key (`load_bits`) is 0.

    A thread has two keys of every eight. It shifts its words once, so that the bits that it tests
    are constants.
    """
    by_words = s.reshape([64, cfg.BLOCK_N // 32, 4, 4, 2])
    LAYOUT: gl.constexpr = by_words.type.layout
    SHIFTED: gl.constexpr = words_of(LAYOUT)
    EIGHTS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, LAYOUT)))
    PAIRS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, SHIFTED)))
    eight = gl.arange(0, 4, layout=gl.SliceLayout(0, EIGHTS))
    key = gl.arange(0, 2, layout=gl.SliceLayout(0, PAIRS))
    words = words[:, :, None] >> (2 * pair)[None, None, :]
    bit = 8 * eight[None, None, :, None, None] + key[None, None, None, None, :]
    visible = (words[:, :, None, :, None] >> bit) & 1
    by_words = gl.where(visible != 0, by_words, -float("inf"))
    return gl.convert_layout(by_words.reshape(s.shape), s.type.layout, assert_trivial=True)
