"""PyTorch's SDPA and flashtile's give the same results, gradients and shapes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conformance.harness import judge_outputs
from rounded_results import judge_client

from flashtile.integrations import sdpa
from flashtile.testing import attention_reference

PYTORCH = F.scaled_dot_product_attention


def make(*shapes):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def assert_as_pytorch(q, k, v, **options):
    mask = options.get("attn_mask")
    inputs = [q, k, v] + ([mask] if mask is not None and mask.requires_grad else [])
    want = PYTORCH(q, k, v, **options)
    got = sdpa.scaled_dot_product_attention(q, k, v, **options)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)
    cotangent = torch.randn_like(want)
    wanted = torch.autograd.grad(want, inputs, cotangent)
    gotten = torch.autograd.grad(got, inputs, cotangent)
    for mine, theirs in zip(gotten, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("width", [4, 9])
def test_a_mask_of_another_width_is_refused_before_it_is_cut(width):
    q, k, v = make((1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    mask = torch.ones(4, width, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"attn_mask: got shape \(4, {width}\)"):
        sdpa.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)


def test_values_of_another_length_are_refused_before_they_are_cut():
    q, k, v = make((1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 7, 8))
    with pytest.raises(ValueError, match="value: got 7 rows, want 6"):
        sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)


LENGTHS = [(33, 33), (20, 50), (50, 20), (1, 9), (9, 1), (300, 290), (290, 300), (5, 0), (0, 5)]


@pytest.mark.parametrize(("M", "N"), LENGTHS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_causal_starts_top_left(M, N, is_causal, seed):
    assert_as_pytorch(*make((2, 3, M, 8), (2, 3, N, 8), (2, 3, N, 12)), is_causal=is_causal)


MASKS = [(2, 3, 20, 50), (1, 1, 20, 50), (20, 50), (2, 1, 1, 50), (1, 50), (20, 1), (3, 20, 50)]


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("kind", ["bool", "float", "float with gradient"])
def test_masks_broadcast(shape, kind, seed):
    if kind == "bool":
        mask = torch.rand(shape) > 0.3
    else:
        mask = torch.randn(shape, dtype=torch.float64).requires_grad_(kind != "float")
    assert_as_pytorch(*make((2, 3, 20, 8), (2, 3, 50, 8), (2, 3, 50, 8)), attn_mask=mask)


@pytest.mark.parametrize("pattern", ["random", "triangle", "documents", "keys"])
def test_bool_masks_of_many_tiles(pattern, seed):
    M, N = 530, 700
    i, j = torch.arange(M)[:, None], torch.arange(N)
    mask = {
        "random": torch.rand(M, N) > 0.5,
        "triangle": j <= i,
        "documents": i // 200 == j // 200,
        "keys": (j < torch.tensor([[300], [699]]))[:, None, None],
    }[pattern]
    assert_as_pytorch(*make((2, 2, M, 8), (2, 2, N, 8), (2, 2, N, 8)), attn_mask=mask)


@pytest.mark.parametrize(("M", "N"), [(30, 30), (30, 41), (41, 30)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_on_top_of_causal(M, N, kind, seed):
    """PyTorch's CPU kernel accepts both; its documentation excludes it."""
    mask = torch.rand(M, N) > 0.3
    mask = mask if kind == "bool" else torch.zeros(M, N).masked_fill(~mask, float("-inf"))
    visible = torch.ones(M, N, dtype=torch.bool).tril() & (mask if kind == "bool" else mask == 0)
    q, k, v = make((1, 2, M, 8), (1, 2, N, 8), (1, 2, N, 8))
    want = PYTORCH(q, k, v, attn_mask=visible)
    got = sdpa.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)


def test_rows_that_see_no_key(seed):
    mask = torch.rand(20, 50) > 0.3
    mask[3] = mask[19] = False
    assert_as_pytorch(*make((2, 3, 20, 8), (2, 3, 50, 8), (2, 3, 50, 8)), attn_mask=mask)
    mask[:] = False
    assert_as_pytorch(*make((2, 3, 20, 8), (2, 3, 50, 8), (2, 3, 50, 8)), attn_mask=mask)


SHAPES = {
    "no batch": ((3, 20, 8), (3, 30, 8), (3, 30, 8)),
    "no heads": ((20, 8), (30, 8), (30, 8)),
    "five dimensions": ((3, 2, 4, 20, 8), (3, 2, 4, 30, 8), (3, 2, 4, 30, 8)),
    "shared queries": ((1, 4, 20, 8), (2, 4, 30, 8), (2, 4, 30, 8)),
    "one key head": ((2, 4, 20, 8), (2, 1, 30, 8), (2, 1, 30, 8)),
    "one query head": ((2, 1, 20, 8), (2, 4, 30, 8), (2, 4, 30, 8)),
    "empty batch": ((0, 4, 20, 8), (0, 4, 30, 8), (0, 4, 30, 8)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("option", ["plain", "causal", "mask"])
def test_leading_dimensions(shapes, option, seed):
    options = {
        "plain": {},
        "causal": {"is_causal": True},
        "mask": {"attn_mask": torch.rand(20, 30) > 0.3},
    }[option]
    assert_as_pytorch(*make(*shapes), **options)


def test_mask_with_its_own_batch_dimensions(seed):
    tensors = make((3, 2, 4, 20, 8), (3, 2, 4, 30, 8), (3, 2, 4, 30, 8))
    assert_as_pytorch(*tensors, attn_mask=torch.rand(3, 1, 1, 20, 30) > 0.3)
    mask = torch.randn(1, 2, 4, 20, 30, dtype=torch.float64, requires_grad=True)
    assert_as_pytorch(*tensors, attn_mask=mask)


@pytest.mark.parametrize("heads", [(4, 2, 2), (4, 1, 1), (4, 2, 1), (6, 2, 3)])
def test_grouped_heads(heads, seed):
    shapes = [(2, H, length, 8) for H, length in zip(heads, (20, 30, 30), strict=True)]
    assert_as_pytorch(*make(*shapes), enable_gqa=True)


def test_scale_and_dtypes(seed):
    assert_as_pytorch(*make((2, 3, 20, 8), (2, 3, 30, 8), (2, 3, 30, 8)), scale=0.7)
    assert_as_pytorch(*make((2, 3, 20, 8), (2, 3, 30, 8), (2, 3, 30, 8)), scale=torch.tensor(0.7))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q, k, v = torch.randn(3, 2, 3, 64, 16).to(dtype).unbind()
        got = sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert got.dtype == dtype
        given = (x.transpose(1, 2) for x in (q, k, v))
        reference = partial(attention_reference, *given, causal=True)
        judge_outputs({"out": got.transpose(1, 2)}, reference, dtype, seed)


def test_dropout(seed):
    q, k, v = make((400, 2, 12, 8), (400, 2, 15, 8), (400, 2, 15, 8))
    one = [x[:1].expand_as(x) for x in (q, k, v)]
    outs = sdpa.scaled_dot_product_attention(*one, dropout_p=0.3)
    exact = sdpa.scaled_dot_product_attention(*[x[:1] for x in one])
    assert ((outs.mean(0) - exact[0]).abs() < 6 * outs.std(0) / 20 + 1e-9).all()
    torch.manual_seed(5)
    first = sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    torch.manual_seed(5)
    assert torch.equal(sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.3), first)
    assert_as_pytorch(q[:2], k[:2], v[:2], dropout_p=1.0)


def test_install_nests_and_restores():
    assert F.scaled_dot_product_attention is PYTORCH
    with sdpa.install():
        assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
        with sdpa.install():
            assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
        assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
    assert F.scaled_dot_product_attention is PYTORCH
    with pytest.raises(KeyError), sdpa.install():
        raise KeyError
    assert F.scaled_dot_product_attention is PYTORCH


def test_install_reaches_modules(seed, monkeypatch):
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 10, 32)
    padding = torch.arange(10) >= torch.tensor([[10], [7]])
    calls = []
    monkeypatch.setattr(
        sdpa, "attention", lambda *a, f=sdpa.attention, **k: calls.append(1) or f(*a, **k)
    )
    with sdpa.install():
        got = layer(x, src_key_padding_mask=padding)
    assert calls

    def plain(dtype):
        same = copy.deepcopy(layer).to(dtype)
        return {"out": same(x.to(dtype), src_key_padding_mask=padding)}

    judge_client({"out": got}, plain, seed)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["causal", "bool", "keys"])
def test_compile(option, seed):
    options = {
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(20, 30) > 0.3},
        "keys": {"attn_mask": torch.rand(2, 1, 1, 30) > 0.3},
    }[option]
    q, k, v = (x.detach() for x in make((2, 3, 20, 8), (2, 3, 30, 8), (2, 3, 30, 8)))
    compiled = torch.compile(sdpa.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, **options), PYTORCH(q, k, v, **options))


BAD = {
    "attn_mask.*broadcasts": {"attn_mask": torch.ones(20, 29, dtype=torch.bool)},
    "attn_mask.*dtype": {"attn_mask": torch.ones(20, 30, dtype=torch.long)},
    "dropout_p": {"dropout_p": -0.5},
    "heads": {"enable_gqa": True},
}


@pytest.mark.parametrize(("message", "options"), BAD.items())
def test_bad_arguments(message, options):
    q, k, v = make((2, 4, 20, 8), (2, 4, 30, 8), (2, 4, 30, 8))
    if options.get("enable_gqa"):
        k, v = make((2, 3, 30, 8), (2, 3, 30, 8))
    with pytest.raises((ValueError, TypeError), match=message):
        sdpa.scaled_dot_product_attention(q, k, v, **options)
    with pytest.raises(ValueError, match="query"):
        sdpa.scaled_dot_product_attention(torch.randn(8), k, v)
