"""Gradients against finite differences, in float64, by `torch.autograd.gradcheck`."""

from __future__ import annotations

import pytest
import torch
from conformance.harness import Sizes, resolve, split_options

import flashtile
from flashtile.testing import cu_seqlens, generator, normal, packed_qkv, qkv

pytestmark = pytest.mark.slow

F64 = torch.float64

COMBINATIONS = (
    "nothing",
    "causal",
    "window",
    "chunk",
    "softcap",
    "alibi",
    "bias",
    "bias shared by heads",
    "bias for each key",
    "learned alibi",
    "learned alibi for each batch + causal + seqused",
    "relative bias",
    "relative bias of all distances + learned alibi + softcap + dropout",
    "sink",
    "dropout",
    "seqused",
    "block mask with partial tiles",
    "causal + sink",
    "causal window + softcap + bias + sink + dropout + alibi",
)


def live(lse):
    """LSE without the -inf of dead rows, which have no finite difference."""
    return lse.masked_fill(lse == -torch.inf, 0)


@pytest.mark.parametrize("names", COMBINATIONS)
def test_dense(names, backend, seed):
    g = generator(seed)
    s = Sizes(B=2, M=4, N=6, Hq=2, Hk=1, D=3, Dv=2)
    inputs = qkv(g, s.B, s.M, s.N, s.Hq, s.Hk, s.D, s.Dv, dtype=F64)
    options, _, extra = split_options(resolve(names, g, s, F64))
    leaves = [x.requires_grad_() for x in (*inputs, *extra.values())]

    def call(q, k, v, *rest):
        torch.manual_seed(seed)
        named = dict(zip(extra, rest, strict=True))
        out, lse = flashtile.attention(
            q, k, v, **named, **options, return_lse=True, backend=backend
        )
        return out, live(lse)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=len(extra) == 0)


@pytest.mark.parametrize("names", ["nothing", "causal", "softcap + sink + bias", "dropout"])
def test_packed(names, backend, seed):
    g = generator(seed)
    lengths_q, lengths_k = [3, 0, 5], [4, 2, 0]
    s = Sizes(B=3, M=5, N=4, Hq=2, Hk=1, D=3)
    inputs = packed_qkv(g, lengths_q, lengths_k, s.Hq, s.Hk, s.D, dtype=F64)
    options, _, extra = split_options(resolve(names, g, s, F64))
    leaves = [x.requires_grad_() for x in (*inputs, *extra.values())]
    packing = (cu_seqlens(lengths_q), cu_seqlens(lengths_k), s.M, s.N)

    def call(q, k, v, *rest):
        torch.manual_seed(seed)
        named = dict(zip(extra, rest, strict=True))
        out, lse = flashtile.attention_varlen(
            q, k, v, *packing, **named, **options, return_lse=True, backend=backend
        )
        return out, live(lse)

    assert torch.autograd.gradcheck(call, leaves)


def test_packed_qkv_in_one_tensor(seed):
    packed = normal(generator(seed), 2, 5, 3, 2, 4, dtype=F64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: flashtile.flash_attn_qkvpacked_func(x, causal=True), packed
    )
