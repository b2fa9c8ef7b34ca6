"""`return_attn_probs`: the whole matrix, exactly normalised, negative where dropped."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from conformance.harness import (
    Sizes,
    dropout_keep,
    judge_outputs,
    resolve,
    resolve_packed,
    split_options,
)

import flashtile
from flashtile.backends import cpu
from flashtile.testing import (
    DTYPES,
    attention_reference,
    attention_varlen_reference,
    cu_seqlens,
    generator,
    packed_qkv,
    qkv,
)

OPTIONS = (
    "nothing",
    "causal",
    "window",
    "chunk",
    "softcap",
    "alibi",
    "bias shared by heads",
    "sink",
    "dropout",
    "seqused",
    "block mask with partial tiles",
    "causal window + softcap + alibi + bias + sink + dropout + seqused + block mask",
)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))


@pytest.mark.parametrize("names", OPTIONS)
@dtypes
def test_dense(names, dtype, backend, seed):
    g = generator(seed)
    s = Sizes()
    inputs = qkv(g, s.B, s.M, s.N, s.Hq, s.Hk, s.D, dtype=dtype)
    options, for_reference, leaves = split_options(resolve(names, g, s, dtype))
    keep = dropout_keep(seed, options.get("dropout_p", 0.0), s, backend)
    torch.manual_seed(seed)
    out, lse, probs = flashtile.attention(
        *inputs, **options, **leaves, return_attn_probs=True, backend=backend
    )
    assert probs.shape == (s.B, s.Hq, s.M, s.N)
    assert probs.dtype == dtype
    judge_outputs(
        {"out": out, "lse": lse, "probs": probs},
        partial(attention_reference, *inputs, **for_reference, **leaves, keep=keep),
        dtype,
        seed,
    )


@pytest.mark.parametrize("names", OPTIONS)
def test_packed(names, backend, seed):
    g = generator(seed)
    lengths_q, lengths_k = [5, 0, 9, 1], [7, 3, 11, 0]
    s = Sizes(B=4, M=9, N=11)
    inputs = packed_qkv(g, lengths_q, lengths_k)
    options, for_reference, leaves = split_options(
        resolve_packed(names, g, s, torch.float32, lengths_q, lengths_k)
    )
    keep = dropout_keep(seed, options.get("dropout_p", 0.0), s, backend)
    call = (cu_seqlens(lengths_q), cu_seqlens(lengths_k), s.M, s.N)
    torch.manual_seed(seed)
    _, _, probs = flashtile.attention_varlen(
        *inputs, *call, **options, **leaves, return_attn_probs=True, backend=backend
    )
    assert probs.shape == (s.B, s.Hq, s.M, s.N)
    judge_outputs(
        {"probs": probs},
        partial(attention_varlen_reference, *inputs, *call, **for_reference, **leaves, keep=keep),
        torch.float32,
        seed,
    )


def test_rows_sum_to_one(backend, seed):
    q, k, v = qkv(generator(seed), M=40, N=300)
    torch.manual_seed(seed)
    _, _, probs = flashtile.attention(
        q, k, v, dropout_p=0.3, return_attn_probs=True, backend=backend
    )
    torch.testing.assert_close(probs.abs().sum(-1), torch.ones(2, 4, 40))


def test_the_sign_is_the_dropout_of_the_output(backend, seed):
    q, k, v = qkv(generator(seed), Hq=2, Hk=2)
    torch.manual_seed(seed)
    out, _, probs = flashtile.attention(
        q, k, v, dropout_p=0.4, return_attn_probs=True, backend=backend
    )
    assert 0.2 < (probs < 0).double().mean() < 0.6
    reference = partial(attention_reference, q, k, v, dropout_p=0.4, keep=~probs.signbit())
    judge_outputs({"out": out}, reference, out.dtype, seed)


def test_training_goes_on_beside_the_probabilities(backend, seed):
    g = generator(seed)
    leaves = [x.requires_grad_() for x in qkv(g)]
    grads = []
    for how in ({}, {"return_attn_probs": True}):
        result = flashtile.attention(*leaves, causal=True, backend=backend, **how)
        out = result[0] if how else result
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_a_backend_without_probabilities_is_passed_over(monkeypatch):
    """Also after the same call without probabilities."""
    able = cpu.unsupported_reasons

    def reasons(problem):
        refusal = ["probabilities (not on this backend)"] if problem.wants_probabilities else []
        return able(problem) + refusal

    monkeypatch.setattr(cpu, "unsupported_reasons", reasons)
    q = torch.randn(1, 7, 2, 24)
    assert flashtile.attention(q, q, q).shape == q.shape
    with pytest.raises(NotImplementedError, match="cpu: probabilities"):
        flashtile.attention(q, q, q, return_attn_probs=True)
    assert flashtile.explain(q, q, q).chosen == "cpu"
    assert flashtile.explain(q, q, q, return_attn_probs=True).chosen is None
