"""Tiny transformers of diffusers give the same results with its native backend and flashtile."""

from __future__ import annotations

import copy

import pytest
import torch
from rounded_results import judge_client

from flashtile.integrations import diffusers as flashtile_diffusers

diffusers = pytest.importorskip("diffusers", reason="diffusers needs Python 3.11 or newer")


@pytest.fixture(autouse=True)
def native_backend_before_and_after(monkeypatch):
    """Choosing a model's backend sets diffusers' default, too."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    native = AttentionBackendName.NATIVE
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", native)


@pytest.fixture
def calls(monkeypatch):
    """The calls of our attention."""
    found = []
    function = flashtile_diffusers.scaled_dot_product_attention
    monkeypatch.setattr(
        flashtile_diffusers,
        "scaled_dot_product_attention",
        lambda *arguments: found.append(1) or function(*arguments),
    )
    return found


def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": torch.randn(2, 9, 4),
        "encoder_hidden_states": torch.randn(2, 5, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([1.0, 0.3]),
        "img_ids": torch.randint(0, 9, (9, 3)),
        "txt_ids": torch.zeros(5, 3),
    }
    return model, inputs, 2


def wan():
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=1,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 2, 6, 6),
        "timestep": torch.tensor([3, 5]),
        "encoder_hidden_states": torch.randn(2, 7, 16),
    }
    return model, inputs, 2


@pytest.mark.parametrize("make", [flux, wan])
def test_a_model_with_gradients(make, calls, seed):
    model, inputs, attentions = make()
    for parameter in model.parameters():  # some are zero at first, which would hide attention
        torch.nn.init.normal_(parameter, std=0.2)

    def output_and_gradients(dtype=torch.float32):
        same = copy.deepcopy(model).to(dtype)
        given = {n: x.to(dtype) if x.is_floating_point() else x for n, x in inputs.items()}
        out = same(**given, return_dict=False)[0]
        gradients = torch.autograd.grad(out.square().mean(), list(same.parameters()))
        names = (f"d{name}" for name, _ in same.named_parameters())
        return {"out": out.detach()} | dict(zip(names, gradients, strict=True))

    native = output_and_gradients()["out"]
    assert not calls
    model.set_attention_backend(flashtile_diffusers.register())
    got = output_and_gradients()
    assert len(calls) == attentions
    model.set_attention_backend("native")
    judge_client(got, output_and_gradients, seed)
    assert torch.equal(output_and_gradients()["out"], native)
    assert len(calls) == attentions


@pytest.mark.parametrize("shape", [(3, 8), (3, 1, 1, 8), (3, 2, 5, 8)])
@pytest.mark.parametrize("checks", [False, True])
def test_masks(shape, checks, calls, seed, monkeypatch):
    """(batch, seq_k) is a padding mask."""
    from diffusers.models import attention_dispatch

    monkeypatch.setattr(attention_dispatch._AttentionBackendRegistry, "_checks_enabled", checks)
    q = torch.randn(3, 5, 2, 8)
    k, v = torch.randn(2, 3, 8, 2, 8).unbind()
    mask = torch.rand(shape) > 0.4
    mask[..., 0] = True

    def native(dtype):
        given = (x.to(dtype) for x in (q, k, v))
        return {"out": attention_dispatch.dispatch_attention_fn(*given, mask)}

    with diffusers.attention_backend(flashtile_diffusers.register()):
        got = attention_dispatch.dispatch_attention_fn(q, k, v, mask)
    assert len(calls) == 1
    judge_client({"out": got}, native, seed)


def test_registering_again_changes_nothing():
    name = flashtile_diffusers.register()
    names = list(diffusers.models.attention_dispatch.AttentionBackendName)
    assert flashtile_diffusers.register() == name == "flashtile"
    assert list(diffusers.models.attention_dispatch.AttentionBackendName) == names
    assert names.count(name) == 1


def test_what_is_refused():
    q = torch.randn(1, 5, 2, 8)
    with pytest.raises(NotImplementedError, match="return_lse"):
        flashtile_diffusers.attend(q, q, q, return_lse=True)
    with pytest.raises(NotImplementedError, match="parallel"):
        flashtile_diffusers.attend(q, q, q, _parallel_config=object())
