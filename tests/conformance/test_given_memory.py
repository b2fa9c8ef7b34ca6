"""Memory from the caller, `out` and `workspace`, does not change a bit of the result."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile.call import checks
from flashtile.testing import cu_seqlens, generator, normal, paged

from .calls import cache_call, flat
from .devices import device_of

storages = pytest.mark.parametrize("storage", ["contiguous", "paged", "packed", "rows", "pads"])


def call_of(storage: str) -> dict:
    """New tokens appended and rotated; 3 queries of each sequence, or 4 and 2 of them packed."""
    call = cache_call(3, "contiguous" if storage in ("rows", "pads") else storage)
    if storage == "rows":
        call["cache_batch_idx"] = torch.tensor([1, 0], dtype=torch.int32)
    if storage == "pads":
        call["cache_leftpad"] = torch.tensor([2, 0], dtype=torch.int32)
    return call


def given_workspace(backend: str, seq_q: int, heads: int, dim: int, num_splits: int = 0):
    """A workspace of the required size with all bits set, so that its numbers are NaN."""
    sizes = (2, seq_q, heads, dim, num_splits)
    count = flashtile.workspace_size(*sizes, device=device_of(backend))
    return torch.full((count,), 255, dtype=torch.uint8)


@storages
@pytest.mark.parametrize("num_splits", [0, 3])
def test_of_a_cache(storage, num_splits, backend):
    results = []
    for memory in (
        {},
        {"workspace": given_workspace(backend, 4, 4, 8, num_splits)},
        {"out": torch.full(call_of(storage)["q"].shape, torch.nan)},
    ):
        call = call_of(storage) | {"num_splits": num_splits, "backend": backend} | memory
        out, lse = flashtile.attention_with_kvcache(**call)
        assert out is memory.get("out", out)
        results.append((out, lse, call["k_cache"], call["v_cache"]))
    for got in results[1:]:
        assert all(map(torch.equal, got, results[0]))


@pytest.mark.parametrize("has_pages", [False, True], ids=["packed", "pages"])
def test_of_packed_sequences(has_pages, backend, seed):
    g = generator(seed)
    call = flat(9) | {"max_seqlen_q": 2, "max_seqlen_k": 32, "backend": backend}
    call |= {"q": normal(g, 3, 4, 8), "cu_seqlens_q": cu_seqlens([1, 2])}
    if has_pages:
        caches = normal(g, 2, 2, 32, 2, 8)
        for name, cache in zip("kv", caches, strict=True):
            call[name], call["page_table"] = paged(generator(seed), cache, 16)
        call["cu_seqlens_k"] = cu_seqlens([32, 20])
    wanted = flashtile.attention_varlen(**call)
    out = torch.full_like(wanted, torch.nan)
    memory = {"workspace": given_workspace(backend, 2, 4, 8)}
    assert flashtile.attention_varlen(**call, **memory, out=out) is out
    assert torch.equal(out, wanted)
    assert torch.equal(flashtile.attention_varlen(**call, **memory), wanted)


def test_the_functions_of_flash_attention_take_a_workspace():
    call = call_of("contiguous") | {"workspace": given_workspace("cpu", 4, 4, 8)}
    call["return_softmax_lse"] = call.pop("return_lse")
    flashtile.flash_attn_with_kvcache(**call)
    packed = flat(9) | {"max_seqlen_q": 9, "max_seqlen_k": 9}
    flashtile.flash_attn_varlen_func(**packed, workspace=given_workspace("cpu", 9, 4, 8))


def test_a_workspace_too_small_is_refused_before_anything_is_written(monkeypatch):
    """Also after a valid call with the same arguments."""
    given = torch.zeros(640, dtype=torch.uint8)
    for wanted in (640, 641):
        monkeypatch.setattr(checks, "workspace_size", lambda *sizes, wanted=wanted: wanted)
        for _ in range(2):
            call = call_of("contiguous") | {"workspace": given}
            before = call["k_cache"].clone()
            if wanted == 640:
                flashtile.attention_with_kvcache(**call)
                continue
            with pytest.raises(ValueError, match="workspace: got 640 bytes, want at least 641"):
                flashtile.attention_with_kvcache(**call)
            assert torch.equal(call["k_cache"], before)


def test_packed_rows_of_no_sequence_take_room_too(monkeypatch):
    monkeypatch.setattr(checks, "workspace_size", lambda tokens, *sizes: 16 * tokens)
    call = call_of("packed")
    count = 16 * call["q"].shape[0]
    given = {"workspace": torch.zeros(count, dtype=torch.uint8)}
    flashtile.attention_with_kvcache(**call, **given)
    call["q"] = call["q"].repeat(2, 1, 1)
    with pytest.raises(ValueError, match=f"got {count} bytes, want at least {2 * count}"):
        flashtile.attention_with_kvcache(**call, **given)


def test_a_workspace_is_refused_while_recording_gradients():
    call = flat(9) | {"max_seqlen_q": 9, "max_seqlen_k": 9}
    call["q"].requires_grad_()
    with pytest.raises(ValueError, match=r"workspace: .*recording gradients"):
        flashtile.attention_varlen(**call, workspace=given_workspace("cpu", 9, 4, 8))


def test_workspace_size_refuses_what_is_no_size():
    for wrong in ({"batch": -1}, {"num_splits": 1.5}, {"heads": None}):
        sizes = {"batch": 2, "seq_q": 1, "heads": 4, "value_head_dim": 8} | wrong
        with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
            flashtile.workspace_size(**sizes)


def test_a_larger_call_never_wants_less():
    """One workspace serves every smaller call."""
    sizes = {"batch": 3, "seq_q": 2, "heads": 4, "value_head_dim": 64}
    one = flashtile.workspace_size(**sizes)
    assert one > 0
    for name, size in sizes.items():
        assert flashtile.workspace_size(**(sizes | {name: 50 * size})) >= one
    assert flashtile.workspace_size(**sizes, device="cpu") == 0
    assert flashtile.workspace_size(**sizes, num_splits=1) == 0
    assert flashtile.workspace_size(**sizes, num_splits=7) == 7 * 3 * 2 * 4 * 66 * 4
