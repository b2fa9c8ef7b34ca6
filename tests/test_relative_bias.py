"""A bias for each distance against the bias of T5, and against the same bias as a matrix."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile.backends.cpu.distances import diagonal_sums
from flashtile.testing import generator, normal, qkv


@pytest.mark.parametrize("is_decoder", [False, True])
def test_buckets_of_t5(is_decoder, seed):
    """The recipe of docs/biases.md, with gradients."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(
        num_heads=4, relative_attention_max_distance=40, is_decoder=is_decoder, use_cache=False
    )
    layer = t5.T5Attention(config, has_relative_attention_bias=True)
    R = layer.relative_attention_max_distance
    bucket = layer._relative_position_bucket(
        torch.arange(-R, R + 1), not is_decoder, layer.relative_attention_num_buckets, R
    )
    weight = layer.relative_attention_bias.weight
    g = generator(seed)
    q, k, v = qkv(g, B=2, M=130, N=130, Hq=4, Hk=2)
    dout = normal(g, *q.shape)
    found = []
    for bias in (
        {"relative_bias": weight[bucket].T},
        {"bias": layer.compute_bias(130, 130, device="cpu")},
    ):
        out = flashtile.attention(q, k, v, softmax_scale=1.0, **bias)
        found.append((out, *torch.autograd.grad(out, weight, dout)))
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)


def test_slopes_have_no_gradient_where_none_is_wanted():
    q, slopes = torch.randn(1, 5, 4, 8, requires_grad=True), torch.rand(4)
    flashtile.attention(q, q, q, alibi_slopes=slopes).sum().backward()
    assert slopes.grad is None


def test_vmap_over_tables(seed):
    g = generator(seed)
    q, k, v = qkv(g, B=2, M=5, N=6)
    tables = normal(g, 3, 4, 5)
    got = torch.vmap(lambda table: flashtile.attention(q, k, v, relative_bias=table))(tables)
    for table, out in zip(tables, got, strict=True):
        torch.testing.assert_close(out, flashtile.attention(q, k, v, relative_bias=table))


def test_gradients_of_torch_func(seed):
    g = generator(seed)
    q, k, v = qkv(g, B=2, M=5, N=6)
    leaves = normal(g, 4, 5), normal(g, 4).abs()

    def loss(table, slopes):
        out = flashtile.attention(q, k, v, relative_bias=table, alibi_slopes=slopes)
        return out.square().sum()

    wanted = torch.autograd.grad(loss(*(x.requires_grad_() for x in leaves)), leaves)
    got = torch.func.grad(loss, argnums=(0, 1))(*(x.detach() for x in leaves))
    for mine, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (5, 1), (3, 7), (7, 3)], ids=str)
def test_sums_over_diagonals(size, seed):
    x = normal(generator(seed), 2, *size, dtype=torch.float64)
    wanted = [torch.diagonal(x, n, 1, 2).sum(-1) for n in range(1 - size[0], size[1])]
    torch.testing.assert_close(diagonal_sums(x), torch.stack(wanted, -1))
