"""A bias without a gradient, which the CPU backend gives to PyTorch's kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conformance.harness import Sizes, bias_with_infinities, compare, resolve, split_options

import flashtile
from flashtile.backends.cpu import plan
from flashtile.testing import (
    attention_reference,
    attention_varlen_reference,
    cu_seqlens,
    generator,
    normal,
)

SIZES = Sizes(B=2, M=19, N=27, Hq=4, Hk=2, D=16)
SQUARE = Sizes(B=2, M=27, N=27, Hq=4, Hk=2, D=16)


@pytest.fixture(params=[256, 8], ids=["one tile", "several tiles"], autouse=True)
def rows_of_a_tile(request, monkeypatch):
    flashtile.clear_caches()
    monkeypatch.setattr(plan, "NATIVE_BIAS_BLOCK_M", request.param)
    yield
    flashtile.clear_caches()


@pytest.fixture
def kernels(monkeypatch):
    """The kernels of the plans that were made, "native" or "plain"."""
    made = []
    describe = plan.Plan

    def counted(kernel, *rest):
        made.append(kernel)
        return describe(kernel, *rest)

    monkeypatch.setattr(plan, "Plan", counted)
    return made


BIASES = {
    "full": lambda g, s, t: normal(g, s.B, s.Hq, s.M, s.N, dtype=t),
    "of a batch, with -inf": bias_with_infinities,
    # The first causal rows are blind, though later keys are not hidden.
    "of keys, with -inf first": lambda g, s, t: F.pad(
        normal(g, s.B, 1, 1, s.N - 3, dtype=t), (3, 0), value=-torch.inf
    ),
    "of keys": lambda g, s, t: normal(g, s.B, 1, 1, s.N, dtype=t),
    "of queries": lambda g, s, t: normal(g, s.Hq, s.M, 1, dtype=t),
    "matrix, transposed": lambda g, s, t: normal(g, s.N, s.M, dtype=t).T,
    "expanded": lambda g, s, t: normal(g, s.M, 1, dtype=t).expand(s.M, s.N),
}
MASKS = ("nothing", "causal", "window", "chunk", "sink", "seqused", "block mask for each head")


def check(bias, options, s, dtype, seed):
    g = generator(seed)
    leaves = {
        "q": normal(g, s.B, s.M, s.Hq, s.D, dtype=dtype),
        "k": normal(g, s.B, s.N, s.Hk, s.D, dtype=dtype),
        "v": normal(g, s.B, s.N, s.Hk, s.D, dtype=dtype),
    }
    options, for_reference, extra = split_options(resolve(options, g, s, dtype))
    compare(
        lambda x: flashtile.attention(**x, **options, bias=bias, return_lse=True, backend="cpu"),
        lambda x, **how: attention_reference(**x, **for_reference, bias=bias, **how),
        leaves | extra,
        seed=seed,
        through=("out",),
    )


@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("bias", BIASES)
def test_agrees_with_the_reference(bias, options, kernels, seed):
    for s in (SIZES, SQUARE):
        check(BIASES[bias](generator(seed), s, torch.float32), options, s, torch.float32, seed)
    assert set(kernels) == {"native"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", ["full", "of a batch, with -inf"])
def test_other_dtypes(bias, dtype, kernels, seed, monkeypatch):
    """As on a processor that multiplies matrices of bfloat16, where a bias keeps its precision."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for bias_dtype in (dtype, torch.float32):
        given = BIASES[bias](generator(seed), SQUARE, bias_dtype)
        check(given, "causal", SQUARE, dtype, seed)
    assert set(kernels) == {"native"}


def test_packed_sequences(kernels, seed):
    g = generator(seed)
    bias = bias_with_infinities(g, Sizes(B=3, M=14, N=18), torch.float32)
    options = {
        "cu_seqlens_q": cu_seqlens([5, 0, 14]),
        "cu_seqlens_k": cu_seqlens([7, 2, 18]),
        "max_seqlen_q": 14,
        "max_seqlen_k": 18,
        "causal": True,
        "bias": bias,
    }
    compare(
        lambda x: flashtile.attention_varlen(**x, **options),
        lambda x, **how: attention_varlen_reference(**x, **options, **how),
        {"q": normal(g, 19, 4, 16), "k": normal(g, 27, 2, 16), "v": normal(g, 27, 2, 16)},
        seed=seed,
        through=("out",),
    )
    assert set(kernels) == {"native"}


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_whose_lse_is_zero_is_not_taken_for_one_that_sees_no_key(causal):
    """The kernel returns 0 for both."""
    q, bias = torch.zeros(1, 3, 1, 8), torch.zeros(3, 3)
    bias[1] = -torch.inf
    bias[2, 1:] = -torch.inf
    out, lse = flashtile.attention(q, q, q + 1, bias=bias, causal=causal, return_lse=True)
    assert lse.flatten()[1:].tolist() == [-torch.inf, 0.0]
    assert out[0, 1:, 0, 0].tolist() == [0.0, 1.0]


def test_a_bias_with_a_gradient_runs_its_backward_on_plain_tiles(kernels):
    q = torch.randn(1, 5, 2, 8, requires_grad=True)
    bias = torch.randn(5, 5, requires_grad=True)
    flashtile.attention(q, q, q, bias=bias).sum().backward()
    assert kernels == ["native", "plain"]
    assert bias.grad is not None


def test_a_bias_without_a_gradient_after_one_with(kernels):
    """Otherwise equal calls have plans of their own."""
    q, bias = torch.randn(1, 5, 2, 8, requires_grad=True), torch.randn(5, 5)
    for needs_grad, kernel in ((True, "plain"), (False, "native")):
        bias.requires_grad_(needs_grad)
        flashtile.attention(q, q, q, bias=bias).sum().backward()
        assert kernels[-1] == kernel


def test_a_bias_alone_has_a_gradient_in_torch_func():
    q, bias = torch.randn(1, 5, 2, 8), torch.randn(5, 5)

    def loss(bias):
        return flashtile.attention(q, q, q, bias=bias).square().sum()

    wanted = torch.autograd.grad(loss(bias.requires_grad_()), bias)
    torch.testing.assert_close((torch.func.grad(loss)(bias.detach()),), wanted)
