"""One call of attention over a cache, judged with the caches' contents."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.testing import (
    assert_close,
    attention_with_kvcache_reference,
    generator,
    normal,
    paged,
    plain_dtype,
)

from .harness import Options, Sizes, judge_outputs, packed_spans, resolve, split_options

B, CAPACITY = 3, 32


@dataclass
class Cache:
    """Random arguments of one call; `filled` tokens of each row are real, the others NaN."""

    seed: int
    dtype: torch.dtype = torch.float32
    filled: tuple[int, ...] = (5, 0, 20)
    M: int = 3
    Hq: int = 4
    Hk: int = 2
    D: int = 16
    Dv: int | None = None
    rows: int = B
    call: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.g = generator(self.seed)
        Dv = self.D if self.Dv is None else self.Dv
        self.q = normal(self.g, B, self.M, self.Hq, self.D, dtype=self.dtype)
        self.k_cache = normal(self.g, self.rows, CAPACITY, self.Hk, self.D, dtype=self.dtype)
        self.v_cache = normal(self.g, self.rows, CAPACITY, self.Hk, Dv, dtype=self.dtype)
        self.seqlens = torch.tensor(self.filled, dtype=torch.int32)
        if self.rows == B:
            for b, n in enumerate(self.filled):
                self.k_cache[b, n:], self.v_cache[b, n:] = torch.nan, torch.nan

    def new_tokens(self, count: int | None = None) -> dict[str, Tensor]:
        """k, v (B, count, Hk, ...), or packed (count, Hk, ...) when the lengths are in the call."""
        lead = (B, self.M) if count is None else (count,)
        Dv = self.v_cache.shape[-1]
        return {
            "k": normal(self.g, *lead, self.Hk, self.D, dtype=self.dtype),
            "v": normal(self.g, *lead, self.Hk, Dv, dtype=self.dtype),
        }

    def to_pages(self, page_size: int, shared: int = 0) -> None:
        seed = self.seed + 7
        if shared:
            for cache in (self.k_cache, self.v_cache):
                cache[:, : shared * page_size] = cache[-1:, : shared * page_size].clone()
        self.k_cache, table = paged(generator(seed), self.k_cache, page_size, shared=shared)
        self.v_cache, _ = paged(generator(seed), self.v_cache, page_size, shared=shared)
        self.call["page_table"] = table

    def share_prefix(self, length: int) -> None:
        """All rows begin with the tokens of the last one, which are real."""
        for cache in (self.k_cache, self.v_cache):
            cache[:, :length] = cache[-1:, :length].clone()
        self.call["shared_prefix_len"] = length

    def to_float8(self, factors: bool = True) -> None:
        """Both caches in float8, with a factor for each sequence and head. Powers of two: dividing
        by them is exact."""
        self.k_cache, self.v_cache = (
            x.to(torch.float8_e4m3fn) for x in (self.k_cache, self.v_cache)
        )
        if factors:
            for name in ("k_descale", "v_descale"):
                power = torch.randint(-3, 3, (B, self.Hk), generator=self.g)
                self.call[name] = torch.exp2(power.float())

    def check(self, backend: str, **call: Any) -> None:
        """Call the function on copies of the caches and check all results and caches."""
        call = self.call | call
        call.setdefault("cache_seqlens", self.seqlens)
        names: Options = call.pop("options", "nothing")
        s = Sizes(B=B, M=call.get("max_seqlen_q", self.M), N=CAPACITY, Hq=self.Hq, Hk=self.Hk)
        made = resolve(names, self.g, s, self.dtype)
        if "mask" in made and "cu_seqlens_q" in call:
            made["mask"] = packed_spans(made["mask"], call["cu_seqlens_q"].diff().tolist())
        options, for_reference, leaves = split_options(made)
        args = (self.q, self.k_cache, self.v_cache)
        q, k_cache, v_cache = (x.clone() for x in args)
        out, lse = flashtile.attention_with_kvcache(
            q, k_cache, v_cache, **call, **options, **leaves, return_lse=True, backend=backend
        )
        for changes_no_result in ("num_splits", "shared_prefix_len"):
            call.pop(changes_no_result, None)
        assert torch.equal(q, self.q)
        assert out.dtype == self.dtype
        reference = partial(
            attention_with_kvcache_reference, *args, **call, **for_reference, **leaves
        )
        judge_outputs({"out": out, "lse": lse}, reference, self.dtype, self.seed)
        truth, plain = (
            reference(compute_dtype=t) for t in (torch.float64, plain_dtype(self.dtype))
        )
        for name, got in (("k_cache", k_cache), ("v_cache", v_cache)):
            wanted, before = getattr(truth, name), getattr(self, name).double()
            assert got.dtype == getattr(self, name).dtype
            got = got.double()
            kept = (wanted == before) | (wanted.isnan() & before.isnan())
            assert torch.equal(got[kept].nan_to_num(nan=7e4), before[kept].nan_to_num(nan=7e4)), (
                f"{name} changed where it should not (seed {self.seed})"
            )
            rough = getattr(plain, name)[~kept]
            written = got[~kept]
            assert_close(name, written, wanted[~kept], rough, dtype=self.dtype, seed=self.seed)
