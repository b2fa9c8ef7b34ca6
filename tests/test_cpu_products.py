"""Products of large matrices, which have another library than small ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flashtile.backends.cpu import products
from flashtile.backends.cpu.products import product
from flashtile.testing import generator, normal


def factors(seed: int, size: int = 130) -> tuple[Tensor, Tensor]:
    g = generator(seed)
    return tuple(normal(g, 2, 3, size, size, dtype=torch.float32).detach() for _ in "ab")  # type: ignore[return-value]


LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.mT,
    "heads between rows": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of the rows": lambda x: torch.cat((x, x), 2)[:, :, : x.shape[2]],
    "part of the columns": lambda x: torch.cat((x, x), 3)[..., : x.shape[3]],
}


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_every_layout(left: str, right: str, seed: int) -> None:
    a, b = factors(seed)
    assert a.shape[-1] ** 3 >= products.MIN_MULTIPLICATIONS
    a, b = LAYOUTS[left](a), LAYOUTS[right](b)
    torch.testing.assert_close(product(a, b).double(), a.double() @ b.double(), atol=1e-4, rtol=0)


def test_what_observes_it(seed: int) -> None:
    """It has derivatives, and modes count it."""
    a, b = factors(seed)
    leaf = a.clone().requires_grad_()
    product(leaf, b).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.ones_like(a) @ b.mT)
    gradient = torch.func.grad(lambda x: product(x, b).sum())(a)
    torch.testing.assert_close(gradient, leaf.grad)
    with FlopCounterMode(display=False) as counter:
        product(a, b)
    assert counter.get_total_flops() == 2 * 6 * 130**3
