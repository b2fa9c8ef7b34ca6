"""`explain` of a function: cached, prefill and float8 calls, and whatever calls attention."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile.call import dispatch
from flashtile.testing import cu_seqlens

q, k, v = (torch.randn(2, 5, heads, 8) for heads in (4, 2, 2))
CACHE = {
    "q": torch.randn(2, 1, 4, 8),
    "k_cache": torch.zeros(6, 4, 2, 8),
    "v_cache": torch.zeros(6, 4, 2, 8),
    "page_table": torch.arange(6, dtype=torch.int32).view(2, 3),
    "cache_seqlens": torch.tensor([3, 5], dtype=torch.int32),
}
NEW = {"k": torch.randn(2, 1, 2, 8), "v": torch.randn(2, 1, 2, 8)}


def test_a_cached_call_appends_nothing():
    tables = {"rotary_cos": torch.ones(12, 4), "rotary_sin": torch.zeros(12, 4)}
    report = flashtile.explain(flashtile.attention_with_kvcache, **CACHE, **NEW, **tables)
    assert report.chosen == "cpu"
    assert (report.problem.page_size, report.problem.N) == (4, 12)
    assert report.steps == ("append the new keys and values to the cache, rotated",)
    assert "first: append" in str(report)
    assert not CACHE["k_cache"].any() and not CACHE["v_cache"].any()


def test_a_cached_call_without_new_tokens_has_no_steps():
    report = flashtile.explain(flashtile.attention_with_kvcache, **CACHE, qv=None)
    assert report.steps == () and "first:" not in str(report)


@pytest.mark.parametrize("paged", [True, False])
def test_prefill_is_explained_as_the_packed_call_that_runs(paged, monkeypatch):
    """Where another backend takes packed sequences, which the decision then names."""
    monkeypatch.setattr(dispatch, "FEWEST_QUERIES", 1)
    monkeypatch.setattr(dispatch, "select", chosen_by_layout)
    cache = dict(CACHE)
    if not paged:
        del cache["page_table"]
        cache |= {"k_cache": torch.zeros(2, 12, 2, 8), "v_cache": torch.zeros(2, 12, 2, 8)}
    report = flashtile.explain(flashtile.attention_with_kvcache, **cache)
    assert (report.chosen, report.problem.layout) == ("triton", "packed")
    how = "gather its pages into" if paged else "view it as"
    assert report.steps == (f"chunked prefill: {how} packed sequences of 12 tokens",)


def chosen_by_layout(problem, name=None):
    return "triton" if problem.layout == "packed" else "cpu"


def test_a_call_in_float8():
    report = flashtile.explain(flashtile.attention_fp8, q, k, v, causal=True)
    assert report.problem.dtype == torch.float8_e4m3fn
    assert report.problem.has_block_descale


def test_functions_that_pass_a_call_on():
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    lengths = (cu_seqlens([5, 5]), cu_seqlens([5, 5]), 5, 5)
    report = flashtile.explain(flashtile.flash_attn_varlen_func, *flat, *lengths, causal=True)
    assert report == flashtile.explain(
        *flat, cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1], max_seqlen_q=5, max_seqlen_k=5,
        causal=True,
    )  # fmt: skip

    def layer(x: torch.Tensor) -> torch.Tensor:
        return flashtile.attention(x, k, v, softcap=2.0) + 1

    assert flashtile.explain(layer, q).problem.options.softcap == 2.0


def test_a_function_that_handles_every_error_ends_at_its_first_call():
    after = []

    def layer(x: torch.Tensor) -> None:
        try:
            flashtile.attention(x, k, v, softcap=3.0)
        except Exception:
            flashtile.attention(x, k, v)
        after.append(x)

    assert flashtile.explain(layer, q).problem.options.softcap == 3.0
    assert not after


def test_the_call_after_an_explained_one_runs():
    want = flashtile.attention(q, k, v, softcap=7.0)
    flashtile.clear_caches()
    for _ in range(2):
        flashtile.explain(q, k, v, softcap=7.0)
        assert torch.equal(flashtile.attention(q, k, v, softcap=7.0), want)
    with pytest.raises(ValueError, match="softcap"):
        flashtile.explain(q, k, v, softcap=-1.0)
    assert torch.equal(flashtile.attention(q, k, v, softcap=7.0), want)


def test_the_errors_are_those_of_the_call():
    with pytest.raises(ValueError, match="cache_seqlens: got None"):
        flashtile.explain(
            flashtile.attention_with_kvcache, **CACHE | {"cache_seqlens": None}, **NEW
        )
    with pytest.raises(ValueError, match="makes no call of attention"):
        flashtile.explain(torch.add, q, q)


def test_a_forced_backend_that_cannot_is_no_error():
    report = flashtile.explain(flashtile.attention_with_kvcache, **CACHE, backend="triton")
    assert report.chosen is None
    with flashtile.backend("triton"):
        assert flashtile.explain(q, k, v).chosen is None


@pytest.mark.parametrize("has_run", [False, True])
def test_a_compiled_function_writes_nothing(has_run):
    compiled = torch.compile(
        lambda *tensors: flashtile.attention_with_kvcache(*tensors, cache_seqlens=2),
        backend="eager",
    )
    q, cache, new = torch.randn(1, 3, 2, 8), torch.zeros(1, 9, 2, 8), torch.randn(1, 3, 2, 8)
    if has_run:
        compiled(q, cache.clone(), cache.clone(), new, new)
    explanation = flashtile.explain(compiled, q, cache, cache, new, new)
    assert explanation.chosen == "cpu"
    assert explanation.steps == ("append the new keys and values to the cache",)
    assert not cache.any()


@pytest.mark.slow
def test_inside_a_compiled_function():
    """The graph ends before `explain`; the call after it is compiled as ever."""

    def function(x):
        x = x * 2
        report = flashtile.explain(flashtile.attention, x, x, x, softcap=3.0)
        return flashtile.attention(x, x, x, softcap=3.0) + 1, report

    compiled = torch.compile(function, backend="eager")
    want, report = function(q)
    for _ in range(2):
        out, explanation = compiled(q)
        assert explanation == report
        assert torch.equal(out, want)
