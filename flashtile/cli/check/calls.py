"""The calls to check: every mask, score rule, layout and cache once in each dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from ...call import dispatch
from ...quantize import quantize_qkv
from ...testing import alibi_slopes, cu_seqlens, normal, paged, rotary_tables
from .. import info

# Two or three tiles in each dimension, and a part of one.
B, M, N, HQ, HK, D = 2, 150, 190, 4, 2, 64
LENGTHS_Q, LENGTHS_K = (40, 1, 0, 109), (64, 30, 5, 109)
CAPACITY, PAGE = 192, 16

Arguments = dict[str, Any]
Options = Callable[[Generator, torch.dtype], Arguments]


class Call(NamedTuple):
    """A call with arguments on the CPU."""

    function: str  # name in flashtile
    arguments: Arguments
    leaves: tuple[str, ...] = ()  # names of the arguments whose gradients are checked


Make = Callable[[Generator, torch.dtype], Call]


@dataclass(frozen=True)
class Case:
    """One call of one backend, before its inputs are drawn."""

    name: str
    dtype: str
    backend: str
    make: Make

    def __str__(self) -> str:
        return f"{self.backend} {self.dtype}: {self.name}"


def dense(options: Options, **sizes: int) -> Make:
    """`attention` with `options` for q (B, M, HQ, D) and k, v (B, N, HK, D)."""
    b, m, n, hq, hk, d, dv = ({**SIZES, **sizes}[name] for name in SIZES)

    def make(g: Generator, dtype: torch.dtype) -> Call:
        arguments = {
            "q": normal(g, b, m, hq, d, dtype=dtype),
            "k": normal(g, b, n, hk, d, dtype=dtype),
            "v": normal(g, b, n, hk, dv or d, dtype=dtype),
            **options(g, dtype),
        }
        leaves = ("q", "k", "v", *(x for x in TRAINED if x in arguments))
        return Call("attention", arguments, leaves)

    return make


# Options that have gradients.
TRAINED = ("bias", "relative_bias", "sink")
SIZES = {"b": B, "m": M, "n": N, "hq": HQ, "hk": HK, "d": D, "dv": 0}


def packed(options: Options) -> Make:
    """`attention_varlen` for four sequences, of which one has no query and one a single query."""

    def make(g: Generator, dtype: torch.dtype) -> Call:
        arguments = {
            "q": normal(g, sum(LENGTHS_Q), HQ, D, dtype=dtype),
            "k": normal(g, sum(LENGTHS_K), HK, D, dtype=dtype),
            "v": normal(g, sum(LENGTHS_K), HK, D, dtype=dtype),
            "cu_seqlens_q": cu_seqlens([*LENGTHS_Q]),
            "cu_seqlens_k": cu_seqlens([*LENGTHS_K]),
            "max_seqlen_q": max(LENGTHS_Q),
            "max_seqlen_k": max(LENGTHS_K),
            **options(g, dtype),
        }
        return Call("attention_varlen", arguments, ("q", "k", "v"))

    return make


def cached(
    tokens: int, *, new: bool = False, rotary: bool = False, pages: bool = False, fp8: bool = False
) -> Make:
    """`attention_with_kvcache` with `tokens` queries for sequences of three lengths."""

    def make(g: Generator, dtype: torch.dtype) -> Call:
        q = normal(g, 3, tokens, HQ, D, dtype=dtype)
        caches = [normal(g, 3, CAPACITY, HK, D, dtype=dtype) for _ in range(2)]
        arguments: Arguments = {"causal": True}
        if fp8:
            caches = [x.to(torch.float8_e4m3fn) for x in caches]
        if pages:
            table_seed = int(torch.randint(2**31, (), generator=g))
            both = [paged(Generator().manual_seed(table_seed), x, PAGE) for x in caches]
            caches, arguments["page_table"] = [x for x, _ in both], both[0][1]
        if new:
            arguments["k"], arguments["v"] = (
                normal(g, 3, tokens, HK, D, dtype=dtype) for _ in range(2)
            )
        if rotary:
            cos, sin = rotary_tables(CAPACITY, D, dtype)
            arguments |= {"rotary_cos": cos, "rotary_sin": sin}
        arguments["cache_seqlens"] = torch.tensor([130, 0, 77], dtype=torch.int32)
        named = {"q": q, "k_cache": caches[0], "v_cache": caches[1], **arguments}
        return Call("attention_with_kvcache", named)

    return make


def in_float8(**options: Any) -> Make:
    """`attention` on the results of `quantize_qkv`, forward only."""

    def make(g: Generator, dtype: torch.dtype) -> Call:
        q = normal(g, B, 144, HQ, 128, dtype=torch.bfloat16)
        k, v = (normal(g, B, 192, HK, 128, dtype=torch.bfloat16) for _ in range(2))
        small = quantize_qkv(q, k, v)
        names = ("q", "k", "v", "q_descale", "k_descale", "v_descale")
        return Call("attention", {name: getattr(small, name) for name in names} | options)

    return make


def _given(**options: Any) -> Options:
    return lambda g, dtype: options


def _bent(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A score function that reads the score, its head and its distance."""
    return score + 0.1 * score * score - (h + 1) * (i - j).abs() / 64


def _used(g: Generator, longest: int) -> Tensor:
    return torch.randint(0, longest + 1, (B,), generator=g, dtype=torch.int32)


def _visible(g: Generator, dtype: torch.dtype) -> Arguments:
    """A block mask as a dense matrix, with empty, full and partial tiles."""
    mask = torch.rand(M, N, generator=g) < 0.5
    mask[:64, :64], mask[:64, 64:128], mask[64:128, :64] = True, False, True
    return {"block_mask": mask}


PLAIN: dict[str, Make] = {
    "full": dense(_given()),
    "causal": dense(_given(causal=True)),
}
CORE: dict[str, Make] = {
    "sliding window": dense(_given(causal=True, window_size=(37, 0))),
    "softcap": dense(_given(causal=True, softcap=1.5)),
    "bias": dense(lambda g, t: {"bias": normal(g, 1, HQ, M, N, dtype=t)}),
    "dropout": dense(_given(dropout_p=0.2)),
    "block mask": dense(_visible),
    "packed, causal": packed(_given(causal=True)),
    "cache, decoding": cached(1),
    "cache, append with rotary into pages": cached(3, new=True, rotary=True, pages=True),
}
ADDITIONAL: dict[str, Make] = {
    "window on both sides": dense(_given(window_size=(20, 33))),
    "chunked attention": dense(_given(attention_chunk=48)),
    "ALiBi": dense(lambda g, t: {"causal": True, "alibi_slopes": alibi_slopes(g, HQ)}),
    "relative bias": dense(
        lambda g, t: {
            "relative_bias": normal(g, HQ, 65, dtype=torch.promote_types(t, torch.float32))
        }
    ),
    "attention sink": dense(
        lambda g, t: {"sink": normal(g, HQ, dtype=torch.promote_types(t, torch.float32))}
    ),
    "score function": dense(_given(causal=True, score_mod=_bent)),
    "dropout with softcap": dense(_given(dropout_p=0.2, softcap=1.5)),
    "used lengths": dense(lambda g, t: {"seqused_q": _used(g, M), "seqused_k": _used(g, N)}),
    "multi-query": dense(_given(causal=True), hk=1),
    "more queries than keys, causal": dense(_given(causal=True), m=N, n=M),
    "one query": dense(_given(), m=1),
    "head dim 128": dense(_given(causal=True), d=128),
    "head dim 256": dense(_given(causal=True), d=256, hq=2, hk=1),
    "head dim 40, value head dim 24": dense(_given(), d=40, dv=24),
    "packed, window and ALiBi": packed(
        lambda g, t: {"window_size": (30, 5), "alibi_slopes": alibi_slopes(g, HQ)}
    ),
    "packed, dropout": packed(_given(dropout_p=0.2)),
    "cache, pages": cached(1, pages=True),
    "cache, append": cached(5, new=True),
}
BFLOAT16: dict[str, Make] = {"cache in float8": cached(1, fp8=True)}
FLOAT8: dict[str, Make] = {
    "full": in_float8(),
    "causal": in_float8(causal=True),
}


def cases(device: str, quick: bool) -> list[Case]:
    """The cases of every backend that works on `device`, the preferred backend first."""
    options = PLAIN | CORE | ({} if quick else ADDITIONAL)
    by_dtype = {"bfloat16": options, "float32": PLAIN if quick else options}
    if not quick:
        by_dtype["bfloat16"] = options | BFLOAT16
        by_dtype |= {"float16": PLAIN, "float64": PLAIN}
    by_dtype["float8_e4m3fn"] = FLOAT8
    supported = {name: info.support(name, device)["dtypes"] for name in dispatch.ORDER}
    return [
        Case(name, dtype, backend, make)
        for backend, dtypes in supported.items()
        for dtype, makes in by_dtype.items()
        if dtype in dtypes
        for name, make in makes.items()
    ]
