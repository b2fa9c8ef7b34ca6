"""Chunked prefill becomes a packed call for a backend without cached calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import flashtile
from flashtile import backends
from flashtile.backends import cpu
from flashtile.call import dispatch
from flashtile.testing import cu_seqlens, generator, normal, paged

B, M, CAPACITY, HQ, HK, D, DV = 3, 6, 32, 4, 2, 16, 8
FILLED = torch.tensor([5, 0, 20], dtype=torch.int32)


@pytest.fixture
def calls(monkeypatch):
    """The problems that reach a fake backend for packed sequences, which precedes the CPU's."""
    seen = []

    def forward(problem, operands):
        seen.append(problem)
        return cpu.forward(problem, operands)

    def unsupported_reasons(problem):
        return [] if problem.layout == "packed" else ["not packed"]

    names = {"unsupported_reasons": unsupported_reasons, "forward": forward, "defers": None}
    twin = SimpleNamespace(**names)
    monkeypatch.setitem(backends.BACKENDS, "twin", twin)
    monkeypatch.setattr(dispatch, "ORDER", ("twin", "cpu"))
    monkeypatch.setattr(dispatch, "FEWEST_QUERIES", M * HQ // HK)
    flashtile.clear_caches()
    yield seen
    flashtile.clear_caches()


def arguments(seed, storage):
    """A call that appends its tokens; empty slots are NaN."""
    g = generator(seed)
    q, k, v = (normal(g, B, M, *size) for size in ((HQ, D), (HK, D), (HK, DV)))
    caches = [normal(g, B, CAPACITY, HK, size) for size in (D, DV)]
    for cache in caches:
        for b, n in enumerate(FILLED):
            cache[b, n:] = torch.nan
    call = {"q": q, "k": k, "v": v, "cache_seqlens": FILLED, "return_lse": True}
    if storage == "pages":
        (caches[0], call["page_table"]), (caches[1], _) = (
            paged(generator(seed), cache, 8) for cache in caches
        )
        call["page_table"][1, 1:] = -7  # never used
    call |= dict(zip(("k_cache", "v_cache"), caches, strict=True))
    if storage == "packed queries":
        call |= {"q": q.flatten(0, 1)[:9], "cu_seqlens_q": cu_seqlens([6, 0, 3])}
        call |= {"max_seqlen_q": M}
    return call


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (4, 1), "softcap": 2.0}])
@pytest.mark.parametrize("storage", ["rows", "pages", "packed queries"])
def test_the_results_are_those_of_the_cache(storage, options, calls, seed):
    for repeat in range(2):  # the second call is served from the memo
        call = arguments(seed + repeat, storage) | options
        copy = {name: x.clone() if torch.is_tensor(x) else x for name, x in call.items()}
        got = flashtile.attention_with_kvcache(**call)
        found = [(problem.layout, problem.page_size) for problem in calls]
        assert found == [("packed", 0)] * (repeat + 1)
        wanted = flashtile.attention_with_kvcache(**copy, backend="cpu")
        assert len(calls) == repeat + 1
        for x, y in zip(got, wanted, strict=True):
            assert x.shape == y.shape and x.is_contiguous()
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("change", ["few queries", "left pads", "rows apart", "large pages"])
def test_other_calls_stay_as_they_are(change, calls, monkeypatch, seed):
    storage = "pages" if change == "large pages" else "rows"
    if change == "rows apart":  # which are other ones than those that lie side by side
        flashtile.attention_with_kvcache(**arguments(seed, storage))
        assert calls.pop()
    call = arguments(seed, storage)
    if change == "few queries":
        call["q"] = call["q"][:, :5]
    elif change == "left pads":
        call["cache_leftpad"] = torch.zeros(B, dtype=torch.int32)
    elif change == "rows apart":
        spread = torch.stack([call["k_cache"], call["k_cache"]], 1)
        call["k_cache"] = spread[:, 0]
    else:
        monkeypatch.setattr(dispatch, "LARGEST_COPY", 1)
    flashtile.attention_with_kvcache(**call)
    assert not calls
