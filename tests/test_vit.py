"""Vision transformers: the results and gradients of timm, and what training drops."""

from __future__ import annotations

import copy

import pytest
import torch
import vision_models
from torch import nn

from flashtile.models import vit
from flashtile.modules import block

SIZES = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}


def theirs(**options):
    model = vision_models.timm().create_model(
        "vit_base_patch16_224", **SIZES, num_classes=7, **options
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2).add_(parameter.dim() == 1)
    return model.double().eval()


@pytest.mark.parametrize("use_flash_attn", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"no_embed_class": True}, {"qkv_bias": False}], ids=lambda x: " ".join(x)
)
def test_results_of_timm(options, use_flash_attn, seed):
    their = theirs(**options)
    our = vit.VisionTransformer(**SIZES, num_classes=7, use_flash_attn=use_flash_attn, **options)
    our = our.double().eval()
    our.load_state_dict(their.state_dict())
    x = torch.randn(2, 3, 16, 24, dtype=torch.float64)
    got, wanted = our(x), their(x)
    assert got.shape == (2, 7)
    torch.testing.assert_close(got, wanted)
    features = our.forward_features(x)
    torch.testing.assert_close(features, their.forward_features(x))
    torch.testing.assert_close(our.forward_features(x, all_tokens=False), features[:, :1])
    torch.testing.assert_close(our.forward_head(features, pre_logits=True), features[:, 0])

    got.square().sum().backward()
    wanted.square().sum().backward()
    gradients = copy.deepcopy(our)  # a map of state dicts is one of gradients, too
    gradients.load_state_dict({name: x.grad for name, x in their.named_parameters()})
    for name, gradient in gradients.named_parameters():
        torch.testing.assert_close(our.get_parameter(name).grad, gradient.detach())


def test_own_weights_and_names(seed):
    ours = [vit.VisionTransformer(**SIZES, num_classes=0) for _ in range(2)]
    state = ours[0].state_dict()
    assert ours[1].load_state_dict(state).missing_keys == []
    assert list(state) == list(ours[0].state_dict())  # it is not changed
    x = torch.randn(2, 3, 16, 24)
    torch.testing.assert_close(ours[0](x), ours[1](x))
    assert ours[0](x).shape == (2, 48)
    assert ours[0].no_weight_decay() <= dict(ours[0].named_parameters()).keys()
    with pytest.raises(RuntimeError, match=r"pos_embed"):
        ours[0].load_state_dict({name: x for name, x in state.items() if name != "pos_embed"})
    stds = {name: x.std().item() for name, x in ours[0].named_parameters() if x.dim() > 1}
    assert stds.pop("cls_token") < 1e-5
    assert all(0.017 < std < 0.023 for std in stds.values())


def test_dropped_branches(seed):
    """With a rate of 1, the last layer is dropped; both of its branches are added after it."""
    model = vit.VisionTransformer(**SIZES, drop_rate=0.1, attn_drop_rate=0.2, drop_path_rate=1.0)
    rates = [(layer.drop_path1.p, layer.drop_path2.p) for layer in model.blocks]
    assert [*rates, model.drop_path.p] == [(0.0, 0.0), (0.0, 0.5), (0.5, 1.0), 1.0]
    layers = list(model.blocks)
    rates = {layer.dropout1.p for layer in layers} | {layer.dropout2.p for layer in layers}
    assert rates | {model.dropout.p} == {0.1}
    assert {layer.mixer.dropout for layer in layers} == {0.2}

    model = vit.VisionTransformer(**SIZES | {"depth": 2}, drop_path_rate=1.0).double().train()
    x = torch.randn(2, 3, 16, 24, dtype=torch.float64)
    dropped = model.forward_features(x)
    model.blocks[1] = nn.Identity()
    first = model.blocks[0]
    tokens = torch.cat((model.cls_token.expand(2, -1, -1), model.patch_embed(x)), 1)
    hidden, stream = first(tokens + model.pos_embed)
    torch.testing.assert_close(dropped, model.norm(hidden + stream))


def test_layers(seed):
    model = vit.VisionTransformer(**SIZES, fused_mlp=True, mlp_ratio=2.5).bfloat16()
    layers = list(model.blocks)
    assert all(isinstance(layer, block.Block) and layer.residual_in_fp32 for layer in layers)
    assert [layer.mixer.cross_attn for layer in layers] == [False, False, True]
    x = torch.randn(4)
    tanh = nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(layers[0].mlp.activation(x), tanh)
    assert layers[0].mlp.fc1.out_features == 120
    assert model(torch.randn(1, 3, 16, 24).bfloat16()).dtype == torch.bfloat16
    relu = vit.VisionTransformer(**SIZES, act_layer=nn.ReLU, norm_layer=nn.RMSNorm)
    assert isinstance(relu.blocks[0].mlp.activation, nn.ReLU)
    assert isinstance(relu.norm, nn.RMSNorm) and isinstance(relu.blocks[0].norm1, nn.RMSNorm)
    with torch.device("meta"):
        model = vit.vit_base_patch16_224(num_classes=1000)
    assert sum(x.numel() for x in model.parameters()) == 86_567_656


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("global_pool", "avg"),
        ("init_values", 1e-5),
        ("class_token", False),
        ("pre_norm", True),
        ("fc_norm", True),
        ("weight_init", "jax"),
    ],
)
def test_errors(argument, value):
    with pytest.raises(ValueError, match=f"{argument}: got {value!r}, want"):
        vit.VisionTransformer(**{argument: value})


def test_weights_to_download():
    with pytest.raises(ValueError, match="pretrained: got True"):
        vit.vit_base_patch16_224(pretrained=True)
    with pytest.raises(ValueError, match="mode: got 'jax'"):
        vit.VisionTransformer(**SIZES).init_weights("jax")
