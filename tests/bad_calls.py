"""Good calls that tests make invalid, and the check of the resulting error."""

from __future__ import annotations

import re

import pytest
import torch

from flashtile.testing import cu_seqlens, generator, normal, packed_qkv, qkv

ERRORS = (ValueError, TypeError, NotImplementedError)


def refuse(function, call, argument, untouched):
    """Call, and expect an error that names `argument` and leaves `untouched` unchanged."""
    before = [x.clone() for x in untouched]
    state = torch.get_rng_state()
    with pytest.raises(ERRORS) as caught:
        function(**call)
    message = str(caught.value)
    assert re.search(rf"\b{argument}\b", message), f"{argument!r} is not named in: {message}"
    for x, old in zip(untouched, before, strict=True):
        assert torch.equal(x.double().nan_to_num(nan=7.0), old.double().nan_to_num(nan=7.0))
    assert torch.equal(torch.get_rng_state(), state)


def dense():
    q, k, v = qkv(generator(0), B=2, M=5, N=7, Hq=4, Hk=2, D=8)
    return {"q": q, "k": k, "v": v, "dropout_p": 0.5, "out": torch.full((2, 5, 4, 8), torch.nan)}


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def packed():
    q, k, v = packed_qkv(generator(0), [3, 2], [4, 3], Hq=4, Hk=2, D=8)
    return {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": cu_seqlens([3, 2]),
        "cu_seqlens_k": cu_seqlens([4, 3]),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
        "dropout_p": 0.5,
        "out": torch.full((5, 4, 8), torch.nan),
    }


def tensor(*values):
    return torch.tensor(values, dtype=torch.int32)


def cache():
    g = generator(0)
    return {
        "q": normal(g, 2, 3, 4, 8),
        "k_cache": normal(g, 4, 16, 2, 8),
        "v_cache": normal(g, 4, 16, 2, 8),
        "k": normal(g, 2, 3, 2, 8),
        "v": normal(g, 2, 3, 2, 8),
        "cache_seqlens": tensor(5, 9),
        "causal": True,
        "out": torch.full((2, 3, 4, 8), torch.nan),
    }
