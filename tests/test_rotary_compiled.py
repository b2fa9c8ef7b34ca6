"""Compiled rotary embedding in place, of leaves that require a gradient and of other tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from flashtile.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)
from flashtile.testing.inputs import generator, normal

pytestmark = pytest.mark.slow

Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]

# name: (function, shape of its input, options)
CALLS: dict[str, tuple[Rotate, tuple[int, ...]]] = {
    "qkv": (apply_rotary_emb_qkv_, (2, 7, 3, 2, 16)),
    "qkv of grouped heads": (
        partial(apply_rotary_emb_qkv_, num_heads_q=4, interleaved=True),
        (2, 7, 8, 16),
    ),
    "kv": (apply_rotary_emb_kv_, (2, 7, 2, 2, 16)),
    "inplace": (partial(apply_rotary_emb, inplace=True), (2, 7, 3, 16)),
    "with offsets": (
        partial(apply_rotary_emb, inplace=True, seqlen_offsets=torch.tensor([2, 0])),
        (2, 7, 3, 16),
    ),
}


def run(rotate: Rotate, x: Tensor, is_leaf: bool, dout: Tensor) -> tuple[Tensor, ...]:
    """(result, memory of the input, gradient)."""
    angle = torch.linspace(0, 5, 9 * 6).view(9, 6)
    leaf = x.clone().requires_grad_()
    given = leaf if is_leaf else leaf * 1
    out = rotate(given, angle.cos(), angle.sin())
    return out.detach(), given.detach(), torch.autograd.grad(out, leaf, dout)[0]


@pytest.mark.parametrize(
    ("name", "backend", "is_leaf"),
    [
        *((name, "aot_eager", True) for name in CALLS),
        ("qkv", "eager", True),
        ("qkv", "aot_eager", False),
    ],
)
def test_as_eager(name: str, backend: str, is_leaf: bool, seed: int) -> None:
    rotate, shape = CALLS[name]
    x, dout = normal(generator(seed), *shape), normal(generator(seed + 1), *shape)
    wanted = run(rotate, x, is_leaf, dout)
    torch._dynamo.reset()
    mine = run(torch.compile(rotate, backend=backend, fullgraph=True), x, is_leaf, dout)
    assert torch.equal(wanted[0], wanted[1])
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_the_layer(seed: int) -> None:
    layer = RotaryEmbedding(12, scale_base=512)
    x, dout = (normal(generator(seed + i), 2, 7, 3, 2, 16) for i in range(2))
    layer(x.clone())  # which makes the tables
    results = []
    for rotate in (layer, torch.compile(layer, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        out = rotate(leaf)
        results.append((out.detach(), leaf.detach(), torch.autograd.grad(out, leaf, dout)[0]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
