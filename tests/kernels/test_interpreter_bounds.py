"""`bounds.py` finds what it looks for.

TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_bounds.py
"""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def copy_kernel(x, out, first, n, limit, BLOCK: tl.constexpr):
    # (BLOCK,)
    index = first + tl.arange(0, BLOCK)
    tile = tl.load(x + index, mask=index < limit, other=0.0)
    tl.store(out + index, tile, mask=index < n)


@pytest.mark.parametrize(
    ("first", "n", "limit", "message"),
    [(0, 6, 7, "reads 1 of 7"), (0, 7, 6, "writes 1 of 7"), (-1, 6, 6, "reads 1 of 7")],
)
def test_an_access_outside_of_the_tensors_raises(first, n, limit, message) -> None:
    x, out = torch.ones(6), torch.zeros(6)
    copy_kernel[1,](x, out, 0, 6, 6, BLOCK=8)
    assert torch.equal(x, out)
    with pytest.raises(InterpreterError, match=f"{message} elements outside of all tensors"):
        copy_kernel[1,](x, out, first, n, limit, BLOCK=8)
