"""The kernels of the lessons on a GPU, tuned; tests/kernels interprets and compiles them."""

from __future__ import annotations

import pytest
import torch
from lessons import LENGTHS, assert_both_passes

from flashtile.testing import generator

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("M", "N"), LENGTHS)
def test_attention(M: int, N: int, dtype: torch.dtype, causal: bool, seed: int):
    assert_both_passes("cuda", M, N, dtype, causal, seed)


def test_first_kernels():
    from examples.learn.first_kernels import add, matmul, softmax  # want Triton

    x = torch.randn(100, 70, generator=generator(0)).cuda()
    torch.testing.assert_close(add(x[0], x[1], block=16), x[0] + x[1])
    torch.testing.assert_close(softmax(x.T), torch.softmax(x.T, 1))
    exact = (x.double() @ x.T.double()).float()
    torch.testing.assert_close(matmul(x, x.T), exact, atol=1e-4, rtol=1e-5)
