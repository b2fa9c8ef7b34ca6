"""Small calls whose lengths grow with n, to test PyTorch's transformations of functions."""

from __future__ import annotations

import torch

from flashtile.testing import cu_seqlens, generator, normal, paged, qkv, rotary_tables


def heads_and_lengths(n, dtype=torch.float32):
    """q, k, v whose lengths grow with n."""
    return qkv(generator(n), B=2, M=n, N=n + 3, Hq=4, Hk=2, D=8, dtype=dtype)


def flat(n):
    """Packed q, k, v of two sequences, with their lengths."""
    lengths = [n, n // 2]
    q, k, v = (normal(generator(i), sum(lengths), h, 8) for i, h in enumerate((4, 2, 2)))
    cu = cu_seqlens(lengths)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu}


def same_heads(n, *shape):
    return normal(generator(n), *shape, 4, 8)


def cache_call(n, storage):
    """Append n tokens to a cache of 32 and attend, with rotation."""
    g = generator(n)
    cos, sin = rotary_tables(40, 8)
    call = {
        "q": normal(g, 2, n, 4, 8),
        "k_cache": normal(g, 2, 32, 2, 8),
        "v_cache": normal(g, 2, 32, 2, 8),
        "k": normal(g, 2, n, 2, 8),
        "v": normal(g, 2, n, 2, 8),
        "rotary_cos": cos,
        "rotary_sin": sin,
        "cache_seqlens": torch.tensor([3, 11], dtype=torch.int32),
        "causal": True,
        "return_lse": True,
    }
    if storage == "paged":
        call["k_cache"], call["page_table"] = paged(generator(n), call["k_cache"], 8)
        call["v_cache"], _ = paged(generator(n), call["v_cache"], 8)
        for name in ("k_cache", "v_cache"):
            call[name] = call[name].nan_to_num()
    if storage == "packed":
        call["q"] = call["q"].flatten(0, 1)
        call |= {"cu_seqlens_q": cu_seqlens([n + 1, n - 1]), "max_seqlen_q": n + 1}
    return call


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def assert_same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
