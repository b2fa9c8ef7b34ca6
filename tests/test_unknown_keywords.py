"""A keyword that a function does not have: the error names the function and the right argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashtile
from flashtile.call.options import OTHER_NAMES
from flashtile.testing import cu_seqlens, generator, qkv

q, k, v = qkv(generator(0), Hq=2, Hk=2)
flat = [x.flatten(0, 1) for x in (q[:, :9], k[:, :9], v[:, :9])]
cu = cu_seqlens([9] * len(q))
CALLS: dict[str, tuple[Any, ...]] = {
    "attention": (q, k, v),
    "attention_fp8": (q, k, v),
    "attention_varlen": (*flat, cu, cu, 9, 9),
    "attention_with_kvcache": (q, k, v),
    "explain": (q, k, v),
    "quantize_qkv": (q, k, v),
    "flash_attn_func": (q, k, v),
    "flash_attn_kvpacked_func": (q, torch.stack([k, v], 2)),
    "flash_attn_qkvpacked_func": (torch.stack([q, q, q], 2),),
    "flash_attn_varlen_func": (*flat, cu, cu, 9, 9),
    "flash_attn_varlen_kvpacked_func": (flat[0], torch.stack(flat[1:], 1), cu, cu, 9, 9),
    "flash_attn_varlen_qkvpacked_func": (torch.stack(flat, 1), cu, 9),
    "flash_attn_with_kvcache": (q, k, v),
}


def error(name: str, **unknown: Any) -> str:
    """The error message of a call with these keywords."""
    function: Callable[..., Any] = getattr(flashtile, name)
    with pytest.raises(TypeError) as raised:
        function(*CALLS[name], **unknown)
    return str(raised.value)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("keyword", ["is_causal", "scale", "colour"])
def test_the_error_names_the_function_that_was_called(name, keyword):
    assert error(name, **{keyword: 1}).startswith(
        f"{name}() got an unexpected keyword argument '{keyword}'"
    )


@pytest.mark.parametrize(
    ("keyword", "meant"),
    [
        ("is_causal", "causal"),
        ("scale", "softmax_scale"),
        ("attention_mask", "bias or block_mask"),
        ("dropout", "dropout_p"),
        ("sinks", "sink"),
        ("windows_size", "window_size"),  # a typo
        ("cu_seqlens", "cu_seqlens_q"),
    ],
)
def test_the_error_suggests_the_right_argument(keyword, meant):
    assert meant in error("flash_attn_varlen_func", **{keyword: 1})


@pytest.mark.parametrize("name", ["attention_fp8", "quantize_qkv"])
@pytest.mark.parametrize(
    ("old", "new"),
    [("centre_k", "smooth_k"), ("rotate", "hadamard"), ("rotate_v", "hadamard_v")],
)
def test_the_old_name_of_an_argument(name, old, new):
    assert error(name, **{old: True}) == (
        f"{name}() got an unexpected keyword argument {old!r} (want {new})"
    )


def test_an_argument_that_is_not_needed():
    assert "it follows from the numbers of heads" in error("attention", enable_gqa=True)


def test_only_arguments_that_the_function_has_are_suggested():
    assert "want page_table" in error("attention_varlen", block_table=None)
    assert "page_table" not in error("attention", block_table=None)


@pytest.mark.parametrize(
    ("name", "masks", "padding"),
    [
        ("attention", "attn_mask or bias or block_mask", "key_padding_mask or seqused_k"),
        ("explain", "attn_mask or bias or block_mask", "key_padding_mask or seqused_k"),
        ("attention_varlen", "bias or block_mask", "seqused_k"),
        ("flash_attn_varlen_func", "bias or block_mask", "seqused_k"),
        ("attention_with_kvcache", "bias or block_mask", "cache_seqlens"),
        ("flash_attn_with_kvcache", "bias or block_mask", "cache_seqlens"),
    ],
)
def test_masks_of_other_libraries(name, masks, padding):
    """Every function suggests its own argument for masks of other names."""
    wants = {"attention_mask": f"{masks} or {padding}"}
    wants["padding_mask"] = padding
    if name not in ("attention", "explain"):
        wants |= {"attn_mask": masks, "key_padding_mask": padding}
    for keyword, want in wants.items():
        assert f"{keyword!r} (want {want})" in error(name, **{keyword: None})


@pytest.mark.parametrize(
    ("name", "keyword", "said"),
    [
        ("attention", "cache_seqlens", " (want seqused_k)"),
        ("attention_with_kvcache", "seqused_k", " (want cache_seqlens)"),
        ("attention", "block_table", ""),
        ("attention_fp8", "block_table", ""),
        ("explain", "return_softmax_lse", " (want return_lse)"),
    ],
)
def test_a_known_argument_is_not_taken_for_a_slip_of_the_keyboard(name, keyword, said):
    assert error(name, **{keyword: None}).endswith(f"argument {keyword!r}{said}")


def test_several_unknown_keywords():
    message = error("attention", is_causal=True, colour="red", scale=1.0)
    assert "'is_causal' (want causal" in message
    assert "'colour', 'scale' (want softmax_scale)" in message


def test_every_suggestion_is_an_argument_of_some_function():
    known = {
        name for call in CALLS for name in inspect.signature(getattr(flashtile, call)).parameters
    }
    assert {name for names in OTHER_NAMES.values() for name in names} <= known
