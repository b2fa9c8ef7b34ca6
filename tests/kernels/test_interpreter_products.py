"""float32 products as tensor cores make them (`products.py`), in Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_products.py
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

import triton
import triton.language as tl

from flashtile.backends.triton.products import (
    add_product,
    add_product_in_halves,
    operand,
    parts,
    product,
)
from flashtile.testing import generator

SIZE = 32
LARGEST = torch.finfo(torch.float32).max


class Config(NamedTuple):
    """What the functions read of a kernel's configuration."""

    PRECISION: str


@triton.jit
def parts_kernel(x_ptr, parts_ptr, COUNT: tl.constexpr):
    offs = tl.arange(0, COUNT)
    first, second, third = parts(tl.load(x_ptr + offs))
    tl.store(parts_ptr + offs, first)
    tl.store(parts_ptr + COUNT + offs, second)
    tl.store(parts_ptr + 2 * COUNT + offs, third)


@triton.jit
def product_kernel(x_ptr, y_ptr, found_ptr, cfg: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x, y = operand(tl.load(x_ptr + offs), cfg), operand(tl.load(y_ptr + offs), cfg)
    found = add_product(product(x, y, cfg), x, y, cfg)
    tl.store(found_ptr + offs, found)
    found = add_product_in_halves(product(x, y, cfg, 1e-9), x, y, cfg)
    tl.store(found_ptr + SIZE * SIZE + offs, found)


def products(x: Tensor, y: Tensor, precision: str) -> Tensor:
    """x y^T + x y: as one sum, and around a centre and in halves."""
    found = torch.full((2, *x.shape), torch.nan)
    product_kernel[(1,)](x, y, found, Config(precision), SIZE)
    return found


def numbers(seed: int, *shape: int) -> Tensor:
    """Of every sign and of many magnitudes."""
    g = generator(seed)
    return torch.randn(*shape, generator=g) * 2.0 ** torch.randint(-40, 40, shape, generator=g)


def test_three_parts_are_the_number(seed: int):
    x = numbers(seed, 1024)
    x[:3] = torch.tensor([LARGEST, -LARGEST, 0.0])
    found = torch.empty(3, 1024)
    parts_kernel[(1,)](x, found, 1024)
    assert torch.equal(found.double().sum(0), x.double())
    assert torch.equal(found, found.bfloat16().float())
    assert (found[1].abs() <= 2**-7 * x.abs()).all() and (found[2].abs() <= 2**-16 * x.abs()).all()


def test_a_product_is_as_exact_as_float32(seed: int):
    x, y = numbers(seed, SIZE, SIZE), numbers(seed + 1, SIZE, SIZE)
    truth = x.double() @ y.double().T + x.double() @ y.double()
    sizes = x.double().abs() @ y.double().T.abs() + x.double().abs() @ y.double().abs()
    assert ((products(x, y, "bf16x6") - truth).abs() <= 4 * 2**-23 * sizes).all()


def rounded_to_11_bits(x: Tensor) -> Tensor:
    """The nearest numbers with 11 bits; of two that are as near, the larger in magnitude."""
    mantissa, exponent = torch.frexp(x.double())
    nearest = mantissa.sign() * (mantissa.abs() * 2**11 + 0.5).floor()
    return torch.ldexp(nearest, exponent - 11).float()


def test_tf32_rounds_to_the_nearest_of_11_bits(seed: int):
    x, y = numbers(seed, SIZE, SIZE), numbers(seed + 1, SIZE, SIZE)
    x[0, :4] = torch.tensor([1 + 2**-10, 1 + 2**-11 + 2**-23, -1 - 2**-12, -1 - 2**-11])
    rounded = rounded_to_11_bits(x), rounded_to_11_bits(y)
    assert rounded[0][0, :4].tolist() == [1 + 2**-10, 1 + 2**-10, -1.0, -1 - 2**-10]
    assert torch.equal(products(x, y, "tf32"), products(*rounded, "ieee"))


SPECIAL = {
    "infinity": (torch.inf, 3.0),
    "infinity times a bfloat16 number": (-torch.inf, 1.0),
    "NaN": (torch.nan, 1.0),
    "the largest number": (LARGEST, 0.3),
    "the largest number times a small one": (-LARGEST, 1.1e-30),
    "an overflow": (1.2345678e30, 1.2345678e20),
    "an overflow below zero": (-1.2345678e30, 1.2345678e20),
    "an overflow by far": (-(1 + 2**-20) * 2.0**100, 2.0**80),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_numbers(name: str, seed: int):
    """Infinite and NaN where products in float32 are, and finite where they are.

    Only the left operand is infinite: next to an infinite right one, the zeros of a half are NaN.
    """
    x, y = (torch.randn(SIZE, SIZE, generator=generator(seed + i)) for i in (0, 1))
    x[2, 5], y[:, 5] = SPECIAL[name]
    wanted, found = products(x, y, "ieee"), products(x, y, "bf16x6")
    assert torch.equal(found.isnan(), wanted.isnan())
    infinite = wanted.isinf()
    assert torch.equal(found[infinite], wanted[infinite])
    finite = wanted.isfinite()
    largest = wanted[finite].abs().max()
    assert (found - wanted)[finite].abs().max() <= 8 * 2**-23 * largest
