"""timm's transformers under `sdpa.install()`: equal results, or an error that names the bypass."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import vision_models
from rounded_results import judge_client

from flashtile.integrations import sdpa

pytestmark = pytest.mark.slow

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
SWIN = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 24}
SWIN |= {"depths": (1, 1), "num_heads": (2, 4)}


def make(name, options):
    model = vision_models.timm().create_model(name, num_classes=7, **options)
    return model, torch.randn(2, 3, 32, 32)


def logits_and_gradients(model, x, dtype):
    model = copy.deepcopy(model).to(dtype).eval()
    logits = model(x.to(dtype))
    gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    names = (f"d{name}" for name, _ in model.named_parameters())
    return {"logits": logits.detach()} | dict(zip(names, gradients, strict=True))


def assert_unchanged_by_install(model, x, attentions, seed):
    run = partial(logits_and_gradients, model, x)
    for dtype in (torch.float64, torch.float32):
        with sdpa.install(strict=True) as installation:
            got = run(dtype)
        assert installation.calls == attentions
        judge_client(got, run, seed)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_vision_transformers(name, seed):
    assert_unchanged_by_install(*make(name, VIT), attentions=2, seed=seed)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_a_model_with_a_softmax_of_its_own_is_named(name, seed):
    model, x = make(name, SWIN)
    with sdpa.install() as installation:
        model(x)
    assert installation.calls == 0
    with (
        sdpa.install(strict=True),
        pytest.raises(RuntimeError, match=r"layers\.0\.blocks\.0\.attn \(WindowAttention\)"),
    ):
        model(x)


def test_swin_with_timms_experimental_fused_attention(seed):
    layers = vision_models.timm().layers
    layers.set_fused_attn(True, experimental=True)
    try:
        model, x = make("swin_tiny_patch4_window7_224", SWIN)
    finally:
        layers.set_fused_attn(True, experimental=False)
    assert_unchanged_by_install(model, x, attentions=2, seed=seed)
