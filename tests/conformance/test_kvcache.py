"""Attention over a key-value cache: append, rotation, pages, rows, left pads, packed queries.

Every case compares the output, the LSE and the caches' contents: written slots are checked by the
rule, all others must keep their bits. Empty slots hold NaN.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flashtile
from flashtile.problem import FLOAT8
from flashtile.testing import (
    DTYPES,
    attention_with_kvcache_reference,
    cu_seqlens,
    normal,
    rotary_tables,
)

from .caches import CAPACITY, B, Cache
from .harness import judge_outputs

pytestmark = pytest.mark.usefixtures("poisoned_buffers")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
class TestEveryDtype:
    def test_read(self, dtype, backend, seed):
        Cache(seed, dtype).check(backend)

    def test_append(self, dtype, backend, seed):
        c = Cache(seed, dtype)
        c.check(backend, **c.new_tokens(), causal=True)

    @pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
    def test_rotary(self, dtype, interleaved, backend, seed):
        c = Cache(seed, dtype)
        cos, sin = rotary_tables(CAPACITY + 3, 16, dtype)
        rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        c.check(backend, **c.new_tokens(), **rotary, causal=True)

    def test_pages(self, dtype, backend, seed):
        c = Cache(seed, dtype)
        c.to_pages(8)
        c.check(backend, **c.new_tokens(), causal=True)


OPTIONS = (
    "nothing",
    "scale",
    "causal",
    "window",
    "causal window",
    "chunk",
    "softcap",
    "alibi",
    "alibi for each batch",
    "bias",
    "bias for each key",
    "causal + relative bias",
    "relative bias of all distances",
    "sink",
    "block mask",
    "block mask with partial tiles",
    "span",
    "spans for each batch",
    "causal + spans for each batch and head",
    "causal window + softcap + alibi + bias + sink + block mask",
)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("storage", ["contiguous", "paged", "left pad", "rows"])
def test_options(options, storage, backend, seed):
    c = Cache(seed, rows=5 if storage == "rows" else B)
    if storage == "paged":
        c.to_pages(4)
    if storage == "left pad":
        c.call["cache_leftpad"] = torch.tensor([2, 0, 11], dtype=torch.int32)
    if storage == "rows":
        c.call["cache_batch_idx"] = torch.tensor([4, 0, 2], dtype=torch.int32)
    c.check(backend, **c.new_tokens(), options=options)


@pytest.mark.parametrize("options", ["nothing", "causal", "softcap"])
def test_one_query(options, backend, seed):
    c = Cache(seed, M=1)
    c.check(backend, **c.new_tokens(), options=options)


@pytest.mark.parametrize("length", [0, 1, 17, CAPACITY])
def test_cache_seqlens_as_an_int(length, backend, seed):
    Cache(seed, filled=(length,) * B).check(backend, cache_seqlens=length)


def test_cache_seqlens_as_a_tensor_of_one_number(backend, seed):
    Cache(seed, filled=(17,) * B).check(backend, cache_seqlens=torch.tensor(17))


@pytest.mark.parametrize("storage", ["contiguous", "paged", "left pad"])
def test_without_cache_seqlens_the_whole_cache_counts(storage, backend, seed):
    c = Cache(seed, filled=(CAPACITY,) * B)
    if storage == "paged":
        c.to_pages(8)
    if storage == "left pad":
        c.call["cache_leftpad"] = torch.tensor([2, 0, 11], dtype=torch.int32)
    c.check(backend, cache_seqlens=None)


def test_append_up_to_the_capacity(backend, seed):
    c = Cache(seed, filled=(CAPACITY - 3, 0, 1))
    c.check(backend, **c.new_tokens(), causal=True)


@pytest.mark.parametrize("storage", ["contiguous", "paged"])
@pytest.mark.parametrize("new", [False, True], ids=["read", "append"])
def test_a_left_pad_as_long_as_the_sequence_leaves_nothing_to_see(new, storage, backend, seed):
    """Among them one as long as the whole cache: out is 0 and LSE is -inf, without any key."""
    count = 3 if new else 0
    c = Cache(seed, filled=(5, 0, CAPACITY - count))
    if storage == "paged":
        c.to_pages(4)
    c.call["cache_leftpad"] = c.seqlens + count
    c.check(backend, **(c.new_tokens() if new else {}), options="causal")


@pytest.mark.parametrize("storage", ["contiguous", "rows", "paged"])
def test_no_sequences(storage, backend, seed):
    """A batch of 0 appends nothing and leaves the cache as it is."""
    c = Cache(seed)
    if storage == "paged":
        c.to_pages(4)
        call = {"page_table": torch.zeros(0, 8).int()}
    else:
        call = {"cache_batch_idx": torch.zeros(0).int()} if storage == "rows" else {}
    rows = slice(0, 0 if storage == "contiguous" else None)
    caches = [x[rows].clone() for x in (c.k_cache, c.v_cache)]
    new = {name: x[:0] for name, x in c.new_tokens().items()}
    new["rotary_cos"], new["rotary_sin"] = rotary_tables(CAPACITY + 3, 16)
    out, lse = flashtile.attention_with_kvcache(
        c.q[:0], *caches, **new, **call, cache_seqlens=c.seqlens[:0], return_lse=True,
        backend=backend,
    )  # fmt: skip
    assert (out.shape, lse.shape) == ((0, 3, 4, 16), (0, 4, 3))
    for cache, before in zip(caches, (c.k_cache, c.v_cache), strict=True):
        assert torch.equal(cache.nan_to_num(7e4), before[rows].nan_to_num(7e4))


def test_grouped_heads_and_another_value_head_dim(backend, seed):
    c = Cache(seed, Hq=6, Hk=1, D=20, Dv=33)
    c.check(backend, **c.new_tokens(), causal=True)


def test_more_queries_than_new_tokens_may_see_nothing(backend, seed):
    """Five queries over a cache of 1, 0 and 9 tokens: rows without keys come first."""
    Cache(seed, M=5, filled=(1, 0, 9)).check(backend, causal=True)


@pytest.mark.parametrize("num_splits", [0, 1, 2, 7])
def test_num_splits_changes_nothing(num_splits, backend, seed):
    c = Cache(seed)
    c.check(backend, **c.new_tokens(), num_splits=num_splits)


class TestRotary:
    cos, sin = rotary_tables(CAPACITY + 8, 16)

    def check(self, backend, c, **call):
        rotary = {"rotary_cos": self.cos, "rotary_sin": self.sin}
        c.check(backend, **c.new_tokens(), **(rotary | call))

    @pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
    @pytest.mark.parametrize("options", ["nothing", "causal", "window", "chunk", "causal window"])
    def test_queries_rotate_where_the_mask_orders_them(self, interleaved, options, backend, seed):
        self.check(backend, Cache(seed), rotary_interleaved=interleaved, options=options)

    @pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
    def test_part_of_the_head_dim(self, interleaved, backend, seed):
        self.check(backend, Cache(seed, D=40), rotary_interleaved=interleaved, causal=True)

    def test_a_table_of_one_position(self, backend, seed):
        c = Cache(seed, M=1, filled=(0,) * B)
        cos, sin = self.cos[:1], self.sin[:1]
        self.check(backend, c, rotary_cos=cos, rotary_sin=sin, causal=True)

    def test_rotary_seqlens_give_other_positions(self, backend, seed):
        positions = torch.tensor([7, 1, 30], dtype=torch.int32)
        self.check(backend, Cache(seed), rotary_seqlens=positions, causal=True)

    def test_with_a_left_pad_positions_count_the_pad(self, backend, seed):
        pad = torch.tensor([3, 0, 9], dtype=torch.int32)
        self.check(backend, Cache(seed), cache_leftpad=pad, causal=True)

    @pytest.mark.parametrize("page_size", [1, 16])
    def test_pages(self, page_size, backend, seed):
        c = Cache(seed)
        c.to_pages(page_size)
        self.check(backend, c, causal=True)


class TestPages:
    @pytest.mark.parametrize("page_size", [1, 2, 3, 16, 24, 32, 48])
    def test_sizes(self, page_size, backend, seed):
        c = Cache(seed)
        c.to_pages(page_size)
        c.check(backend, **c.new_tokens(), causal=True)

    @pytest.mark.parametrize("page_size", [3, 8])
    @pytest.mark.parametrize("rotary", [False, True], ids=["as they are", "rotary"])
    def test_rows_of_the_table_are_chosen(self, page_size, rotary, backend, seed):
        c = Cache(seed)
        c.to_pages(page_size)
        chosen = torch.tensor([3, 0, 4])
        table = torch.full((6, c.call["page_table"].shape[1]), -1, dtype=torch.int32)
        table[chosen] = c.call["page_table"]
        call = {"page_table": table, "cache_batch_idx": chosen.int()}
        if rotary:
            call["rotary_cos"], call["rotary_sin"] = rotary_tables(CAPACITY + 3, 16)
        c.check(backend, **c.new_tokens(), **call, causal=True)

    @pytest.mark.parametrize("shape", [(0, 8), (5, 8)], ids=["no pages", "no columns"])
    def test_without_pages_nothing_is_seen(self, shape, backend, seed):
        c = Cache(seed, filled=(0, 0, 0))
        pages, size = shape
        caches = [c.k_cache.new_zeros(pages, size, c.Hk, c.D) for _ in "kv"]
        table = torch.zeros(B, 2 if pages == 0 else 0, dtype=torch.int32)
        call = {"page_table": table, "backend": backend}
        for lengths in (c.seqlens, None):  # None is a full cache
            out, lse = flashtile.attention_with_kvcache(
                c.q, *caches, cache_seqlens=lengths, return_lse=True, **call
            )
            assert not out.any()
            assert (lse == -torch.inf).all()
        with pytest.raises(ValueError, match="got 1 and 0 new tokens, want at most 0"):
            flashtile.attention_with_kvcache(c.q, *caches, cache_seqlens=1, **call)

    def test_a_page_of_256(self, backend, seed):
        c = Cache(seed)
        padding = (0, 0, 0, 0, 0, 256 - CAPACITY)
        c.k_cache, c.v_cache = (
            torch.nn.functional.pad(x, padding, value=torch.nan) for x in (c.k_cache, c.v_cache)
        )
        c.to_pages(256)
        c.check(backend, **c.new_tokens(), causal=True)

    def test_a_shared_prefix(self, backend, seed):
        c = Cache(seed, filled=(16, 19, 30))
        c.k_cache[2, :16] = normal(c.g, 16, 2, 16)
        c.v_cache[2, :16] = normal(c.g, 16, 2, 16)
        c.to_pages(8, shared=2)
        c.check(backend, causal=True)

    def test_table_entries_past_the_length_are_never_followed(self, backend, seed):
        c = Cache(seed)
        c.to_pages(4)
        last = (c.seqlens + 3 + 3) // 4
        unused = torch.arange(8)[None] >= last[:, None]
        c.call["page_table"] = c.call["page_table"].masked_fill(unused, -1)
        c.check(backend, **c.new_tokens(), causal=True)


class TestRows:
    def test_append_through_cache_batch_idx(self, backend, seed):
        c = Cache(seed, rows=7)
        c.call["cache_batch_idx"] = torch.tensor([6, 1, 3], dtype=torch.int32)
        c.check(backend, **c.new_tokens(), causal=True)

    def test_two_sequences_read_one_row(self, backend, seed):
        c = Cache(seed, rows=2)
        c.check(backend, cache_batch_idx=torch.tensor([1, 0, 1], dtype=torch.int32))

    def test_rows_with_a_left_pad(self, backend, seed):
        c = Cache(seed, rows=4)
        c.call["cache_batch_idx"] = torch.tensor([3, 0, 2], dtype=torch.int32)
        c.call["cache_leftpad"] = torch.tensor([5, 0, 1], dtype=torch.int32)
        c.check(backend, **c.new_tokens(), causal=True)


class TestPackedQueries:
    lengths = (4, 0, 2)

    def packed(self, seed, **how):
        c = Cache(seed, M=4, **how)
        c.q = normal(c.g, sum(self.lengths), c.Hq, c.D)
        c.call |= {"cu_seqlens_q": cu_seqlens(list(self.lengths)), "max_seqlen_q": 4}
        return c

    @pytest.mark.parametrize("options", ["nothing", "causal", "softcap + sink", "alibi"])
    def test_read(self, options, backend, seed):
        self.packed(seed, filled=(5, 3, 20)).check(backend, options=options)

    def test_pages(self, backend, seed):
        c = self.packed(seed, filled=(5, 3, 20))
        c.to_pages(8)
        c.check(backend, causal=True)

    @pytest.mark.parametrize("new", [(4, 0, 2), (1, 3, 0)], ids=str)
    @pytest.mark.parametrize("storage", ["contiguous", "paged"])
    def test_append_packed_tokens(self, new, storage, backend, seed):
        c = self.packed(seed)
        if storage == "paged":
            c.to_pages(8)
        c.check(
            backend, **c.new_tokens(sum(new)), cu_seqlens_k_new=cu_seqlens(list(new)), causal=True
        )

    @pytest.mark.parametrize("storage", ["contiguous", "paged"])
    def test_tokens_of_no_sequence_are_not_stored(self, storage, backend, seed):
        """A packed buffer may be longer than its sequences."""
        c = self.packed(seed)
        if storage == "paged":
            c.to_pages(8)
        new = c.new_tokens(8)
        call = c.call | {"cu_seqlens_k_new": cu_seqlens([4, 0, 2]), "cache_seqlens": c.seqlens}
        stored = []
        for used in (6, 8):
            caches = [c.k_cache.clone(), c.v_cache.clone()]
            tokens = {name: x[:used] for name, x in new.items()}
            flashtile.attention_with_kvcache(c.q, *caches, **tokens, **call, backend=backend)
            stored.append([x.nan_to_num(nan=7e4) for x in caches])
        for wanted, got in zip(*stored, strict=True):
            assert torch.equal(got, wanted)

    def test_rotary(self, backend, seed):
        c = self.packed(seed)
        cos, sin = rotary_tables(CAPACITY + 8, 16)
        new = {**c.new_tokens(6), "cu_seqlens_k_new": cu_seqlens([4, 0, 2])}
        c.check(backend, **new, rotary_cos=cos, rotary_sin=sin, causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
class TestFloat8:
    """A float8 cache under queries of 16 bits."""

    @pytest.mark.parametrize("factors", [True, False], ids=["factors", "as it is"])
    @pytest.mark.parametrize("options", ["nothing", "causal window + softcap + sink", "alibi"])
    def test_read(self, options, factors, dtype, backend, seed):
        c = Cache(seed, dtype)
        c.to_float8(factors)
        c.check(backend, options=options)

    @pytest.mark.parametrize("factors", [True, False], ids=["factors", "as it is"])
    @pytest.mark.parametrize("storage", ["contiguous", "paged"])
    def test_append(self, storage, factors, dtype, backend, seed):
        """Some new tokens are larger than the largest float8 number."""
        c = Cache(seed, dtype)
        if storage == "paged":
            c.to_pages(8)
        c.to_float8(factors)
        new = c.new_tokens()
        new["v"][0, 0] *= 1000
        c.check(backend, **new, causal=True)

    @pytest.mark.parametrize("rotary", [False, True], ids=["as they are", "rotary"])
    def test_append_saturates(self, rotary, dtype, backend, seed):
        """Keys and values too large for the cache become its largest number, of either sign. The
        division by the scale comes first: numbers that then fit are not clamped."""
        c = Cache(seed, dtype)
        c.to_float8(factors=False)
        c.call |= dict.fromkeys(("k_descale", "v_descale"), torch.full((B, c.Hk), 4.0))
        new = c.new_tokens()
        if rotary:  # rotation by the angle 0
            tables = torch.ones(CAPACITY + 3, 8), torch.zeros(CAPACITY + 3, 8)
            new["rotary_cos"], new["rotary_sin"] = (x.to(dtype) for x in tables)
        for name in "kv":
            new[name][0, 0, 0] = 2 * 4 * 448
            new[name][1, 2, 1] = -3 * 4 * 448
            new[name][2, 1, 0] = 4 * 416
        caches = [c.k_cache.clone(), c.v_cache.clone()]
        flashtile.attention_with_kvcache(
            c.q, *caches, **new, **c.call, cache_seqlens=c.seqlens, backend=backend
        )
        for cache in caches:
            assert (cache[0, 5, 0].float() == 448).all()
            assert (cache[1, 2, 1].float() == -448).all()
            assert (cache[2, 21, 0].float() == 416).all()

    def test_rotary_rotates_before_it_rounds(self, dtype, backend, seed):
        """By angles of 0 and pi, at which the rotation itself does not round."""
        c = Cache(seed, dtype)
        c.to_float8()
        cos = 1 - 2 * (torch.arange(CAPACITY + 3) % 2).to(dtype)[:, None].expand(-1, 8)
        c.check(backend, **c.new_tokens(), rotary_cos=cos, rotary_sin=0 * cos, causal=True)


@pytest.mark.parametrize("stored", FLOAT8, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_op_saturates_whatever_a_cast_does(dtype, stored):
    """PyTorch's cast to e4m3 saturates in new releases and gives NaN in old ones; to e5m2 it gives
    infinity in all of them. The op clamps both, and NaN stays NaN."""
    given = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.0], dtype=dtype)
    largest = torch.finfo(stored).max
    new = given.expand(1, 1, 1, 4)
    caches = [torch.zeros(1, 2, 1, 4).to(stored) for _ in "kv"]
    torch.ops.flashtile.kvcache_append(*caches, new, new, torch.tensor([1]).int(), *[None] * 5)
    for cache in caches:
        got = cache.float()
        assert got[0, 1, 0].tolist() == pytest.approx(
            [largest, -largest, torch.nan, 3], nan_ok=True
        )
        assert not got[0, 0].any()


class TestLatentKeys:
    """DeepSeek's MLA: one key head of 576 columns, of which the first 512 are the values too."""

    @pytest.mark.parametrize("page_size", [0, 8])
    def test_read(self, page_size, backend, seed):
        c = Cache(seed, M=2, Hq=5, Hk=1, D=576, Dv=512)
        if page_size:
            c.to_pages(page_size)
        c.check(backend, **c.new_tokens(), causal=True)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_values_may_be_a_view_of_the_keys(self, dtype, backend, seed):
        c = Cache(seed, dtype, M=2, Hq=5, Hk=1, D=576)
        k = c.new_tokens()["k"]
        values = (c.k_cache[..., :512], k[..., :512])
        call = {"cache_seqlens": c.seqlens, "causal": True}
        keys = c.k_cache.clone()
        out, lse = flashtile.attention_with_kvcache(
            c.q, keys, keys[..., :512], k, values[1], **call, return_lse=True, backend=backend
        )
        assert torch.equal(keys[2, 20:22], k[2])
        copies = (c.k_cache.clone(), values[0].contiguous())
        of_copies = flashtile.attention_with_kvcache(
            c.q, *copies, k, values[1].contiguous(), **call, backend=backend
        )
        assert torch.equal(copies[0][2, 20:22], k[2])
        assert torch.equal(copies[1][2, 20:22], values[1][2])
        if backend == "cpu":  # on a GPU, views have tiles of their own
            assert torch.equal(out, of_copies)
        reference = partial(
            attention_with_kvcache_reference, c.q, c.k_cache, values[0], k, values[1], **call
        )
        judge_outputs({"out": out, "lse": lse}, reference, dtype, seed)


def test_out_is_written_in_place(backend, seed):
    c = Cache(seed)
    args = (c.q, c.k_cache, c.v_cache)
    wanted = flashtile.attention_with_kvcache(*args, cache_seqlens=c.seqlens, backend=backend)
    out = torch.full_like(wanted, torch.nan)
    given = flashtile.attention_with_kvcache(
        *args, cache_seqlens=c.seqlens, out=out, backend=backend
    )
    assert given is out
    assert torch.equal(out, wanted)


def test_a_sequence_does_not_depend_on_the_batch_around_it(backend, seed):
    """`num_splits=1` makes decode independent of the batch, to the last bit."""
    c = Cache(seed, M=1, filled=(20, 31, 7))
    call = {"cache_seqlens": c.seqlens, "causal": True, "num_splits": 1, "backend": backend}
    together = flashtile.attention_with_kvcache(c.q, c.k_cache, c.v_cache, **call)
    for b in range(B):
        one = slice(b, b + 1)
        call["cache_seqlens"] = c.seqlens[one]
        alone = flashtile.attention_with_kvcache(c.q[one], c.k_cache[one], c.v_cache[one], **call)
        assert torch.equal(alone, together[one])
