"""`attn_mask` and `key_padding_mask` of `attention`: every shape, with other masks and options."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile.call import converted_masks
from flashtile.testing import attention_reference, generator, normal

from .harness import Sizes, compare, dropout_keep, resolve, split_options

pytestmark = pytest.mark.usefixtures("poisoned_buffers", "several_tiles")


@pytest.fixture(params=[False, True], ids=["", "several tiles"])
def several_tiles(request, backend, monkeypatch):
    """Masks of several tiles on a CPU, where those of one tile become a bias."""
    if request.param:
        if backend != "cpu":
            pytest.skip("only a CPU's tiles are larger than the masks here")
        monkeypatch.setattr(converted_masks, "CPU_TILE", (16, 16))


SIZES = Sizes(B=3, M=19, N=27, Hq=4, Hk=2, D=16, Dv=12)


def random_mask(g, *shape):
    return torch.rand(*shape, generator=g) < 0.6


def some_rows_see_nothing(g, s):
    mask = random_mask(g, s.B, 1, s.M, s.N)
    mask[:, :, 3:5] = False
    return mask


def right_padding(s):
    return torch.arange(s.N) < torch.tensor([s.N, 9, 0])[:, None]


# Each function makes bool masks: attn_mask, key_padding_mask.
MASKS = {
    "matrix": lambda g, s: {"attn_mask": random_mask(g, s.M, s.N)},
    "of a batch": lambda g, s: {"attn_mask": some_rows_see_nothing(g, s)},
    "of heads": lambda g, s: {"attn_mask": random_mask(g, s.Hq, s.M, s.N)},
    "of keys": lambda g, s: {"attn_mask": random_mask(g, s.B, 1, 1, s.N)},
    "of queries": lambda g, s: {"attn_mask": random_mask(g, s.B, s.Hq, s.M, 1)},
    "right padding": lambda g, s: {"key_padding_mask": right_padding(s)},
    "left padding": lambda g, s: {"key_padding_mask": right_padding(s).flip(1)},
    "padding with holes": lambda g, s: {"key_padding_mask": random_mask(g, s.B, s.N)},
    "both": lambda g, s: {
        "attn_mask": random_mask(g, s.M, s.N),
        "key_padding_mask": right_padding(s).flip(1),
    },
    "nothing hidden": lambda g, s: {"key_padding_mask": torch.ones(s.B, s.N, dtype=torch.bool)},
}


def dense_of(masks, s):
    """The intersection of the masks, bool (B, Hq, M, N)."""
    visible = torch.ones(s.B, s.Hq, s.M, s.N, dtype=torch.bool)
    if masks.get("attn_mask") is not None and masks["attn_mask"].dtype == torch.bool:
        visible &= masks["attn_mask"]
    if "key_padding_mask" in masks:
        visible &= masks["key_padding_mask"][:, None, None]
    return visible


def check(masks, options, backend, seed, s=SIZES, scores=None, dtype=torch.float32, **how):
    """`scores`: a floating attn_mask, with a gradient."""
    g = generator(seed)
    leaves = {
        "q": normal(g, s.B, s.M, s.Hq, s.D, dtype=dtype),
        "k": normal(g, s.B, s.N, s.Hk, s.D, dtype=dtype),
        "v": normal(g, s.B, s.N, s.Hk, s.value_dim, dtype=dtype),
    }
    options, for_reference, extra = split_options(resolve(options, g, s, dtype))
    keep = dropout_keep(seed, options.get("dropout_p", 0.0), s, backend)
    visible = dense_of(masks, s)
    if "block_mask" in for_reference:
        visible = visible & for_reference.pop("block_mask")
    if scores is not None:
        extra["attn_mask"] = scores.to(dtype)

    def reference(x, **how):
        given = dict(x)
        terms = [given.pop(name) for name in ("attn_mask", "bias") if name in given]
        bias = sum(terms) if terms else None
        return attention_reference(
            **given, bias=bias, block_mask=visible, **for_reference, keep=keep, **how
        )

    compare(
        lambda x: flashtile.attention(**x, **masks, **options, return_lse=True, backend=backend),
        reference,
        leaves | extra,
        seed=seed,
        **how,
    )


OPTIONS = ("nothing", "causal + alibi", "window + sink", "bias + dropout")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("masks", MASKS)
def test_bool_masks(masks, options, backend, seed):
    check(MASKS[masks](generator(seed), SIZES), options, backend, seed)


@pytest.mark.parametrize("masks", ["matrix", "both", "padding with holes"])
def test_bool_masks_beside_a_block_mask(masks, backend, seed):
    options = "block mask with partial tiles + bias for each key"
    check(MASKS[masks](generator(seed), SIZES), options, backend, seed)


@pytest.mark.parametrize("shape", [(19, 27), (4, 1, 27), (3, 1, 19, 27), (3, 4, 19, 1)], ids=str)
@pytest.mark.parametrize("options", ["nothing", "bias for each head + softcap"])
def test_floating_masks_have_gradients(shape, options, backend, seed):
    scores = normal(generator(seed + 9), *shape)
    masks = {"key_padding_mask": right_padding(SIZES)}
    for given in ({}, masks):
        check(given, options, backend, seed, scores=scores)


@pytest.mark.slow
@pytest.mark.parametrize("masks", ["of a batch", "both"])
def test_one_query_and_several_tiles(masks, backend, seed):
    for s in (Sizes(B=3, M=1, N=40), Sizes(B=3, M=300, N=290, Hq=2, Hk=1, D=8)):
        check(MASKS[masks](generator(seed), s), "causal", backend, seed, s=s)


def test_no_queries_and_no_keys(backend, seed):
    for s in (Sizes(B=3, M=0, N=5), Sizes(B=3, M=5, N=0)):
        masks = {"attn_mask": torch.ones(s.M, s.N, dtype=torch.bool)}
        masks |= {"key_padding_mask": torch.ones(s.B, s.N, dtype=torch.bool)}
        check(masks, "nothing", backend, seed, s=s)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype, backend, seed):
    masks = MASKS["both"](generator(seed), SIZES)
    check(masks, "causal", backend, seed, dtype=dtype)
    masks.pop("attn_mask")
    check(masks, "bias", backend, seed, dtype=dtype, scores=normal(generator(seed), 19, 27))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_biases_are_added_in_float32(dtype, backend, seed):
    """In 16 bits the sum would lose the smaller one."""
    g, s = generator(seed), SIZES
    q = normal(g, s.B, s.M, s.Hq, s.D, dtype=dtype)
    k, v = (normal(g, s.B, s.N, s.Hk, n, dtype=dtype) for n in (s.D, s.value_dim))
    large, small = 100 * normal(g, s.M, s.N), normal(g, s.Hq, 1, s.N)
    large, small = (x.to(dtype).requires_grad_() for x in (large, small))
    whole = (large.float() + small.float()).detach().requires_grad_()
    results = []
    for options in ({"bias": large, "attn_mask": small}, {"bias": whole}):
        out, lse = flashtile.attention(q, k, v, return_lse=True, backend=backend, **options)
        out.square().sum().backward()
        results.append((out, lse))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    for x in (large, small):
        assert torch.equal(x.grad, whole.grad.sum_to_size(x.shape).to(dtype))
