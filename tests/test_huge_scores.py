"""Masks made of huge numbers, such as -1e30 or the smallest number of a dtype, on the CPU, and in
functions of other libraries.
"""

from __future__ import annotations

import pytest
import torch
from kernels.huge_scores import HUGE_CASES, assert_huge_case

import flashtile
from flashtile.backends import cpu
from flashtile.integrations.sdpa import scaled_dot_product_attention
from flashtile.ops.merge.formula import merge, merge_parts
from flashtile.testing import generator, normal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
IDS = {"ids": lambda x: str(x).removeprefix("torch.")}


@pytest.mark.parametrize("dtype", DTYPES, **IDS)
@pytest.mark.parametrize("name", HUGE_CASES)
def test_cpu(name: str, dtype: torch.dtype, seed: int):
    assert_huge_case(cpu, name, dtype, seed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_without_a_gradient(causal: bool, device: str, seed: int):
    """As in a model: left padding under a causal mask, with the smallest number of float32."""
    g = generator(seed)
    q, k, v, dout = (normal(g, 2, 2, n, 16).to(device) for n in (600, 640, 640, 600))
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(2, 1, 600, 640, device=device)
    mask[0, ..., :90], mask[1, :, 7] = lowest, lowest
    hidden = torch.ones(600, 640, dtype=torch.bool, device=device).triu(41)
    seen = mask.masked_fill(hidden, -torch.inf) if causal else mask

    def gradients(attend):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        return out, *torch.autograd.grad(out, leaves, dout.to(out))

    def flash(q, k, v):
        heads_after_rows = (x.transpose(1, 2) for x in (q, k, v))
        return flashtile.attention(*heads_after_rows, bias=mask, causal=causal).transpose(1, 2)

    def exact(q, k, v):
        q, k, v = q.double(), k.double(), v.double()
        return (q @ k.mT / 4 + seen.double()).softmax(-1) @ v

    attempts = [flash]
    if not causal:
        attempts.append(lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask))
    wanted = gradients(exact)
    for attend in attempts:
        for got, want in zip(gradients(attend), wanted, strict=True):
            torch.testing.assert_close(got.double(), want.double(), atol=2e-5, rtol=2e-5)


def test_merged_parts_weigh_one_together():
    """Whatever the log-sum-exps, which have lost the sizes of the parts."""
    out, lse = torch.ones(2, 5, 4), torch.tensor([0.0, -1e4, -1e9, -3e38, -torch.inf]).repeat(2, 1)
    wanted = torch.ones(5, 4)
    wanted[-1] = 0
    merged_twice = merge(out[0], lse[0], out[1], lse[1]), merge_parts(out, lse, torch.float32)
    for merged, merged_lse in merged_twice:
        torch.testing.assert_close(merged, wanted)
        assert merged_lse[:4].isfinite().all()
        assert merged_lse[4] == -torch.inf
