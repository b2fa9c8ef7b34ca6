"""Random combinations of options, odd sizes and strides, forward and backward, by the rule.

`FLASHTILE_DRAWS` says how many; a failure prints what Hypothesis drew and a blob that repeats it.
On a GPU every combination is several kernels, which take seconds to compile: `FLASHTILE_SIZES` says
how many draws of sizes and numbers share one.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from conformance.caches import CAPACITY, B, Cache
from conformance.harness import (
    OPTIONS,
    Masked,
    Sizes,
    check_dense,
    check_varlen,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from flashtile.masks import BlockMask
from flashtile.testing import (
    DTYPES,
    ODD_HEAD_DIMS,
    ODD_LENGTHS,
    STRIDE_STYLES,
    cu_seqlens,
    normal,
    rotary_tables,
    strided,
)

# Hopper takes one draw in hundreds, so `test_random_hopper.py` draws for it.
portable = ["cpu", pytest.param("triton", marks=pytest.mark.gpu)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("poisoned_buffers"),
    pytest.mark.parametrize("backend", portable, indirect=True),
]

DRAWS = int(os.environ.get("FLASHTILE_DRAWS", "100"))
SIZES = int(os.environ.get("FLASHTILE_SIZES", "1"))


def draws(share, sizes=1):
    return settings(
        max_examples=max(1, int(DRAWS * share / sizes)),
        deadline=None,
        database=None,
        print_blob=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


lengths = st.one_of(st.integers(0, 12), st.integers(0, 90), st.sampled_from(ODD_LENGTHS))
head_dims = st.one_of(st.integers(1, 40), st.sampled_from(ODD_HEAD_DIMS))
heads = st.tuples(st.integers(1, 3), st.integers(1, 3)).map(lambda x: (x[0] * x[1], x[0]))
sides = st.one_of(st.sampled_from([-1, None, 0]), st.integers(1, 40))
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31)


def several(size):
    """`SIZES` draws of sizes, each with a seed."""
    return st.lists(st.tuples(size, seeds), min_size=SIZES, max_size=SIZES)


def random_tiles(g, s, tile):
    """A block mask of all three kinds of tiles, for batches and heads or shared by them."""
    whole = torch.rand(s.B, s.Hq, -(-s.M // tile[0]), -(-s.N // tile[1]), generator=g)
    dense = torch.rand(s.B, s.Hq, s.M, s.N, generator=g) < 0.5
    rows, cols = torch.arange(s.M) // tile[0], torch.arange(s.N) // tile[1]
    kind = whole[:, :, rows[:, None], cols]
    dense = (dense | (kind < 0.4)) & (kind < 0.8)
    if torch.rand((), generator=g) < 0.5:
        dense = dense[:1, :1]
    return Masked(BlockMask.from_dense(dense, tile), dense)


@st.composite
def options(draw, dropout=True, lengths_used=True):
    """Any combination of options, as a maker of them for sizes that are drawn elsewhere."""
    plain = {
        "causal": draw(st.booleans()),
        "window_size": draw(st.one_of(st.just((-1, -1)), st.tuples(sides, sides))),
        "attention_chunk": draw(st.one_of(st.just(0), st.integers(1, 30))),
        "softcap": draw(st.sampled_from([0.0, 0.0, 0.8, 3.0])),
        "softmax_scale": draw(st.sampled_from([None, None, 0.1, 0.7])),
    }
    if dropout:
        plain["dropout_p"] = draw(st.sampled_from([0.0, 0.0, 0.1, 0.6]))
        plain["deterministic"] = draw(st.booleans())
    named = [
        draw(st.sampled_from(("nothing", *group)))
        for group in (
            [name for name in OPTIONS if "alibi" in name],
            [name for name in OPTIONS if name.startswith("relative")],
            [name for name in OPTIONS if name.startswith("bias")],
            ("sink",),
            ("seqused",) if lengths_used else (),
            [name for name in OPTIONS if name.startswith("span")],
            [name for name in OPTIONS if "score function" in name],
        )
    ]
    tile = draw(st.one_of(st.none(), st.tuples(st.integers(3, 33), st.integers(3, 33))))

    def make(g, s, dtype):
        made = dict(plain)
        for name in named:
            made |= OPTIONS[name](g, s, dtype)
        if tile is not None:
            made["block_mask"] = random_tiles(g, s, tile)
        return made

    make.__name__ = f"{plain} {named} tile={tile}"
    return make


@given(
    dtype=dtypes,
    sizes=several(st.tuples(st.integers(1, 3), lengths, lengths)),
    groups=heads,
    dims=st.tuples(head_dims, st.one_of(st.none(), head_dims)),
    chosen=options(),
    style=st.sampled_from(STRIDE_STYLES),
)
@draws(0.45, SIZES)
def test_dense(backend, dtype, sizes, groups, dims, chosen, style):
    for size, seed in sizes:
        s = Sizes(*size, *groups, *dims)
        check_dense(s, chosen, dtype, backend, seed, partial(strided, style=style))


@given(
    dtype=dtypes,
    batches=several(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=4)),
    slack=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    groups=heads,
    dims=st.tuples(head_dims, st.one_of(st.none(), head_dims)),
    chosen=options(),
    style=st.sampled_from(STRIDE_STYLES),
)
@draws(0.35, SIZES)
def test_packed(backend, dtype, batches, slack, groups, dims, chosen, style):
    layout = partial(strided, style=style)
    for sequences, seed in batches:
        lengths_q, lengths_k = (list(x) for x in zip(*sequences, strict=True))
        M, N = max(lengths_q) + slack[0], max(lengths_k) + slack[1]
        s = Sizes(len(sequences), M, N, *groups, *dims)
        check_varlen(lengths_q, lengths_k, s, chosen, dtype, backend, seed, layout)


@st.composite
def caches(draw):
    """A call over a cache: storage, append, rotation, packed queries."""
    (Hq, Hk), D = draw(heads), 2 * draw(st.integers(1, 24))
    M = draw(st.integers(0, 7))
    new = draw(st.sampled_from(["none", "dense", "packed"]))
    filled = tuple(draw(st.integers(0, CAPACITY - 7)) for _ in range(B))
    storage = draw(st.sampled_from(["contiguous", "paged", "rows"]))
    c = Cache(
        draw(seeds),
        draw(dtypes),
        filled,
        M,
        Hq,
        Hk,
        D,
        draw(st.one_of(st.none(), head_dims)),
        rows=5 if storage == "rows" else B,
    )
    if storage == "rows":
        rows = draw(st.permutations(range(5)))[:B]
        c.call["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32)
    if storage == "paged":
        c.to_pages(draw(st.sampled_from([1, 2, 4, 8, 16, 32])))
    if draw(st.booleans()):
        pads = [draw(st.integers(0, n)) for n in filled]
        c.call["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32)
    if draw(st.booleans()):
        queries = [draw(st.integers(0, M)) for _ in range(B)]
        c.q = normal(c.g, sum(queries), Hq, D, dtype=c.dtype)
        c.call |= {"cu_seqlens_q": cu_seqlens(queries), "max_seqlen_q": M}
    if new == "packed":
        added = [draw(st.integers(0, 7)) for _ in range(B)]
        c.call |= c.new_tokens(sum(added)) | {"cu_seqlens_k_new": cu_seqlens(added)}
    if new == "dense":
        c.call |= c.new_tokens()
    if new != "none" and draw(st.booleans()):
        rotary_dim = 2 * draw(st.integers(1, D // 2))
        cos, sin = rotary_tables(CAPACITY + 8, rotary_dim, c.dtype)
        c.call |= {"rotary_cos": cos, "rotary_sin": sin}
        c.call["rotary_interleaved"] = draw(st.booleans())
    c.call["num_splits"] = draw(st.sampled_from([0, 1, 3]))
    c.call["options"] = draw(options(dropout=False, lengths_used=False))
    return c


@given(cache=caches())
@draws(0.2)
def test_caches(backend, cache):
    cache.check(backend)
