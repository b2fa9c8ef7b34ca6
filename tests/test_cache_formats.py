"""Cache formats: what they hold, how calls read and append to packed rows, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from bad_calls import refuse
from packed_rows import E2M1, KINDS, flashmla
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile import CacheFormat, attention_with_kvcache, cache_formats
from flashtile.testing import (
    assert_close,
    attention_with_kvcache_reference,
    cu_seqlens,
    generator,
    normal,
    paged,
    rotary_tables,
)

B, CAPACITY, HQ, HK = 2, 24, 4, 2
KEYS, VALUES = cache_formats.flashmla()


def random_rows(g: torch.Generator, cache_format: CacheFormat, *sizes: int) -> Tensor:
    return cache_format.packed(normal(g, *sizes, cache_format.head_dim))


def call_of(cache_format: CacheFormat, seed: int, dtype: torch.dtype = torch.float32, **more: Any):
    """A call over random rows."""
    g, D = generator(seed), cache_format.head_dim
    k, v = (random_rows(g, cache_format, B, CAPACITY, HK) for _ in "kv")
    lengths = torch.tensor([5, 17], dtype=torch.int32)
    q = normal(g, B, 3, HQ, D, dtype=dtype)
    return {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths,
            "cache_format": cache_format} | more  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_an_element_is_what_its_bytes_say(name: str, seed: int):
    """Of every row, also of one that no `pack` makes."""
    kind, D = KINDS[name], 48
    cache_format = kind.make(D)
    rows = torch.randint(
        0, 256, (3, 2, cache_format.bytes_per_row), generator=generator(seed), dtype=torch.uint8
    )
    found, wanted = cache_format.unpacked(rows, D), kind.decode(rows, D)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_flashmla_rows(seed: int):
    rows = torch.randint(0, 256, (5, 656), generator=generator(seed), dtype=torch.uint8)
    wanted = flashmla(rows)
    torch.testing.assert_close(KEYS.unpacked(rows), wanted, rtol=0, atol=0, equal_nan=True)
    found = VALUES.unpacked(rows)
    torch.testing.assert_close(found, wanted[:, :512], rtol=0, atol=0, equal_nan=True)


STEPS = {  # the largest error of a format, of a block whose largest number is 1
    "int8": (cache_formats.int8(64), 0.51 / 127),
    "int8 in blocks": (cache_formats.int8(64, 16), 0.51 / 127),
    "int4": (cache_formats.int4(64, None), 0.51 / 7),
    "int4 in blocks": (cache_formats.int4(64, 16), 0.51 / 7),
}


@pytest.mark.parametrize("name", STEPS)
def test_integers_are_the_nearest(name: str, seed: int):
    """The error is half a step, and a rounding of the scale where it cuts the largest number."""
    cache_format, step = STEPS[name]
    x = normal(generator(seed), 50, 64)
    x /= x.unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, -1)  # 1 in every block
    assert float((cache_format.unpacked(cache_format.packed(x)) - x).abs().max()) <= step + 2**-8


def test_nvfp4_rounds_to_the_nearest(seed: int):
    """With a scale of 1, which a 6 in each block makes."""
    x = 6 * torch.rand(100, 32, generator=generator(seed))
    x[:, ::16] = 6
    x *= torch.where(torch.rand(100, 32, generator=generator(seed + 1)) < 0.5, -1, 1)
    cache_format = cache_formats.nvfp4(32)
    found = cache_format.unpacked(cache_format.packed(x))
    nearest = (x.abs()[..., None] - E2M1).abs().amin(-1)
    assert torch.equal((found - x).abs(), nearest)


@pytest.mark.parametrize("name", ["int8", "int4", "nvfp4", "e5m2"])
def test_zeros_and_huge_numbers(name: str):
    cache_format = KINDS[name].make(32)
    x = torch.zeros(2, 32)
    assert torch.equal(cache_format.unpacked(cache_format.packed(x)), x)
    x[1] = 3e38
    assert bool(cache_format.unpacked(cache_format.packed(x)).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["int8", "int4 in blocks", "nvfp4"])
def test_a_call_equals_one_on_the_unpacked_cache(name: str, dtype: torch.dtype, seed: int):
    """In the dtype of the queries, bit for bit."""
    given = call_of(KINDS[name].make(32), seed, dtype, causal=True)
    plain = dict(given)
    cache_format = plain.pop("cache_format")
    for cache in ("k_cache", "v_cache"):
        plain[cache] = cache_format.unpacked(plain[cache]).to(dtype)
    pairs = zip(
        attention_with_kvcache(**given, return_lse=True),
        attention_with_kvcache(**plain, return_lse=True),
        strict=True,
    )
    assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("page_size", [None, 1, 8])
@pytest.mark.parametrize("packing", ["dense", "packed"])
@pytest.mark.parametrize("rotary", [False, True])
def test_new_tokens_are_rotated_and_packed(rotary, packing, page_size, seed: int):
    cache_format = cache_formats.int4(32)
    g, lengths = generator(seed), torch.tensor([5, 0], dtype=torch.int32)
    plain = [normal(g, B, CAPACITY, HK, 32) for _ in "kv"]
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
    if page_size is not None:
        pages = [paged(generator(seed), x, page_size) for x in plain]
        plain, options["page_table"] = [x.nan_to_num() for x, _ in pages], pages[0][1]
    k_cache, v_cache = map(cache_format.packed, plain)
    counts = [3, 3] if packing == "dense" else [4, 1]
    shape = (B, 3) if packing == "dense" else (5,)
    if packing == "packed":
        options |= {"cu_seqlens_q": cu_seqlens(counts), "cu_seqlens_k_new": cu_seqlens(counts),
                    "max_seqlen_q": 4}  # fmt: skip
    q, k, v = (normal(g, *shape, heads, 32) for heads in (HQ, HK, HK))
    if rotary:
        cos, sin = rotary_tables(CAPACITY, 16)
        options |= {"rotary_cos": cos, "rotary_sin": sin}
    plain = [cache_format.unpacked(x) for x in (k_cache, v_cache)]
    appended = [x.clone() for x in plain]
    wanted = attention_with_kvcache_reference(q, *plain, k, v, **options)
    attention_with_kvcache(q, *appended, k, v, **options)  # as its keys are before packing
    out = attention_with_kvcache(q, k_cache, v_cache, k, v, **options, cache_format=cache_format)
    for cache, rotated, before in zip((k_cache, v_cache), appended, plain, strict=True):
        is_new = (rotated != before).any(-1)
        assert is_new.sum() == sum(counts) * HK
        assert torch.equal(cache[is_new], cache_format.packed(rotated[is_new]))
        assert torch.equal(cache_format.unpacked(cache[~is_new]), before[~is_new])
    stored = [cache_format.unpacked(x) for x in (k_cache, v_cache)]
    options["cache_seqlens"] = lengths + torch.tensor(counts, dtype=torch.int32)
    for name in ("cu_seqlens_k_new", "rotary_cos", "rotary_sin"):
        options.pop(name, None)
    if not rotary:
        truth, low = (
            attention_with_kvcache_reference(q, *stored, **options, compute_dtype=dtype)
            for dtype in (torch.float64, torch.float32)
        )
        assert_close("out", out, truth.out, low.out, seed=seed)
    assert (out - wanted.out).abs().mean() < 0.2  # of what the new tokens are


def test_flashmla_appends_once(seed: int):
    """Values are columns of the keys in the same memory."""
    g = generator(seed)
    cache = torch.zeros(B, 8, 1, 656, dtype=torch.uint8)
    new, q = normal(g, B, 4, 1, 576), normal(g, B, 4, HQ, 576)
    out = attention_with_kvcache(
        q, cache, cache, new, new[..., :512], cache_seqlens=2, causal=True,
        cache_format=(KEYS, VALUES),
    )  # fmt: skip
    assert torch.equal(cache[:, 2:6], KEYS.packed(new))
    stored = flashmla(cache)
    lengths = torch.full((B,), 6, dtype=torch.int32)
    truth, low = (
        attention_with_kvcache_reference(
            q, stored, stored[..., :512], cache_seqlens=lengths, causal=True, compute_dtype=dtype
        )
        for dtype in (torch.float64, torch.float32)
    )
    assert_close("out", out, truth.out, low.out, seed=seed)


def test_equal_calls_with_other_formats_are_other_calls(seed: int):
    """Rows of equal sizes: only the program tells the calls apart."""
    one = cache_formats.int8(32)
    other = CacheFormat(one.bytes_per_row, lambda row, d: -one.unpack(row, d), one.pack, 32)
    given = call_of(one, seed)
    first = attention_with_kvcache(**given)
    turned = attention_with_kvcache(**given | {"cache_format": (one, other)})
    assert torch.equal(turned, -first)
    assert torch.equal(attention_with_kvcache(**given), first)
    with_queries = given | {"q": -given["q"]}
    assert torch.equal(
        attention_with_kvcache(**with_queries | {"cache_format": (other, one)}), first
    )


def test_equal_calls_append_by_their_own_pack(seed: int):
    """Formats that differ in `pack` only."""
    one = cache_formats.int8(32)
    other = CacheFormat(one.bytes_per_row, one.unpack, lambda x: one.pack(2 * x), 32)
    g = generator(seed)
    for cache_format, factor in ((one, 1), (other, 2), (one, 1)):
        given = call_of(cache_format, seed)
        k, v = normal(g, B, 1, HK, 32), normal(g, B, 1, HK, 32)
        attention_with_kvcache(**given, k=k, v=v)
        stored = torch.stack([given["k_cache"][b, (5, 17)[b]] for b in range(B)])
        assert torch.equal(stored, one.packed(factor * k[:, 0]))


def test_compiled(seed: int):
    """The graph ends before the call."""
    given = call_of(cache_formats.int8(32), seed)
    compiled = torch.compile(
        lambda q: attention_with_kvcache(**given | {"q": q}) + 1, backend="eager"
    )
    assert torch.equal(compiled(given["q"]), attention_with_kvcache(**given) + 1)


def test_result_into_a_given_tensor_and_meta_tensors(seed: int):
    """The head dim of the values is that of their format."""
    g = generator(seed)
    cache, q = torch.zeros(B, 8, 1, 656, dtype=torch.uint8), normal(g, B, 1, HQ, 576)
    options: dict[str, Any] = {"cache_seqlens": 3, "cache_format": (KEYS, VALUES)}
    out = torch.empty(B, 1, HQ, 512)
    assert attention_with_kvcache(q, cache, cache, **options, out=out) is out
    on_meta = (x.to("meta") for x in (q, cache, cache))
    assert attention_with_kvcache(*on_meta, **options).shape == out.shape


def test_latents_grow_in_a_graph_of_fake_tensors(seed: int):
    """Keys and values are one tensor, whose address cannot be read."""
    with FakeTensorMode():
        cache, new = torch.zeros(B, 8, 1, 656, dtype=torch.uint8), torch.randn(B, 1, 1, 576)
        out = attention_with_kvcache(
            torch.randn(B, 1, HQ, 576), cache, cache, new, new[..., :512], cache_seqlens=3,
            cache_format=(KEYS, VALUES),
        )  # fmt: skip
    assert out.shape == (B, 1, HQ, 512)


def test_lists_of_keys(seed: int):
    """A call with a list equals one over the keys that it names."""
    given = call_of(INT8, seed)
    index = torch.randint(-1, 5, (B, 3, 1, 1), generator=generator(seed), dtype=torch.int32)
    out = attention_with_kvcache(**given, key_index=index)
    values = INT8.unpacked(given["v_cache"]).gather(
        1, index.clamp(min=0).long().expand(B, 3, HK, 32)
    )
    values = values.masked_fill(index < 0, 0.0).repeat_interleave(HQ // HK, 2)
    torch.testing.assert_close(out, values)


def test_explain_names_the_backend():
    given = call_of(cache_formats.int8(32), 0)
    report = str(flashtile.explain(attention_with_kvcache, **given))
    assert "hopper: no: a cache_format (the triton backend has its tiles)" in report


BAD_UNPACK = {
    "past the row": (IndexError, lambda row, d: row[d + 17].float()),
    "past the row, whatever d": (IndexError, lambda row, d: row[48].float() + row[d].float()),
    "a negative index": (IndexError, lambda row, d: row[d - 1].float()),
    "an index by a byte": (NotImplementedError, lambda row, d: row[row[d].long()].float()),
    "no byte": (ValueError, lambda row, d: d.float() + 1.0),
    "the whole row": (ValueError, lambda row, d: row.float()[d]),
    "a sum over the row": (NotImplementedError, lambda row, d: row[d].float() * row.sum()),
    "an integer": (TypeError, lambda row, d: row[d]),
    "another tensor": (TypeError, lambda row, d: E2M1[(row[d] % 8).long()]),
    "a condition": (
        NotImplementedError,
        lambda row, d: row[d].float() if d > 3 else row[0].float(),
    ),
}


@pytest.mark.parametrize("name", BAD_UNPACK)
def test_bad_unpack_functions(name: str):
    error, unpack = BAD_UNPACK[name]
    with pytest.raises(error, match=r"CacheFormat\.unpack"):
        CacheFormat(48, unpack, head_dim=32)


def test_a_read_past_the_row_is_found_at_the_call():
    """Where the format does not know the head dim."""
    given = call_of(cache_formats.int8(32), 0)
    short = CacheFormat(48, lambda row, d: row[d + 17].float())
    with pytest.raises(IndexError, match=r"CacheFormat\.unpack: reads bytes 17 to 48 .* 48 bytes"):
        attention_with_kvcache(**given | {"cache_format": short})


@pytest.mark.parametrize("name", KINDS)
def test_no_tokens(name: str):
    head_dim = 32
    cache_format = KINDS[name].make(head_dim)
    for sizes in ((0,), (2, 0, 1)):
        rows = cache_format.packed(torch.zeros(*sizes, head_dim))
        assert rows.shape == (*sizes, cache_format.bytes_per_row)
        assert cache_format.unpacked(rows, head_dim).shape == (*sizes, head_dim)


def test_bad_rows_and_functions():
    for rows in (torch.zeros(2, 48), torch.zeros(2, 47, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"rows: got .* want torch\.uint8 \(\.\.\., 48\)"):
            INT8.unpacked(rows)
    with pytest.raises(TypeError, match=r"CacheFormat\.unpack: got 5"):
        CacheFormat(48, 5)
    with pytest.raises(TypeError, match=r"CacheFormat\.pack: got 5"):
        CacheFormat(48, INT8.unpack, 5)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "16"])
def test_bad_sizes(size: Any):
    with pytest.raises(ValueError, match=r"CacheFormat\.bytes_per_row"):
        CacheFormat(size, lambda row, d: row[d].float())
    with pytest.raises(ValueError, match=r"CacheFormat\.head_dim"):
        CacheFormat(16, lambda row, d: row[d].float(), head_dim=size)


INT8 = cache_formats.int8(32)
NEW = {"k": torch.zeros(B, 1, HK, 32), "v": torch.zeros(B, 1, HK, 32)}
BAD_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "no format": ("cache_format", {"cache_format": "int8"}),
    "three formats": ("cache_format", {"cache_format": (INT8, INT8, INT8)}),
    "16-bit keys": ("k_cache", {"k_cache": torch.zeros(B, CAPACITY, HK, 48, dtype=torch.half)}),
    "16-bit values": ("v_cache", {"v_cache": torch.zeros(B, CAPACITY, HK, 48, dtype=torch.half)}),
    "rows of 47": ("k_cache", {"k_cache": torch.zeros(B, CAPACITY, HK, 47, dtype=torch.uint8)}),
    "fewer rows": ("v_cache", {"v_cache": torch.zeros(B, 8, HK, 48, dtype=torch.uint8)}),
    "another head dim": ("cache_format", {"q": torch.zeros(B, 3, HQ, 16)}),
    "integer queries": ("q", {"q": torch.zeros(B, 3, HQ, 32, dtype=torch.int32)}),
    "float8 queries": ("q", {"q": torch.zeros(B, 3, HQ, 32).to(torch.float8_e4m3fn)}),
    "no pack": ("CacheFormat.pack", {"cache_format": CacheFormat(48, INT8.unpack)} | NEW),
    "new keys of another dtype": ("k", NEW | {"k": NEW["k"].half()}),
    "a pack that returns floats": (
        "CacheFormat.pack", {"cache_format": CacheFormat(48, INT8.unpack, lambda x: x)} | NEW
    ),
    "a pack of fewer bytes": (
        "CacheFormat.pack",
        {"cache_format": CacheFormat(48, INT8.unpack, lambda x: INT8.pack(x)[..., :5])} | NEW,
    ),
    "qv": ("qv", {"qv": torch.zeros(B, 3, HQ, 32)}),
    "scales": ("k_descale", {"k_descale": torch.ones(B, HK)}),
    "batch_invariant": ("cache_format", {"batch_invariant": True}),
    "statistics": ("return_stats", {"return_stats": ("entropy",)}),
    "a shared prefix": ("cache_format", {"shared_prefix_len": 2}),
    "lists and a shared prefix": (
        "key_blocks",
        {"shared_prefix_len": 2, "key_blocks": torch.zeros(B, 1, 1, 1, dtype=torch.int32),
         "block_size": (16, 16), "cache_format": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name: str):
    argument, change = BAD_CALLS[name]
    given = call_of(INT8, 0) | change
    refuse(attention_with_kvcache, given, argument, [given["k_cache"], given["v_cache"]])


def test_uint8_without_a_format():
    given = call_of(INT8, 0)
    del given["cache_format"]
    refuse(attention_with_kvcache, given, "k_cache", [])


def test_no_derivatives():
    given = call_of(INT8, 0)
    q = given.pop("q")
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(NotImplementedError, match=r"cache_format: .* no derivative"):
            transform(lambda q: attention_with_kvcache(q, **given).sum())(q)
    with pytest.raises(NotImplementedError, match=r"cache_format: .* no derivative"):
        torch.func.jvp(lambda q: attention_with_kvcache(q, **given), (q,), (q,))


def test_other_functions_have_no_format():
    for function in (flashtile.attention, flashtile.attention_varlen):
        with pytest.raises(TypeError, match="cache_format"):
            function(*[torch.zeros(1, 2, 2, 32)] * 3, cache_format=INT8)


def test_flash_attn_with_kvcache(seed: int):
    given = call_of(INT8, seed)
    wanted = attention_with_kvcache(**given)
    assert torch.equal(flashtile.flash_attn_with_kvcache(**given), wanted)


@pytest.mark.parametrize("lengths", list(itertools.product((0, 1, 15), repeat=B)), ids=str)
def test_rows_past_the_length_do_not_matter(lengths: tuple[int, ...], seed: int):
    given = call_of(INT8, seed, cache_seqlens=torch.tensor(lengths, dtype=torch.int32))
    wanted = attention_with_kvcache(**given)
    for b, length in enumerate(lengths):
        given["k_cache"][b, length:] = 255
        given["v_cache"][b, length:] = 255  # a scale of NaN
    assert torch.equal(attention_with_kvcache(**given), wanted)
