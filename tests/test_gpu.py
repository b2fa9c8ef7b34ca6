"""The public functions on a GPU, through dispatch, against the CPU backend in float64.

What a kernel computes is judged case by case in `tests/kernels`; this file checks that the whole
way of a call works on CUDA tensors: dispatch, autograd, the cache's append, compiled graphs.
"""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile.testing import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = ((2, 65, 6, 64), (2, 129, 2, 64), (2, 129, 2, 64))


def leaves(dtype, device="cpu"):
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=g).to(torch.bfloat16) for shape in SHAPES]
    return [x.to(device, dtype).requires_grad_() for x in made]


def run(call, inputs):
    """Outputs and gradients of `call(*inputs)`, on the CPU."""
    out, lse = call(*inputs)
    seed = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=seed).to(out)
    grads = torch.autograd.grad(out, inputs, dout)
    return [x.detach().cpu() for x in (out, lse, *grads)]


def plain(call, inputs):
    """The same in bfloat16 by the plain tiles, the precision that the rule compares with."""
    with flashtile.backend("cpu"):
        return run(call, inputs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "softcap": 5.0},
        {"window_size": (20, 10)},
        {"attention_chunk": 32},
    ],
    ids=str,
)
def test_attention(options):
    def call(q, k, v):
        return flashtile.attention(q, k, v, return_lse=True, **options)

    names = ("out", "lse", "dq", "dk", "dv")
    truth = run(call, leaves(torch.float64))
    low = plain(call, leaves(torch.bfloat16))
    got = run(call, leaves(torch.bfloat16, "cuda"))
    for name, x, exact, rough in zip(names, got, truth, low, strict=True):
        assert_close(name, x, exact, rough, dtype=torch.bfloat16)


def test_compiled_call_equals_the_eager_one():
    q, k, v = leaves(torch.bfloat16, "cuda")
    compiled = torch.compile(
        lambda q, k, v: flashtile.attention(q, k, v, causal=True), fullgraph=True
    )
    assert torch.equal(compiled(q, k, v), flashtile.attention(q, k, v, causal=True))


def test_dropout_draws_the_mask_of_the_cpu():
    q, k, v = (x.detach() for x in leaves(torch.bfloat16, "cuda"))
    torch.manual_seed(3)
    _, _, probs = flashtile.attention(q, k, v, dropout_p=0.3, return_attn_probs=True)
    torch.manual_seed(3)
    state = flashtile.dropout.draw_rng_state(q.device).cpu()
    coordinates = (torch.arange(2), torch.arange(6), torch.arange(65))
    kept = flashtile.dropout.keep_mask(state, 0.3, *coordinates, 0, 129)
    assert torch.equal(probs.cpu() > 0, kept)


@pytest.mark.parametrize("page_size", [0, 16])
def test_cache(page_size):
    g = torch.Generator().manual_seed(2)
    q = torch.randn(3, 2, 4, 64, generator=g)
    new = torch.randn(2, 3, 2, 2, 64, generator=g)
    caches = torch.randn(2, 3, 64, 2, 64, generator=g)
    cos, sin = torch.rand(2, 64, 16, generator=g).unbind(0)
    lengths = torch.tensor([3, 40, 0], dtype=torch.int32)
    table = torch.randperm(12, generator=g).view(3, 4).int() if page_size else None

    def call(device):
        stores = [x.clone().to(device) for x in caches]
        if page_size:
            stores = [x.view(12, 16, 2, 64) for x in stores]
        out = flashtile.attention_with_kvcache(
            q.to(device),
            *stores,
            *(x.to(device) for x in new),
            rotary_cos=cos.to(device),
            rotary_sin=sin.to(device),
            cache_seqlens=lengths.to(device),
            page_table=None if table is None else table.to(device),
            causal=True,
        )
        return [x.cpu() for x in (out, *stores)]

    got, want = call("cuda"), call("cpu")
    for name, x, y in zip(("out", "k_cache", "v_cache"), got, want, strict=True):
        torch.testing.assert_close(x, y, msg=lambda m, name=name: f"{name}: {m}")
