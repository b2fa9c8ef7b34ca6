"""float32 in six products (`products.py`), with sums as tensor cores make them: truncated.

The kernels run in Triton's interpreter, whose products are replaced. This does not see what Triton's
compiler makes of the sums: `test_compile_float32.py` does.

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_tensor_cores.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

import numpy as np
from triton.runtime import interpreter

from flashtile.backends import triton as backend
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.testing import generator, qkv

from .cases import Call
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


def call_of(inputs: str, head_dim: int, seed: int) -> Call:
    """Causal, with two query heads on one key head."""
    sizes = {"B": 1, "M": 131, "N": 257, "Hq": 2, "Hk": 1, "D": head_dim}
    q, k, v = qkv(generator(seed), **sizes, dtype=torch.float32)
    change = {
        "normal": lambda x: x,
        "of one sign": torch.abs,
        "far from zero": lambda x: x + 3,
        "large scores": lambda x: x,
    }[inputs]
    q, k, v = map(change, (q, k, v))
    q = 8 * q if inputs == "large scores" else q
    return describe((q, k, v), Dense(), {"causal": True})


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("inputs", ["normal", "of one sign", "far from zero", "large scores"])
def test_the_rule(inputs: str, head_dim: int, seed: int):
    call = call_of(inputs, head_dim, seed)
    assert_call(backend, call, torch.float32, seed, capability=(9, 0))
