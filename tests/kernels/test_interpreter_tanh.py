"""The kernels' tanh against float64, in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl

from flashtile.gpu.intrinsics import tanh

BLOCK = 1 << 16
ROUNDING = 2**-24


@triton.jit
def tanh_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tanh(tl.load(x_ptr + offs)))


def tanh_of(x: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(-(-len(x) // BLOCK) * BLOCK)
    padded[: len(x)] = x
    y = torch.empty_like(padded)
    tanh_kernel[(len(padded) // BLOCK,)](padded, y, BLOCK)
    return y[: len(x)]


def test_all_magnitudes_are_right_to_about_one_rounding():
    bits = torch.arange(2**23, 0x7F800000, 1009, dtype=torch.int32)  # normal numbers
    x = bits.view(torch.float32)
    x = torch.cat((x, -x))
    exact = x.double().tanh()
    error = (tanh_of(x).double() - exact) / exact / ROUNDING
    assert error.abs().max() < 8
    usual = error[(x.abs() > 2**-6) & (x.abs() < 9)]
    assert usual.square().mean().sqrt() < 1.5


def test_special_numbers():
    inf = float("inf")
    y = tanh_of(torch.tensor([0.0, inf, -inf, float("nan"), 1e-40]))
    assert y[0] == 0 and y[3].isnan() and 0 <= y[4] <= 1e-40
    assert (y[1:3] - torch.tensor([1.0, -1.0])).abs().max() <= 2 * ROUNDING
