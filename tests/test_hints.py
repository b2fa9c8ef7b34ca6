"""Performance hints of FlashAttention-3 are accepted and checked; `explain` names ignored ones."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile.gpu import hardware
from flashtile.testing import cu_seqlens, generator, normal, qkv

METADATA = torch.zeros(3, dtype=torch.int32)
HINTS = [
    {"num_splits": 4},
    {"pack_gqa": True},
    {"pack_gqa": False},
    {"sm_margin": 8},
    {"scheduler_metadata": METADATA},
]


def call(name, **options):
    g = generator(3)
    if name == "attention":
        return flashtile.attention(*qkv(g, B=2, M=5, N=7, Hq=4, Hk=2, D=8), **options)
    if name == "attention_varlen":
        q, k, v = (normal(g, 9, heads, 8) for heads in (4, 2, 2))
        lengths = cu_seqlens([4, 5])
        return flashtile.attention_varlen(q, k, v, lengths, lengths, 5, 5, **options)
    q, k, v = qkv(g, B=2, M=5, N=7, Hq=4, Hk=2, D=8)
    return flashtile.attention_with_kvcache(q, k, v, **options)


NAMES = ("attention", "attention_varlen", "attention_with_kvcache")


def named(hint):
    """The functions that take it: dense calls have no scheduler metadata."""
    return NAMES[1:] if "scheduler_metadata" in hint else NAMES


@pytest.mark.parametrize(
    ("name", "hint"), [(name, hint) for hint in HINTS for name in named(hint)], ids=str
)
def test_a_hint_changes_no_result(name, hint):
    for _ in range(2):  # the second from the memo
        assert torch.equal(call(name, **hint), call(name))


@pytest.mark.parametrize(
    ("hint", "error", "message"),
    [
        ({"num_splits": 1000}, ValueError, "num_splits: got 1000"),
        ({"num_splits": "many"}, TypeError, "num_splits: got str"),
        ({"pack_gqa": 1}, TypeError, "pack_gqa: got int, want True, False or None"),
        ({"sm_margin": -1}, ValueError, "sm_margin: got -1"),
        ({"sm_margin": 0.5}, TypeError, "sm_margin: got float"),
        ({"scheduler_metadata": [1]}, TypeError, "scheduler_metadata: got list"),
        ({"scheduler_metadata": METADATA.float()}, TypeError, "scheduler_metadata: got dtype"),
        (
            {"scheduler_metadata": METADATA.to("meta")},
            ValueError,
            "scheduler_metadata: got device",
        ),
    ],
)
def test_a_wrong_hint_is_refused(hint, error, message):
    for name in named(hint):
        with pytest.raises(error, match=message):
            call(name, **hint)


def test_explain_names_the_hints_that_are_ignored():
    q, k, v = qkv(generator(3), B=2, M=5, N=7, Hq=4, Hk=2, D=8)
    report = flashtile.explain(q, k, v, num_splits=4, pack_gqa=True, sm_margin=8)
    assert str(report).endswith(
        "hints: num_splits=4 ignored by cpu; pack_gqa=True ignored by cpu; "
        "sm_margin=8 ignored by cpu"
    )
    assert "hints" not in str(flashtile.explain(q, k, v))
    assert "hints" not in str(flashtile.explain(q, k, v, num_splits=0, pack_gqa=None))


def test_explain_names_the_hints_that_are_honoured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(hardware, "TRITON_IS_INSTALLED", True)
    with FakeTensorMode():
        q = torch.empty(1, 1, 4, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(1, 4096, 4, 64, dtype=torch.bfloat16, device="cuda")
        report = str(flashtile.explain(q, k, k, num_splits=4, pack_gqa=False))
    assert "hints: num_splits=4 honoured by triton; pack_gqa=False ignored by triton" in report
    assert "keys split into 4 parts" in report


def test_the_functions_of_flash_attn_take_hints():
    q, k, v = qkv(generator(3), B=2, M=5, N=7, Hq=4, Hk=2, D=8)
    hints = {"num_splits": 2, "pack_gqa": True, "sm_margin": 1}
    assert torch.equal(flashtile.flash_attn_func(q, k, v, **hints), call("attention"))
    cached = flashtile.flash_attn_with_kvcache(q, k, v, scheduler_metadata=METADATA, **hints)
    assert torch.equal(cached, call("attention_with_kvcache"))
