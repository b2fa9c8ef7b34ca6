"""Cached calls whose sequences share their first keys: the results of plain calls."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile.call import shared_prefix
from flashtile.call.options import CacheOptions, options_of
from flashtile.testing import DTYPES, cu_seqlens, normal, rotary_tables

from .caches import CAPACITY, B, Cache

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

PREFIX = 8
FILLED = (12, 8, 20)  # tokens of each row before the append; the second one is the prefix alone


def cache(seed: int, prefix: int = PREFIX, **how) -> Cache:
    c = Cache(seed, filled=how.pop("filled", FILLED), **how)
    c.share_prefix(prefix)
    return c


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
@pytest.mark.parametrize("storage", ["contiguous", "paged", "rows"])
@pytest.mark.parametrize("options", ["nothing", "causal", "causal + softcap + sink + scale"])
def test_options(options, storage, dtype, backend, seed):
    c = cache(seed, dtype=dtype, rows=5 if storage == "rows" else B)
    if storage == "paged":
        c.to_pages(4)
    if storage == "rows":
        c.call["cache_batch_idx"] = torch.tensor([4, 0, 2], dtype=torch.int32)
    c.check(backend, **c.new_tokens(), options=options)


@pytest.mark.parametrize("prefix", [0, 1, 7, 20])
@pytest.mark.parametrize("M", [1, 3])
def test_without_new_tokens(M, prefix, backend, seed):
    """A prefix may be as long as the keys that the first query sees."""
    filled = tuple(prefix + M - 1 + extra for extra in (0, 5, 2))
    cache(seed, prefix, M=M, filled=filled).check(backend, options="causal")


def test_the_whole_cache(backend, seed):
    c = cache(seed, filled=(CAPACITY,) * B)
    c.check(backend, cache_seqlens=None)


def test_rotary(backend, seed):
    c = cache(seed)
    cos, sin = rotary_tables(CAPACITY + 3, 16, torch.float32)
    c.check(backend, **c.new_tokens(), rotary_cos=cos, rotary_sin=sin, causal=True)


def test_packed_queries(backend, seed):
    c = cache(seed)
    c.q = normal(c.g, 5, c.Hq, c.D, dtype=c.dtype)
    lengths = {"cu_seqlens_q": cu_seqlens([3, 0, 2]), "max_seqlen_q": 3}
    c.check(backend, **lengths, causal=True)


WINDOWS = [(3, 0), (5, -1), (15, 2), (9, -3), (-1, -2), (0, 0), (40, -1)]


@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(window, M, backend, seed):
    """Every query leaves out keys of its own, up to the whole prefix."""
    c = cache(seed, M=M)
    c.check(backend, **c.new_tokens(), window_size=window, options="sink")
    cache(seed, M=M, filled=(12, 10, 20)).check(backend, window_size=window, causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
@pytest.mark.parametrize("options", ["alibi", "alibi + causal window", "alibi + softcap + sink"])
def test_alibi(options, dtype, backend, seed):
    """Distances count over the whole sequence, in both parts."""
    c = cache(seed, dtype=dtype)
    c.check(backend, **c.new_tokens(), options=options)
    c = cache(seed, dtype=dtype)
    c.to_pages(4)
    c.check(backend, **c.new_tokens(), options=f"{options} + causal")


def test_alibi_and_a_window_of_packed_queries(backend, seed):
    """Positions count from the end of each sequence's own queries; one has none."""
    c = cache(seed, filled=(12, 10, 20))
    c.q = normal(c.g, 5, c.Hq, c.D, dtype=c.dtype)
    lengths = {"cu_seqlens_q": cu_seqlens([3, 0, 2]), "max_seqlen_q": 3}
    c.check(backend, **lengths, causal=True, window_size=(6, 0), options="alibi")


def test_alibi_over_the_whole_cache(backend, seed):
    c = cache(seed, filled=(CAPACITY,) * B)
    c.check(backend, cache_seqlens=None, causal=True, window_size=(25, 0), options="alibi")


def test_pages_of_one_sequence(backend, seed):
    """The table of each sequence lists the same pages first."""
    c = Cache(seed, filled=FILLED)
    c.to_pages(4, shared=2)
    c.check(backend, **c.new_tokens(), causal=True, shared_prefix_len=PREFIX)


def test_float8(backend, seed):
    c = cache(seed, dtype=torch.bfloat16, filled=(12, 10, 20))
    c.to_float8()
    for name in ("k_descale", "v_descale"):
        c.call[name][:] = c.call[name][:1].clone()
    c.check(backend, causal=True)


def test_latent(seed):
    """Queries of the values: the scores of both parts read them."""
    c = cache(seed)
    qv = normal(c.g, *c.q.shape)
    call = {"cache_seqlens": c.seqlens, "causal": True, "qv": qv, "return_lse": True}
    results = [
        flashtile.attention_with_kvcache(
            c.q, c.k_cache, c.v_cache, **call, shared_prefix_len=length
        )
        for length in (None, 6)
    ]
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("storage", ["rows", "pages", "rows of a page table"])
def test_the_prefix_is_read_where_the_first_sequence_has_it(storage, seed):
    c = cache(seed, filled=FILLED if storage == "pages" else (12, 20, 8))
    first = 0
    call = {"cache_seqlens": c.seqlens}
    if storage != "pages":
        first, rows = 2, torch.tensor([2, 0, 1], dtype=torch.int32)
        call = {"cache_seqlens": c.seqlens[rows.long()], "cache_batch_idx": rows}
    c.call.clear()
    others = [b for b in range(B) if b != first]
    if storage != "rows":
        c.to_pages(PREFIX)
        call |= c.call
    expected = flashtile.attention_with_kvcache(c.q, c.k_cache, c.v_cache, **call)
    for x in (c.k_cache, c.v_cache):
        if storage == "rows":
            x[others, :PREFIX] = torch.nan
        else:
            x[c.call["page_table"][others, 0].long()] = torch.nan
    found = flashtile.attention_with_kvcache(
        c.q, c.k_cache, c.v_cache, **call, shared_prefix_len=PREFIX
    )
    torch.testing.assert_close(found, expected)


def test_no_sequences(seed):
    c = cache(seed)
    call = {"cache_seqlens": c.seqlens[:0], "shared_prefix_len": PREFIX}
    for causal in (False, True):
        out = flashtile.attention_with_kvcache(
            c.q[:0], c.k_cache[:0], c.v_cache[:0], causal=causal, **call
        )
        assert out.shape == c.q[:0].shape


def test_out(seed):
    c = cache(seed)
    out = torch.empty_like(c.q)
    call = {"cache_seqlens": c.seqlens, "shared_prefix_len": PREFIX, "causal": False}
    found = flashtile.attention_with_kvcache(c.q, c.k_cache, c.v_cache, **call, out=out)
    assert found is out
    expected = flashtile.attention_with_kvcache(c.q, c.k_cache, c.v_cache, **call)
    assert torch.equal(out, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nothing", "alibi", "window"])
def test_compiled(name, seed):
    c = cache(seed)
    options = {
        "nothing": {},
        "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
        "window": {"window_size": (5, 0)},
    }[name]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v, k_cache, v_cache, lengths):
        return flashtile.attention_with_kvcache(
            q, k_cache, v_cache, k, v,
            cache_seqlens=lengths, causal=True, shared_prefix_len=PREFIX, return_lse=True,
            **options,
        )  # fmt: skip

    new = c.new_tokens()
    caches = [(c.k_cache.clone(), c.v_cache.clone()) for _ in range(2)]
    found = step(c.q, new["k"], new["v"], *caches[0], c.seqlens)
    with torch.compiler.set_stance("force_eager"):
        expected = step(c.q, new["k"], new["v"], *caches[1], c.seqlens)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(caches[0], caches[1], equal_nan=True)


BAD = {
    "longer than the cache": ({"shared_prefix_len": CAPACITY + 1}, ValueError, "capacity"),
    "longer than a sequence": ({"shared_prefix_len": 10}, ValueError, "sees 9 keys"),
    "longer than a sequence before the append": (
        {"shared_prefix_len": 9, "causal": False},
        ValueError,
        "a sequence has 8 keys before the append",
    ),
    "negative": ({"shared_prefix_len": -1}, ValueError, "shared_prefix_len: got -1"),
    "no number": ({"shared_prefix_len": 4.0}, TypeError, "shared_prefix_len: got float"),
    "chunk": ({"attention_chunk": 4}, NotImplementedError, "attention_chunk"),
    "ALiBi for each sequence": (
        {"alibi_slopes": torch.ones(B, 4)},
        NotImplementedError,
        "alibi_slopes for each",
    ),
    "ALiBi before the end of the prefix": (
        {"alibi_slopes": torch.ones(4), "shared_prefix_len": 10, "causal": False},
        ValueError,
        "sees 9 keys",
    ),
    "bias": ({"bias": torch.zeros(3, CAPACITY)}, NotImplementedError, "bias"),
    "relative bias": ({"relative_bias": torch.zeros(4, 3)}, NotImplementedError, "relative_bias"),
    "score function": (
        {"score_mod": lambda score, b, h, i, j: score - j},
        NotImplementedError,
        "score_mod",
    ),
    "listed keys": (
        {"key_index": torch.zeros(B, 3, 1, 1, dtype=torch.int32)},
        NotImplementedError,
        "key_index",
    ),
    "left pad": (
        {"cache_leftpad": torch.zeros(B, dtype=torch.int32)},
        NotImplementedError,
        "cache_leftpad",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_writes_nothing(call, error, message, seed):
    c = cache(seed)
    before = c.k_cache.clone()
    call = {"shared_prefix_len": PREFIX, "cache_seqlens": c.seqlens, "causal": True} | call
    with pytest.raises(error, match=message):
        flashtile.attention_with_kvcache(c.q, c.k_cache, c.v_cache, **c.new_tokens(), **call)
    assert torch.equal(c.k_cache.nan_to_num(), before.nan_to_num())


def test_every_option_is_allowed_or_refused():
    """A new option does not reach the parts of a call unless somebody has thought about it."""
    known = shared_prefix._ALLOWED | {
        "bias", "relative_bias", "block_mask", "mask", "score_mod", "q_descale",
        "workspace", "key_blocks", "block_size", "key_index", "cache_format",
    }  # fmt: skip
    assert known == set(options_of(CacheOptions))


def test_a_prefix_fills_whole_pages(seed):
    c = cache(seed, 6)
    c.to_pages(4)
    with pytest.raises(ValueError, match="shared_prefix_len: got 6, want a multiple of 4"):
        flashtile.attention_with_kvcache(
            c.q, c.k_cache, c.v_cache, cache_seqlens=c.seqlens, **c.call
        )
