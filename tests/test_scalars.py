"""Numbers and flags of a call are honoured, or refused with an error that names them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from bad_calls import cache, dense, packed, refuse
from torch import Tensor

import flashtile
from flashtile.integrations import sdpa
from flashtile.layers.rotary import apply_rotary_emb, apply_rotary_emb_qkv_

INFINITY, NAN = float("inf"), float("nan")
# Values that are not numbers, and numbers that attention cannot use.
NO_NUMBERS: list[Any] = [
    "1", [1.0], 1j, True, False, torch.tensor(1.0), torch.ones(1), torch.ones(2), np.ones(1),
    np.bool_(True), object(), INFINITY, -INFINITY, NAN, np.float32("nan"), np.float64("inf"),
    10**400,
]  # fmt: skip
NO_INTEGERS: list[Any] = [
    "1", [1], 1.0, 1.5, True, torch.tensor(1), torch.ones(1), np.ones(1), np.float32(1), -1,
    np.int64(-1),
]  # fmt: skip
NO_FLAGS: list[Any] = [
    "yes", "", [], 1.0, 0.0, 2, -1, None, torch.tensor(True), np.ones(1, dtype=bool), NAN, object(),
]  # fmt: skip


def name_of(x: Any) -> str:
    return f"{type(x).__name__} {x!r:.20}"


def cached() -> dict[str, Any]:
    return cache() | {"cache_batch_idx": torch.tensor([2, 0], dtype=torch.int32)}


def calls() -> dict[str, tuple[Any, Any]]:
    return {
        "attention": (flashtile.attention, dense),
        "attention_varlen": (flashtile.attention_varlen, packed),
        "attention_with_kvcache": (flashtile.attention_with_kvcache, cached),
    }


NUMBERS = {
    "softmax_scale": ("attention", "attention_varlen", "attention_with_kvcache"),
    "softcap": ("attention", "attention_varlen", "attention_with_kvcache"),
    "dropout_p": ("attention", "attention_varlen"),
}
INTEGERS = {
    "attention_chunk": ("attention", "attention_varlen", "attention_with_kvcache"),
    "num_splits": ("attention_with_kvcache",),
}
FLAGS = {
    "causal": ("attention", "attention_varlen", "attention_with_kvcache"),
    "deterministic": ("attention", "attention_varlen"),
    "return_lse": ("attention", "attention_varlen", "attention_with_kvcache"),
    "return_attn_probs": ("attention", "attention_varlen"),
    "rotary_interleaved": ("attention_with_kvcache",),
}


def cases(names: dict[str, tuple[str, ...]], values: list[Any]) -> list[Any]:
    return [
        pytest.param(function, name, value, id=f"{function} {name} {name_of(value)}")
        for name, functions in names.items()
        for function in functions
        for value in values
    ]


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [*cases(NUMBERS, NO_NUMBERS), *cases(INTEGERS, NO_INTEGERS), *cases(FLAGS, NO_FLAGS)],
)
def test_refused(function: str, name: str, value: Any) -> None:
    call, make = calls()[function]
    given = make()
    if name == "rotary_interleaved":
        angle = torch.rand(16, 4)
        given |= {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    untouched = [x for n, x in given.items() if n in ("out", "k_cache", "v_cache")]
    with_name = f"{name}: got"
    refuse(call, given | {name: value}, name, untouched)
    with pytest.raises((TypeError, ValueError), match=f"^{with_name} .*, want "):
        call(**(given | {name: value}))
    call(**given)  # the error left nothing in the memo


def answer(**options: Any) -> Any:
    torch.manual_seed(0)
    call = dense()
    del call["out"]
    return flashtile.attention(**(call | options))


@pytest.mark.parametrize(
    ("name", "value", "same"),
    [
        ("softmax_scale", np.float32(0.5), 0.5),
        ("softmax_scale", np.int64(2), 2.0),
        ("softmax_scale", 1, 1.0),
        ("softmax_scale", Fraction(1, 4), 0.25),
        ("softmax_scale", -1, -1.0),
        ("softmax_scale", 0, 0.0),
        ("softmax_scale", -0.0, 0.0),
        ("softcap", np.float64(1.5), 1.5),
        ("softcap", 2, 2.0),
        ("softcap", None, 0.0),
        ("dropout_p", np.float32(0.5), 0.5),
        ("dropout_p", 0, 0.0),
        ("attention_chunk", np.int32(3), 3),
        ("attention_chunk", None, 0),
        ("causal", 1, True),
        ("causal", 0, False),
        ("deterministic", 1, True),
    ],
    ids=str,
)
def test_honoured(name: str, value: Any, same: Any) -> None:
    assert torch.equal(answer(**{name: value}), answer(**{name: same}))


@pytest.mark.parametrize("name", ["return_lse", "return_attn_probs"])
def test_flags_as_numbers(name: str) -> None:
    assert len(answer(**{name: 1})) == len(answer(**{name: True}))
    assert isinstance(answer(**{name: 0}), Tensor)


def test_splits_and_lengths_from_numpy() -> None:
    call = {name: x for name, x in cached().items() if name != "out"}
    wanted = flashtile.attention_with_kvcache(**call, num_splits=2)
    assert torch.equal(flashtile.attention_with_kvcache(**call, num_splits=np.int64(2)), wanted)
    lengths = packed() | {"max_seqlen_q": np.int32(3), "dropout_p": 0.0}
    wanted = flashtile.attention_varlen(**(lengths | {"max_seqlen_q": 3})).clone()
    assert torch.equal(flashtile.attention_varlen(**lengths), wanted)


@pytest.mark.parametrize("value", NO_FLAGS, ids=name_of)
def test_flags_elsewhere(value: Any) -> None:
    q, k, v = (dense()[name] for name in "qkv")
    heads_first = [x.transpose(1, 2) for x in (q, q, q)]
    angle = torch.rand(9, 4)
    qkv = torch.stack((q, q, q), dim=2)
    refused = [
        ("is_causal", lambda: sdpa.scaled_dot_product_attention(*heads_first, is_causal=value)),
        ("enable_gqa", lambda: sdpa.scaled_dot_product_attention(*heads_first, enable_gqa=value)),
        ("interleaved", lambda: apply_rotary_emb(q, angle, angle, value)),
        ("inplace", lambda: apply_rotary_emb(q, angle, angle, inplace=value)),
        ("interleaved", lambda: apply_rotary_emb_qkv_(qkv, angle, angle, interleaved=value)),
        ("causal", lambda: flashtile.attention_fp8(q, k, v, causal=value)),
        *(
            (name, lambda name=name: flashtile.attention_fp8(q, k, v, **{name: value}))
            for name in ("hadamard", "hadamard_v", "smooth_k", "return_lse", "emulate")
        ),
        *(
            (name, lambda name=name: flashtile.quantize_qkv(q, k, v, **{name: value}))
            for name in ("hadamard", "hadamard_v", "smooth_k")
        ),
    ]
    for name, call in refused:
        with pytest.raises((TypeError, ValueError), match=f"^{name}: got .*, want True or False"):
            call()
