"""Layouts of `attention_varlen` around the backends: errors, `explain`, compiled calls."""

import pytest
import torch

import flashtile
from flashtile.call.packing import starts
from flashtile.testing import cu_seqlens, generator, normal

CU_Q, CU_K = cu_seqlens([3, 4]), cu_seqlens([5, 1])


def tensors(padded_q, padded_k):
    g = generator(0)
    q = normal(g, 2, 4, 4, 8) if padded_q else normal(g, 7, 4, 8)
    k, v = (normal(g, 2, 5, 2, 8) if padded_k else normal(g, 6, 2, 8) for _ in "kv")
    return {"q": q, "k": k, "v": v}


PACKED, PADDED = tensors(False, False), tensors(True, True)
USED = torch.tensor([2, 5], dtype=torch.int32)
PAGES = torch.zeros(2, 3, dtype=torch.int32)

BAD = {
    "packed queries without lengths": ("cu_seqlens_q", PACKED, {"cu_seqlens_k": CU_K}),
    "packed keys without lengths": ("cu_seqlens_k", PACKED, {"cu_seqlens_q": CU_Q}),
    "padded queries with lengths": ("q: got", PADDED, {"cu_seqlens_q": CU_Q}),
    "padded keys of another batch": (
        "k: got a batch of 2, want 3",
        PADDED | {"q": PACKED["q"]},
        {"cu_seqlens_q": cu_seqlens([3, 4, 0])},
    ),
    "lengths of another batch": (
        "cu_seqlens_k: got a batch of 3",
        PACKED | {"q": PADDED["q"]},
        {"cu_seqlens_k": cu_seqlens([3, 1, 2])},
    ),
    "values padded otherwise": (
        "v: got shape",
        PADDED | {"q": PACKED["q"], "v": PADDED["v"].reshape(5, 2, 2, 8)},
        {"cu_seqlens_q": CU_Q},
    ),
    "pages of another batch": (
        "page_table",
        PADDED | {"q": PACKED["q"]},
        {"cu_seqlens_q": CU_Q, "page_table": PAGES[:1]},
    ),
    "max_seqlen of two numbers": (
        "max_seqlen_q",
        PACKED,
        {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": torch.tensor([4, 4])},
    ),
    "max_seqlen of a float tensor": (
        "max_seqlen_k",
        PACKED,
        {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_k": torch.tensor(4.0)},
    ),
    "max_seqlen below 0": (
        "max_seqlen_q",
        PACKED,
        {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": torch.tensor(-4)},
    ),
    "max_seqlen on meta": (
        "max_seqlen_q",
        PACKED,
        {
            "cu_seqlens_q": CU_Q,
            "cu_seqlens_k": CU_K,
            "max_seqlen_q": torch.tensor(4, device="meta"),
        },
    ),
    "qv that is not padded": (
        "qv",
        PADDED,
        {"qv": torch.zeros(8, 4, 8), "seqused_k": USED},
    ),
    "out that is not padded": ("out", PADDED, {"out": torch.zeros(8, 4, 8), "seqused_k": USED}),
    "q is a list": ("q: got list", PACKED | {"q": [1.0]}, {"cu_seqlens_q": CU_Q}),
    "q is a list, padded keys": ("q: got list", PADDED | {"q": [1.0]}, {"cu_seqlens_q": CU_Q}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case):
    message, inputs, options = BAD[case]
    with pytest.raises((TypeError, ValueError), match=message):
        flashtile.attention_varlen(**inputs, **options)


def test_explain_describes_the_same_problem():
    wanted = flashtile.explain(
        PADDED["q"].flatten(0, 1),
        **{n: PADDED[n].flatten(0, 1) for n in "kv"},
        cu_seqlens_q=cu_seqlens([4, 4]),
        cu_seqlens_k=cu_seqlens([5, 5]),
        max_seqlen_q=4,
        max_seqlen_k=5,
        seqused_k=USED,
    )
    packed_q = {"q": PADDED["q"].flatten(0, 1), "cu_seqlens_q": cu_seqlens([4, 4])}
    report = flashtile.explain(**(PADDED | packed_q), seqused_k=USED)
    assert report.problem == wanted.problem
    report = flashtile.explain(**PADDED, cu_seqlens_q=None, seqused_k=USED)
    assert report.problem == wanted.problem


@pytest.mark.slow
@pytest.mark.parametrize("padded", ["q", "k"])
def test_compiled(padded):
    options = {"causal": True, "return_lse": True}
    options |= {"max_seqlen_k": 5} if padded == "q" else {"max_seqlen_q": 4}
    inputs = tensors(padded == "q", padded == "k")
    lengths = {"cu_seqlens_k": CU_K} if padded == "q" else {"cu_seqlens_q": CU_Q}
    leaves = [x.requires_grad_() for x in inputs.values()]

    def run(function):
        out, lse = function(**inputs, **lengths, **options)
        return out, lse, *torch.autograd.grad(out.sum() + lse.exp().sum(), leaves)

    compiled = torch.compile(
        flashtile.attention_varlen, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for got, wanted in zip(run(compiled), run(flashtile.attention_varlen), strict=True):
        torch.testing.assert_close(got, wanted)


def test_lengths_that_cannot_be_read():
    compiled = torch.compile(flashtile.attention_varlen, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="max_seqlen_q: got None, want an int"):
        compiled(**PACKED, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, max_seqlen_k=5)
    with torch._subclasses.FakeTensorMode() as mode:
        call = PACKED | {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
        fake = {name: mode.from_tensor(x) for name, x in call.items()}
        with pytest.raises(TypeError, match="max_seqlen_q: got None, want an int"):
            flashtile.attention_varlen(**fake)
        longest = mode.from_tensor(torch.tensor(5))
        with pytest.raises(TypeError, match="max_seqlen_q: got a tensor whose values"):
            flashtile.attention_varlen(**fake, max_seqlen_q=longest)
        assert flashtile.attention_varlen(**fake, max_seqlen_q=4, max_seqlen_k=5).shape == (7, 4, 8)


def test_autocast_casts_padded_inputs():
    call = {"q": PADDED["q"], "k": PACKED["k"].bfloat16(), "v": PACKED["v"]}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flashtile.attention_varlen(**call, cu_seqlens_k=CU_K)
    assert out.dtype == torch.bfloat16


def test_rotary_seqlens_without_tables_rotate_nothing():
    """As in FlashAttention-3, the argument then has no effect."""
    g = generator(1)
    cache = {"q": normal(g, 2, 1, 4, 8), "k_cache": normal(g, 2, 9, 2, 8)}
    cache |= {"v_cache": normal(g, 2, 9, 2, 8), "cache_seqlens": USED, "causal": True}
    new = {"k": normal(g, 2, 1, 2, 8), "v": normal(g, 2, 1, 2, 8)}
    wanted = flashtile.attention_with_kvcache(**cache, **new)
    out = flashtile.attention_with_kvcache(**cache, **new, rotary_seqlens=USED)
    assert torch.equal(out, wanted)


def test_starts_of_a_padded_batch_have_32_bits_where_those_are_enough():
    found = [starts(4, length, torch.device("cpu")) for length in (2**29 - 1, 2**29)]
    assert [x.dtype for x in found] == [torch.int32, torch.int64]
    assert [x[-1].item() for x in found] == [2**31 - 4, 2**31]
