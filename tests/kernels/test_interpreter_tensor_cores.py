"""float32 in six products (`products.py`), with sums as tensor cores make them: truncated.

The kernels run in Triton's interpreter, whose products are replaced. This does not see what
Triton's compiler makes of the sums: `test_compile_float32.py` does.

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_tensor_cores.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from configurations import one_kind_each
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

from flashtile.backends import triton as backend
from flashtile.backends.triton.products import add_product_in_halves, operand, product
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.testing import generator, qkv

from .compare import assert_call

TERMS = 16  # bfloat16 products that a tensor core of an H100 adds at once
GUARD_BITS = 2  # beyond those of float32, to which the terms are aligned and truncated


def truncated(x: Any, unit: Any) -> Any:
    return np.trunc(x / unit) * unit


def unit_of(x: Any, bits: int) -> Any:
    """The last of `bits` bits of each number."""
    return np.ldexp(1.0, np.frexp(np.where(x == 0.0, 1.0, x))[1] - bits)


def sum_on_a_tensor_core(x: Any, y: Any, acc: Any) -> Any:
    """x y + acc as an H100 adds it up (Khattak and Mikaitis 2025, "Accurate models of NVIDIA tensor
    cores"). A step aligns its terms and the sum before to the largest one, and truncates them; the
    new sum is truncated to float32.
    """
    x, y, found = (a.astype(np.float64) for a in (x, y, acc))
    for first in range(0, x.shape[1], TERMS):
        # (rows, TERMS, columns)
        terms = x[:, first : first + TERMS, None] * y[None, first : first + TERMS]
        largest = np.maximum(np.abs(terms).max(1), np.abs(found))
        unit = unit_of(largest, 24 + GUARD_BITS)
        found = truncated(terms, unit[:, None]).sum(1) + truncated(found, unit)
        found = truncated(found, unit_of(found, 24))
    return found.astype(acc.dtype)


@pytest.fixture(autouse=True)
def _tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        found = sum_on_a_tensor_core(a.data, b.data, d.data)
        return interpreter.TensorHandle(found, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "of one sign": torch.abs,
    "far from zero": lambda x: x + 3,
    "of large scores": lambda x: 3 * x,
}


@pytest.mark.parametrize(("inputs", "head_dim"), one_kind_each(INPUTS, [64, 128]))
def test_the_rule(inputs: str, head_dim: int, seed: int):
    sizes = {"B": 1, "M": 97, "N": 161, "Hq": 2, "Hk": 1, "D": head_dim}
    q, k, v = map(INPUTS[inputs], qkv(generator(seed), **sizes, dtype=torch.float32))
    call = describe((q, k, v), Dense(), {"causal": True})
    assert_call(backend, call, torch.float32, seed, capability=(9, 0))


class Config(NamedTuple):
    """What the functions read of a kernel's configuration."""

    PRECISION: str = "bf16x6"


@triton.jit
def products_kernel(x_ptr, found_ptr, centre, cfg: tl.constexpr):
    offs = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = operand(tl.load(x_ptr + offs), cfg)
    tl.store(found_ptr + offs, product(x, x, cfg))
    tl.store(found_ptr + 64 * 64 + offs, product(x, x, cfg, centre))
    tl.store(found_ptr + 2 * 64 * 64 + offs, add_product_in_halves(tl.zeros_like(offs), x, x, cfg))


def test_halves_and_sums_around_a_centre_lose_less(seed: int):
    """Of a sum of terms of one sign."""
    x = qkv(generator(seed), B=1, M=64, N=1, Hq=1, Hk=1, D=64, dtype=torch.float32)[0]
    x = x[0, :, 0].abs()
    found = torch.empty(3, 64, 64)
    products_kernel[(1,)](x, found, float((x @ x.T).mean()) / 2, Config())
    x = x.double()
    lost = (torch.stack([x @ x.T, x @ x.T, x @ x]) - found).mean((1, 2))
    assert lost[0] > 0
    assert (lost[1:].abs() < torch.tensor([0.4, 0.7]) * lost[0]).all(), lost
