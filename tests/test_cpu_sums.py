"""Sums over many query rows and over a group's heads, which PyTorch's kernel rounds as it goes."""

from __future__ import annotations

import pytest
import torch
from conformance.harness import Sizes, check_dense

SIZES = {
    "many rows": Sizes(B=1, M=40_000, N=5, Hq=2, Hk=2, D=16),
    "many heads in a group": Sizes(B=1, M=800, N=5, Hq=64, Hk=1, D=16),
    "rows in short blocks": Sizes(B=1, M=700, N=5, Hq=32, Hk=1, D=16),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_few_keys(sizes, dtype, seed):
    check_dense(sizes, "nothing", dtype, "cpu", seed, through=("out",))
