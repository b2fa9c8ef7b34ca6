"""The names of FlashAttention 1, and its Triton functions, against the float64 reference."""

from __future__ import annotations

import inspect

import pytest
import torch
from conformance.harness import compare

from flashtile import flash_attn_1_interface as fa1
from flashtile import flash_attn_triton
from flashtile.modules.flash_attention import FlashMHA
from flashtile.testing import (
    attention_reference,
    attention_varlen_reference,
    cu_seqlens,
    generator,
    normal,
)

LENGTHS_Q = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
OPTIONS = "dropout_p softmax_scale causal return_attn_probs deterministic"
BIAS = "bias causal softmax_scale"
PARAMETERS = {
    fa1.flash_attn_unpadded_func: f"q k v {LENGTHS_Q} {OPTIONS}",
    fa1.flash_attn_unpadded_kvpacked_func: f"q kv {LENGTHS_Q} {OPTIONS}",
    fa1.flash_attn_unpadded_qkvpacked_func: f"qkv cu_seqlens max_seqlen {OPTIONS}",
    flash_attn_triton.flash_attn_func: f"q k v {BIAS}",
    flash_attn_triton.flash_attn_kvpacked_func: f"q kv {BIAS}",
    flash_attn_triton.flash_attn_qkvpacked_func: f"qkv {BIAS}",
}


@pytest.mark.parametrize("function", PARAMETERS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_parameters(function):
    assert list(inspect.signature(function).parameters) == PARAMETERS[function].split()


CU_Q, CU_K = cu_seqlens([5, 0, 3]), cu_seqlens([2, 4, 3])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", ["q k v", "q kv", "qkv"])
def test_packed_sequences(packed, causal, seed):
    cu_k = CU_Q if causal or packed == "qkv" else CU_K
    g = generator(seed)
    parts = {"q": 1, "k": 1, "v": 1, "kv": 2, "qkv": 3}
    leaves = {}
    for name in packed.split():
        total = int(CU_Q[-1] if "q" in name else cu_k[-1])
        shape = (total, parts[name], 4, 16) if parts[name] > 1 else (total, 4, 16)
        leaves[name] = normal(g, *shape)
    function = {
        "q k v": fa1.flash_attn_unpadded_func,
        "q kv": fa1.flash_attn_unpadded_kvpacked_func,
        "qkv": fa1.flash_attn_unpadded_qkvpacked_func,
    }[packed]
    lengths = (CU_Q, 5) if packed == "qkv" else (CU_Q, cu_k, 5, 5)

    def reference(x, **how):
        q, k, v = (
            part for name, t in x.items() for part in (t.unbind(1) if parts[name] > 1 else (t,))
        )
        how |= {"causal": causal, "softmax_scale": 0.3}
        return attention_varlen_reference(q, k, v, CU_Q, cu_k, 5, 5, **how)

    compare(
        lambda x: function(*x.values(), *lengths, 0.0, 0.3, causal, False, True),
        reference,
        leaves,
        seed=seed,
    )


def test_what_meant_something_else_is_refused():
    x = torch.zeros(8, 2, 8)
    call = fa1.flash_attn_unpadded_func
    with pytest.raises(NotImplementedError, match="return_attn_probs: got True"):
        call(x, x, x, CU_Q, CU_Q, 5, 5, 0.0, return_attn_probs=True)
    with pytest.raises(NotImplementedError, match="starts at the top left"):
        call(x, x, x, CU_Q, cu_seqlens([4, 1, 3]), 5, 5, 0.0, causal=True)
    assert call(x, x, x, CU_Q, CU_Q.clone(), 5, 5, 0.0, causal=True).shape == x.shape
    with pytest.raises(TypeError, match="window_size"):
        call(x, x, x, CU_Q, CU_Q, 5, 5, 0.0, window_size=(1, 1))
    with pytest.raises(TypeError, match="too many positional"):
        call(x, x, x, CU_Q, CU_Q, 5, 5, 0.0, None, False, False, False, 0)


def hiding(visible):
    """A bias that hides what is 0."""
    return torch.zeros_like(visible).masked_fill(visible == 0, -torch.inf)


@pytest.mark.parametrize("columns", ["one", "all", "none"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("M", "N"), [(5, 5), (4, 7), (7, 4)])
def test_bias(M, N, causal, columns, seed):
    """With the mask of Triton's functions: query i sees the keys up to i."""
    g = generator(seed)
    leaves = {"q": normal(g, 2, M, 4, 16), "k": normal(g, 2, N, 4, 16), "v": normal(g, 2, N, 4, 16)}
    if columns != "none":
        leaves["bias"] = normal(g, 1, 4, 1 if columns == "one" else M, 1 if columns == "one" else N)
    hidden = hiding(torch.ones(M, N).tril(0 if causal else N))

    def reference(x, **how):
        bias = x.get("bias", 0) + hidden
        return attention_reference(**x | {"bias": bias}, softmax_scale=0.3, **how)

    def ours(x):
        return flash_attn_triton.flash_attn_func(*x.values(), *[None][len(x) - 3 :], causal, 0.3)

    compare(ours, reference, leaves, seed=seed)


def test_bias_of_packed_projections(seed):
    g = generator(seed)
    qkv, bias = normal(g, 2, 5, 3, 4, 16), normal(g, 2, 4, 1, 5)
    q, k, v = qkv.unbind(2)
    wanted = flash_attn_triton.flash_attn_func(q, k, v, bias, True, 0.2)
    for got in (
        flash_attn_triton.flash_attn_qkvpacked_func(qkv, bias, True, 0.2),
        flash_attn_triton.flash_attn_kvpacked_func(q, qkv[:, :, 1:], bias, True, 0.2),
    ):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_layer(causal, seed):
    """A token of the padding sees nothing and is not seen, wherever it stands."""
    torch.manual_seed(seed)
    layer = FlashMHA(32, 2, causal=causal, dtype=torch.float64)
    assert [name for name, _ in layer.named_parameters()] == [
        f"{part}.{name}" for part in ("Wqkv", "out_proj") for name in ("weight", "bias")
    ]
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    q, k, v = layer.Wqkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
    visible = mask[:, None, None, :] * torch.ones(5, 5).tril(0 if causal else 5)
    wanted = attention_reference(q, k, v, bias=hiding(visible)).out * mask[:, :, None, None]
    got, weights = layer(x, key_padding_mask=mask)
    assert weights is None
    torch.testing.assert_close(got, layer.out_proj(wanted.flatten(-2).double()))
    torch.testing.assert_close(layer(x)[0][1], got[1])
    qkv = layer.Wqkv(x[1]).unflatten(-1, (3, 2, 16))
    packed, _ = layer.inner_attn(qkv, causal=causal, cu_seqlens=cu_seqlens([5]), max_s=5)
    torch.testing.assert_close(layer.out_proj(packed.flatten(-2)), got[1])
    with pytest.raises(NotImplementedError, match="need_weights: got True"):
        layer(x, need_weights=True)
    for wrong in ({"batch_first": False}, {"num_heads": 3}):
        with pytest.raises(ValueError, match="batch_first, num_heads: got"):
            FlashMHA(**({"embed_dim": 32, "num_heads": 2} | wrong))
