"""Bad numbers inside of tensors are refused where reading them costs nothing, and do no harm
elsewhere."""

from __future__ import annotations

import pytest
import torch
from bad_calls import cache, packed, refuse, tensor, zeros

import flashtile
from flashtile.testing import rotary_tables

COS, SIN = rotary_tables(32, 8)
ROWS = {"cache_batch_idx": tensor(0, 1)}

# These need to look at values, which waits for the device: only with FLASHTILE_CHECK=1.
PACKED_VALUES = {
    "cu_seqlens_q decreases": ("cu_seqlens_q", {"cu_seqlens_q": tensor(0, 6, 5)}),
    "cu_seqlens_q starts at 1": ("cu_seqlens_q", {"cu_seqlens_q": tensor(1, 3, 5)}),
    "cu_seqlens_k is negative": ("cu_seqlens_k", {"cu_seqlens_k": tensor(0, -1, 7)}),
    "cu_seqlens_k ends past the keys": ("cu_seqlens_k", {"cu_seqlens_k": tensor(0, 4, 8)}),
    "max_seqlen_q is too small": ("max_seqlen_q", {"max_seqlen_q": 2}),
    "max_seqlen_k is too small": ("max_seqlen_k", {"max_seqlen_k": 3}),
    "seqused_k is more than there is": ("seqused_k", {"seqused_k": tensor(5, 3)}),
    "seqused_q is negative": ("seqused_q", {"seqused_q": tensor(-1, 2)}),
}


@pytest.mark.parametrize("case", PACKED_VALUES)
def test_packed_values(case, monkeypatch):
    monkeypatch.setenv("FLASHTILE_CHECK", "1")
    argument, change = PACKED_VALUES[case]
    call = packed() | change
    refuse(flashtile.attention_varlen, call, argument, [call["out"]])


@pytest.mark.parametrize("case", PACKED_VALUES)
def test_packed_values_unchecked_stay_in_bounds(case):
    """Without the check the call runs, and reads and writes inside its tensors alone."""
    _, change = PACKED_VALUES[case]
    call = packed() | change
    whole = torch.full((9, 4, 8), torch.nan)
    call["out"] = whole[2:7]
    flashtile.attention_varlen(**call)
    assert whole[:2].isnan().all()
    assert whole[7:].isnan().all()
    assert call["out"].isfinite().all()


@pytest.mark.parametrize("check", ["1", "0"])
def test_the_check_lets_good_calls_pass(check, monkeypatch):
    monkeypatch.setenv("FLASHTILE_CHECK", check)
    assert flashtile.attention_varlen(**packed()).isfinite().all()
    call = cache() | {"page_table": tensor([0, 1], [2, 3])}
    assert flashtile.attention_with_kvcache(**call).isfinite().all()


CACHE_VALUES = {
    "page_table out of range": ("page_table", {"page_table": tensor([0, 4], [2, 3])}),
    "page_table is negative": ("page_table", {"page_table": tensor([0, 1], [-1, 3])}),
    "cache_batch_idx out of range": ("cache_batch_idx", {"cache_batch_idx": tensor(0, 4)}),
    "cache_batch_idx is negative": ("cache_batch_idx", {"cache_batch_idx": tensor(-1, 2)}),
    "cache_leftpad is negative": ("cache_leftpad", ROWS | {"cache_leftpad": tensor(-1, 0)}),
    "cache_seqlens past the capacity": ("cache_seqlens", ROWS | {"cache_seqlens": tensor(5, 15)}),
    "cache_seqlens is negative": ("cache_seqlens", ROWS | {"cache_seqlens": tensor(-4, 5)}),
    "cu_seqlens_k_new ends past k": (
        "cu_seqlens_k_new",
        ROWS | {"k": zeros(4, 2, 8), "v": zeros(4, 2, 8), "cu_seqlens_k_new": tensor(0, 2, 9)},
    ),
    "rotary_cos is too short": (
        "rotary_cos",
        ROWS | {"rotary_cos": COS[:6], "rotary_sin": SIN[:6]},
    ),
}


@pytest.mark.parametrize("case", CACHE_VALUES)
def test_cache_values(case, monkeypatch):
    monkeypatch.setenv("FLASHTILE_CHECK", "1")
    argument, change = CACHE_VALUES[case]
    call = cache() | change
    if "page_table" in change:
        call["cache_seqlens"] = tensor(14, 14)  # with 3 new tokens: two pages each
    untouched = [call[n] for n in ("k_cache", "v_cache", "out")]
    refuse(flashtile.attention_with_kvcache, call, argument, untouched)


@pytest.mark.parametrize("case", [c for c in CACHE_VALUES if "rotary" not in c])
def test_cache_values_unchecked_stay_in_bounds(case):
    """Without the check, wrong values write inside the cache alone."""
    _, change = CACHE_VALUES[case]
    call = cache() | change
    store = torch.zeros(6, 16, 2, 8)
    for name in ("k_cache", "v_cache"):
        whole = store.clone()
        whole[1:5] = call[name]
        call[name] = whole[1:5]
    flashtile.attention_with_kvcache(**call)
    for name in ("k_cache", "v_cache"):
        whole = call[name]._base
        assert (whole[0] == 0).all()
        assert (whole[5] == 0).all()
