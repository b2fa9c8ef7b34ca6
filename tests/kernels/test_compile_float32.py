"""float32 in six products (`products.py`), compiled for an H100.

Triton makes dot(a, b, x) of x + dot(a, b, 0): one sum inside of the tensor core, which truncates
it. The interpreter does not.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interprets instead of compiling (TRITON_INTERPRET=1)", allow_module_level=True)

from compiled_kernels import report

from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.testing import generator, qkv

from .launches import launches

# Sums outside of the tensor core in a step, of the full tiles and again of the masked ones.
ADDED = {
    64: {
        "forward_kernel": 1,  # P V is two sums; they are added to the output as one
        "key_gradient_kernel": 3,  # dV, dO V^T, dK
        "query_gradient_kernel": 2,  # dO V^T, dQ
    },
    128: {  # there Q K^T is two sums, too
        "forward_kernel": 2,
        "key_gradient_kernel": 5,  # in a kernel for dK (3) and one for dV (2)
        "query_gradient_kernel": 3,
    },
}


@pytest.mark.parametrize("head_dim", ADDED)
def test_sums_stay_outside_of_the_tensor_core(head_dim: int):
    sizes = {"B": 1, "M": 256, "N": 256, "Hq": 2, "Hk": 2, "D": head_dim}
    q, k, v = qkv(generator(0), **sizes, dtype=torch.float32)
    found = dict.fromkeys(ADDED[head_dim], 0)
    for launch in launches(*describe((q, k, v), Dense(), {"causal": True}), "sm_90"):
        if launch.kernel.__name__ in found:
            found[launch.kernel.__name__] += report(launch).added_products
    assert found == {name: 2 * count for name, count in ADDED[head_dim].items()}
