"""Models and flash_attn's modules on a GPU: the results and gradients of the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from test_bert import batch, config_of
from test_vit import SIZES
from tiny_gpt import build, tokens
from torch import nn

import flashtile
from flashtile.layers import dropout_norm
from flashtile.models import bert, vit
from flashtile.models.decoding import decode
from flashtile.testing import assert_close, attention_reference, generator, normal

pytestmark = pytest.mark.gpu


def compare(model: nn.Module, **inputs: torch.Tensor) -> None:
    """Results and gradients of `model` in float32 on the GPU, by the rule."""

    def run(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(model).to(device, dtype)
        moved = {
            name: x.to(device, dtype) if x.is_floating_point() else x.to(device)
            for name, x in inputs.items()
        }
        out = own(**moved)
        out = getattr(out, "prediction_logits", out)
        out.square().sum().backward()
        gradients = {n: x.grad.cpu() for n, x in own.named_parameters() if x.grad is not None}
        return {"out": out.detach().cpu()} | gradients

    got, exact, plain = (
        run(*how)
        for how in (("cuda", torch.float32), ("cpu", torch.float64), ("cpu", torch.float32))
    )
    for name, x in got.items():
        assert_close(name, x, exact[name], plain[name])


@pytest.mark.parametrize("masked", [False, True])
def test_bert(masked: bool, seed: int) -> None:
    model = bert.BertForPreTraining(config_of(use_flash_attn=True)).eval()
    compare(model, **batch(masked)[0])


def test_vision_transformer(seed: int) -> None:
    model = vit.VisionTransformer(**SIZES, num_classes=7, use_flash_attn=True).eval()
    compare(model, x=torch.randn(2, 3, 16, 24))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_decode_with_a_graph(name: str, seed: int) -> None:
    model, prompts = build(name, dtype=torch.float32).cuda(), tokens(3, 7).cuda()
    wanted, got = (decode(prompts, model, 18, cg=cg) for cg in (False, True))
    assert torch.equal(got.sequences, wanted.sequences)
    for graph, plain in zip(got.scores, wanted.scores, strict=True):
        torch.testing.assert_close(graph, plain)


def test_dropout_add_layer_norm(seed: int) -> None:
    x, residual = torch.randn(5, 64), torch.randn(5, 64)
    weight, bias = torch.randn(64), torch.randn(64)

    def run(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        given = (t.to(device, dtype) for t in (x, residual, weight, bias))
        return dropout_norm.dropout_add_layer_norm(*given, 0.0, 1e-5, prenorm=True)

    results = zip(
        run("cuda", torch.float32),
        run("cpu", torch.float64),
        run("cpu", torch.float32),
        strict=True,
    )
    for got, exact, plain in results:
        assert_close("normalised and sum", got.cpu(), exact, plain)


@pytest.mark.parametrize("rows", [1, 2, 70])
def test_576_columns_of_keys(rows: int, seed: int) -> None:
    """Latent attention with one latent head, whose first 512 columns are the values."""
    g = generator(seed)
    q = normal(g, 2, rows, 16, 64, dtype=torch.bfloat16).detach()
    qv = normal(g, 2, rows, 16, 512, dtype=torch.bfloat16).detach()
    k = normal(g, 2, 150, 1, 64, dtype=torch.bfloat16).detach()
    v = normal(g, 2, 150, 1, 512, dtype=torch.bfloat16).detach()
    on_gpu = (x.cuda() for x in (q, k, v))
    got = flashtile.attention(*on_gpu, qv=qv.cuda(), causal=True)
    exact, plain = (
        attention_reference(q, k, v, qv=qv, causal=True, compute_dtype=dtype).out
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert_close("out", got.cpu(), exact, plain)
