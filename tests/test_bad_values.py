"""Invalid values in tensors raise an error where reading them is free, and do no harm elsewhere."""

from __future__ import annotations

import pytest
import torch
from bad_calls import cache, packed, refuse, tensor, zeros
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile.call import checks
from flashtile.invariance_check import checks_everything
from flashtile.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)
from flashtile.quantize import quantize_qkv
from flashtile.testing import rotary_tables

COS, SIN = rotary_tables(32, 8)
ROWS = {"cache_batch_idx": tensor(0, 1)}

# Values are checked for CPU tensors by default, with FLASHTILE_CHECK=1 also for GPU tensors.
PACKED_VALUES = {
    "cu_seqlens_q decreases": ("cu_seqlens_q", {"cu_seqlens_q": tensor(0, 6, 5)}),
    "cu_seqlens_q starts at 1": ("cu_seqlens_q", {"cu_seqlens_q": tensor(1, 3, 5)}),
    "cu_seqlens_k is negative": ("cu_seqlens_k", {"cu_seqlens_k": tensor(0, -1, 7)}),
    "cu_seqlens_k ends past the keys": ("cu_seqlens_k", {"cu_seqlens_k": tensor(0, 4, 8)}),
    "max_seqlen_q is too small": ("max_seqlen_q", {"max_seqlen_q": 2}),
    "max_seqlen_k is too small": ("max_seqlen_k", {"max_seqlen_k": 3}),
    "seqused_k is more than there is": ("seqused_k", {"seqused_k": tensor(5, 3)}),
    "seqused_q is negative": ("seqused_q", {"seqused_q": tensor(-1, 2)}),
    "lengths for cu_seqlens_q": ("cu_seqlens_q", {"cu_seqlens_q": tensor(3, 2, 0)}),
}
WITHOUT_AND_WITH_ASKING = pytest.mark.parametrize("asked", [None, "1"], ids=["default", "asked"])


def ask(monkeypatch, asked):
    if asked is None:
        monkeypatch.delenv("FLASHTILE_CHECK", raising=False)
    else:
        monkeypatch.setenv("FLASHTILE_CHECK", asked)


@WITHOUT_AND_WITH_ASKING
@pytest.mark.parametrize("case", PACKED_VALUES)
def test_packed_values(case, asked, monkeypatch):
    ask(monkeypatch, asked)
    argument, change = PACKED_VALUES[case]
    call = packed() | change
    refuse(flashtile.attention_varlen, call, argument, [call["out"]])


@WITHOUT_AND_WITH_ASKING
@pytest.mark.parametrize("argument", ["seqused_q", "seqused_k"])
@pytest.mark.parametrize("lengths", [(-1, 2), (3, 6)], ids=["negative", "more than there is"])
def test_values_of_a_padded_call(lengths, argument, asked, monkeypatch):
    ask(monkeypatch, asked)
    call = {"q": zeros(2, 5, 4, 8), "k": zeros(2, 5, 2, 8), "v": zeros(2, 5, 2, 8)}
    refuse(flashtile.attention, call | {argument: tensor(*lengths)}, argument, [])


LENGTHS_OF_PARTS = {
    "ends past the tokens": ("cu_seqlens", {"cu_seqlens": tensor(0, 99)}),
    "decreases": ("cu_seqlens", {"cu_seqlens": tensor(0, 4, 3)}),
    "starts at 3": ("cu_seqlens", {"cu_seqlens": tensor(3, 5)}),
    "uses more than there is": (
        "seqused",
        {"cu_seqlens": tensor(0, 2, 5), "seqused": tensor(2, 4)},
    ),
    "uses a negative number": ("seqused", {"cu_seqlens": tensor(0, 5), "seqused": tensor(-1)}),
}


@WITHOUT_AND_WITH_ASKING
@pytest.mark.parametrize("case", LENGTHS_OF_PARTS)
def test_lengths_of_parts_to_combine(case, asked, monkeypatch):
    ask(monkeypatch, asked)
    argument, change = LENGTHS_OF_PARTS[case]
    out = zeros(5, 4, 8)
    call = {"out_partial": zeros(2, 5, 4, 8), "lse_partial": zeros(2, 5, 4), "out": out}
    refuse(flashtile.flash_attn_combine, call | change, argument, [out])


@pytest.mark.parametrize("used", [(99, 1), (-1, 1)])
def test_used_tokens_of_padded_parts_to_combine(used):
    call = {"out_partial": zeros(3, 2, 5, 4, 8), "lse_partial": zeros(3, 2, 5, 4)}
    refuse(flashtile.flash_attn_combine, call | {"seqused": tensor(*used)}, "seqused", [])


POSITIONS = {
    "past the table": ("seqlen_offsets", {"seqlen_offsets": tensor(3, 30)}),
    "negative": ("seqlen_offsets", {"seqlen_offsets": tensor(-1, 0)}),
    "lengths that decrease": ("cu_seqlens", {"cu_seqlens": tensor(0, 4, 3), "max_seqlen": 9}),
    "lengths beyond the tokens": ("cu_seqlens", {"cu_seqlens": tensor(0, 11), "max_seqlen": 9}),
    "longer than max_seqlen": ("max_seqlen", {"cu_seqlens": tensor(0, 4, 10), "max_seqlen": 5}),
}


@WITHOUT_AND_WITH_ASKING
@pytest.mark.parametrize("case", POSITIONS)
def test_rotary_positions(case, asked, monkeypatch):
    ask(monkeypatch, asked)
    argument, change = POSITIONS[case]
    x = zeros(10, 4, 8) if "cu_seqlens" in change else zeros(2, 5, 4, 8)
    x += 1
    call = {"x": x, "cos": COS, "sin": SIN, "inplace": True}
    refuse(apply_rotary_emb, call | change, argument, [x])


def test_rotary_positions_of_packed_heads():
    qkv, kv = zeros(2, 5, 3, 4, 8) + 1, zeros(2, 5, 2, 4, 8) + 1
    positions = {"cos": COS, "sin": SIN, "seqlen_offsets": tensor(0, 28)}
    refuse(apply_rotary_emb_qkv_, {"qkv": qkv, **positions}, "seqlen_offsets", [qkv])
    refuse(apply_rotary_emb_kv_, {"kv": kv, **positions}, "seqlen_offsets", [kv])
    call = {"qkv": kv[:, :, 0], "kv": kv, "max_seqlen": 6, "seqlen_offset": tensor(0, 28)}
    refuse(RotaryEmbedding(8), call, "seqlen_offsets", [kv])


@WITHOUT_AND_WITH_ASKING
@pytest.mark.parametrize("case", [case for case in PACKED_VALUES if "seqused" not in case])
def test_lengths_of_sequences_to_quantize(case, asked, monkeypatch):
    ask(monkeypatch, asked)
    argument, change = PACKED_VALUES[case]
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    refuse(quantize_qkv, {name: (packed() | change)[name] for name in names}, argument, [])


@pytest.mark.parametrize("case", PACKED_VALUES)
def test_packed_values_unchecked_stay_in_bounds(case, monkeypatch):
    """Without the check the call runs, and reads and writes only inside its tensors."""
    ask(monkeypatch, "0")
    _, change = PACKED_VALUES[case]
    call = packed() | change
    whole = torch.full((9, 4, 8), torch.nan)
    call["out"] = whole[2:7]
    flashtile.attention_varlen(**call)
    assert whole[:2].isnan().all()
    assert whole[7:].isnan().all()
    assert call["out"].isfinite().all()


@pytest.mark.parametrize("check", [None, "1", "0"])
def test_the_check_lets_good_calls_pass(check, monkeypatch):
    ask(monkeypatch, check)
    assert flashtile.attention_varlen(**packed()).isfinite().all()
    call = cache() | {"page_table": tensor([0, 1], [2, 3])}
    assert flashtile.attention_with_kvcache(**call).isfinite().all()


CACHE_VALUES = {
    "page_table out of range": ("page_table", {"page_table": tensor([0, 4], [2, 3])}),
    "page_table is negative": ("page_table", {"page_table": tensor([0, 1], [-1, 3])}),
    "cache_batch_idx out of range": ("cache_batch_idx", {"cache_batch_idx": tensor(0, 4)}),
    "cache_batch_idx is negative": ("cache_batch_idx", {"cache_batch_idx": tensor(-1, 2)}),
    "cache_batch_idx past the page_table": (
        "cache_batch_idx",
        {"page_table": tensor([0, 1], [2, 3]), "cache_batch_idx": tensor(1, 2)},
    ),
    "cache_batch_idx with a row twice": (
        "cache_batch_idx",
        {"cache_batch_idx": tensor(3, 3), "cache_seqlens": tensor(5, 7)},
    ),
    "page_table with a page twice": ("page_table", {"page_table": tensor([0, 1], [2, 1])}),
    "page_table with a row twice": (
        "page_table",
        {"page_table": tensor([0, 1], [2, 3]), "cache_batch_idx": tensor(1, 1)},
    ),
    "cache_leftpad past the length": ("cache_leftpad", ROWS | {"cache_leftpad": tensor(9, 0)}),
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
    "rotary_cos is too short for the queries": (
        "rotary_cos",
        ROWS
        | {"q": zeros(2, 5, 4, 8), "out": zeros(2, 5, 4, 8)}
        | {"rotary_cos": COS[:13], "rotary_sin": SIN[:13]},
    ),
    "rotary_cos is too short for packed queries": (
        "rotary_cos",
        ROWS
        | {"q": zeros(6, 4, 8), "out": zeros(6, 4, 8)}
        | {"cu_seqlens_q": tensor(0, 1, 6), "max_seqlen_q": 5}
        | {"rotary_cos": COS[:13], "rotary_sin": SIN[:13]},
    ),
    "rotary_seqlens is negative": (
        "rotary_seqlens",
        ROWS | {"rotary_cos": COS, "rotary_sin": SIN, "rotary_seqlens": tensor(-1, 5)},
    ),
}


@WITHOUT_AND_WITH_ASKING
@pytest.mark.parametrize("case", CACHE_VALUES)
def test_cache_values(case, asked, monkeypatch):
    ask(monkeypatch, asked)
    argument, change = CACHE_VALUES[case]
    call = cache() | change
    if "page_table" in change:
        call["cache_seqlens"] = tensor(14, 14)  # with 3 new tokens: two pages each
    untouched = [call[n] for n in ("k_cache", "v_cache", "out")]
    refuse(flashtile.attention_with_kvcache, call, argument, untouched)


@WITHOUT_AND_WITH_ASKING
@pytest.mark.parametrize("rotary", [{}, {"rotary_cos": COS, "rotary_sin": SIN}], ids=["", "rotary"])
def test_one_tensor_for_both_caches(rotary, asked, monkeypatch):
    ask(monkeypatch, asked)
    call = cache() | ROWS | rotary
    call["v_cache"] = call["k_cache"]
    if rotary:
        call["v"] = call["k"]
    refuse(flashtile.attention_with_kvcache, call, "v_cache", [call["k_cache"], call["out"]])


def test_values_that_are_the_keys_may_share_their_cache():
    call = cache() | ROWS | {"out": None}
    call["v"] = call["k"]
    wanted = flashtile.attention_with_kvcache(
        **call | {"k_cache": call["k_cache"].clone(), "v_cache": call["k_cache"].clone()}
    )
    got = flashtile.attention_with_kvcache(**call | {"v_cache": call["k_cache"]})
    assert torch.equal(got, wanted)


LATENTS = torch.randn(4, 16, 2, 12)


@pytest.mark.parametrize("columns", [(0, 8, 0, 5), (0, 8, 4, 8), (0, 8, 5, 12), (4, 12, 0, 7)])
def test_caches_that_share_columns(columns):
    """New keys and values in the same memory are the same or refused."""
    a, b, c, d = columns
    latents, new = LATENTS.clone(), torch.randn(2, 3, 2, 12)
    k_cache, v_cache = latents[..., a:b], latents[..., c:d]
    call = cache() | ROWS | {"out": None, "k_cache": k_cache, "v_cache": v_cache}
    call |= {"k": new[..., a:b], "v": new[..., c:d]}
    own = call | {"k_cache": k_cache.clone(), "v_cache": v_cache.clone()}
    wanted = flashtile.attention_with_kvcache(**own)
    assert torch.equal(flashtile.attention_with_kvcache(**call), wanted)
    assert torch.equal(k_cache, own["k_cache"]) and torch.equal(v_cache, own["v_cache"])
    call["v"] = torch.randn(2, 3, 2, d - c)
    refuse(flashtile.attention_with_kvcache, call, "v_cache", [latents])


def test_caches_that_share_columns_with_rotary_embedding():
    """Values may be columns of the keys that are not rotated."""
    new, rotary = torch.randn(2, 3, 2, 8), {"rotary_cos": COS[:, :2], "rotary_sin": SIN[:, :2]}
    for first in (4, 3):
        latents = LATENTS[..., :8].clone()
        caches = {"k_cache": latents, "v_cache": latents[..., first:]}
        call = cache() | ROWS | caches | rotary | {"out": None, "k": new, "v": new[..., first:]}
        if first == 3:
            refuse(flashtile.attention_with_kvcache, call, "v_cache", [latents])
            continue
        own = call | {n: x.clone() for n, x in caches.items()}
        wanted = flashtile.attention_with_kvcache(**own)
        assert torch.equal(flashtile.attention_with_kvcache(**call), wanted)


def test_interleaved_caches_share_no_memory():
    both = torch.randn(4, 16, 2, 8, 2)
    call = cache() | ROWS | {"out": None, "k_cache": both[..., 0], "v_cache": both[..., 1]}
    wanted = flashtile.attention_with_kvcache(
        **call | {n: call[n].clone() for n in ("k_cache", "v_cache")}
    )
    assert torch.equal(flashtile.attention_with_kvcache(**call), wanted)


def test_sequences_may_append_to_one_row_at_different_places():
    call = cache() | {"cache_batch_idx": tensor(3, 3), "cache_seqlens": tensor(5, 8)}
    assert flashtile.attention_with_kvcache(**call).isfinite().all()
    call = cache() | {"page_table": tensor([0, 1], [0, 2]), "cache_seqlens": tensor(16, 17)}
    assert flashtile.attention_with_kvcache(**call).isfinite().all()


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_cache_whose_rows_share_memory(name):
    call = cache() | ROWS
    call[name] = call[name][:1].expand(4, 16, 2, 8)
    untouched = [call[n] for n in ("k_cache", "v_cache", "out")]
    refuse(flashtile.attention_with_kvcache, call, name, untouched)
    reading = {n: x for n, x in call.items() if n not in ("k", "v")}
    assert flashtile.attention_with_kvcache(**reading).isfinite().all()


@pytest.mark.parametrize("case", [c for c in CACHE_VALUES if "rotary" not in c])
def test_cache_values_unchecked_stay_in_bounds(case, monkeypatch):
    """Without the check, calls with wrong values write only inside the cache."""
    ask(monkeypatch, "0")
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


PAGES = tensor([0, 1], [2, 3])  # of 16 tokens


@pytest.mark.parametrize("name", ["block_table", "page_table"])
@pytest.mark.parametrize("k", ["new", "none"])
def test_lengths_beyond_the_page_table(name, k):
    call = cache() | {"cache_seqlens": tensor(33, 9), name: PAGES}
    if k == "none":
        call |= {"k": None, "v": None}
    said = "cache_seqlens with the new tokens" if k == "new" else "cache_seqlens"
    before = call["k_cache"].clone()
    with pytest.raises(RuntimeError, match=rf"{name}.* in {said}, want .* in 2 pages of 16"):
        flashtile.flash_attn_with_kvcache(**call)
    assert torch.equal(call["k_cache"], before)
    assert call["out"].isnan().all()


def test_packed_lengths_beyond_the_page_table():
    pages = zeros(4, 2, 2, 8)
    call = packed() | {"k": pages, "v": pages, "block_table": tensor([0], [1])}
    for name in ("dropout_p", "out"):
        del call[name]
    with pytest.raises(RuntimeError, match=r"block_table.*got lengths \[4, 3\] in cu_seqlens_k"):
        flashtile.flash_attn_varlen_func(**call)
    call["block_table"] = tensor([0, 1], [2, 3])
    assert flashtile.flash_attn_varlen_func(**call).isfinite().all()
    with pytest.raises(ValueError, match=r"cu_seqlens_k: got .0, 4, 3."):
        flashtile.flash_attn_varlen_func(**call | {"cu_seqlens_k": tensor(0, 4, 3)})
    with pytest.raises(ValueError, match="max_seqlen_k: got 3"):
        flashtile.flash_attn_varlen_func(**call | {"max_seqlen_k": 3})


def test_max_seqlen_bounds_what_is_used():
    """Of a longer allocation too: packed, padded, in pages."""
    used = {"seqused_k": tensor(2, 3), "max_seqlen_k": 3}
    call = packed() | used
    assert flashtile.attention_varlen(**call).isfinite().all()
    with pytest.raises(ValueError, match="max_seqlen_k: got 2, want at least 3"):
        flashtile.attention_varlen(**call | {"max_seqlen_k": 2})
    for table, keys in ((None, zeros(2, 9, 2, 8)), (PAGES, zeros(4, 5, 2, 8))):
        call |= {"k": keys, "v": keys, "cu_seqlens_k": None, "page_table": table}
        assert flashtile.attention_varlen(**call).isfinite().all()
        with pytest.raises(ValueError, match="max_seqlen_k: got 2, want at least 3"):
            flashtile.attention_varlen(**call | {"max_seqlen_k": 2})


def test_values_changed_in_place_are_checked_again():
    """The memo holds the decision about a call, not the values of its tensors."""
    call = packed()
    del call["out"]
    for _ in range(2):
        flashtile.attention_varlen(**call)
    call["cu_seqlens_k"][1] = 8
    with pytest.raises(ValueError, match=r"cu_seqlens_k: got .0, 8, 7."):
        flashtile.attention_varlen(**call)
    call = cache() | ROWS
    del call["out"]
    for _ in range(2):
        flashtile.attention_with_kvcache(**call)
    call["cache_seqlens"] += 8
    with pytest.raises(ValueError, match=r"cache_seqlens: got .13, 17."):
        flashtile.attention_with_kvcache(**call)
    call["cache_seqlens"] -= 8
    call["cache_batch_idx"][0] = 4
    with pytest.raises(ValueError, match="cache_batch_idx: got values from 1 to 4"):
        flashtile.attention_with_kvcache(**call)


def test_nothing_is_read_where_there_are_no_values(monkeypatch):
    """Under fake tensors, on meta tensors and in torch.func, even if asked to."""
    ask(monkeypatch, "1")
    call = packed() | {"cu_seqlens_k": tensor(0, 9, 7), "dropout_p": 0.0}
    out = call.pop("out")
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert flashtile.attention_varlen(**call).shape == out.shape
    fake = FakeTensorMode()
    moved = {n: fake.from_tensor(x) if torch.is_tensor(x) else x for n, x in call.items()}
    assert flashtile.attention_varlen(**moved).shape == out.shape
    assert not checks.checking_values([x.to("meta") for x in (call["q"], call["cu_seqlens_k"])])

    def attend(q):
        return flashtile.attention_varlen(**call | {"q": q})

    assert torch.vmap(attend)(call["q"][None]).shape == (1, *out.shape)


def test_queries_without_positions_of_their_own_need_one_row_of_the_tables():
    """Neither causal nor local: all are rotated like the first one."""
    tables = {"rotary_cos": COS[:12], "rotary_sin": SIN[:12]}  # the last new token is at 11
    call = cache() | tables | {"q": zeros(2, 5, 4, 8), "out": None, "causal": False}
    call["cache_batch_idx"] = tensor(0, 1)
    assert flashtile.attention_with_kvcache(**call).isfinite().all()


def test_new_tokens_are_counted_where_the_length_is_an_int(monkeypatch):
    """Which needs no values: the check is made on a GPU and without any asking."""
    ask(monkeypatch, "0")
    call = cache() | ROWS
    with pytest.raises(ValueError, match="got 14 and 3 new tokens, want at most 16"):
        flashtile.attention_with_kvcache(**(call | {"cache_seqlens": 14}))
    flashtile.attention_with_kvcache(**(call | {"cache_seqlens": 13}))


@pytest.mark.parametrize("is_recording", [False, True])
def test_no_values_are_read_while_a_graph_records(is_recording, monkeypatch):
    monkeypatch.setenv("FLASHTILE_CHECK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_recording)
    assert checks_everything() != is_recording
