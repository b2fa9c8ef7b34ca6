"""float32 in six products (`products.py`), compiled for an H100.

Triton fuses x + dot(a, b, 0) into dot(a, b, x): one sum inside the tensor core, which
truncates it. The interpreter does not.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interprets instead of compiling (TRITON_INTERPRET=1)", allow_module_level=True)

from compiled_kernels import DEVICES, report

from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.testing import generator, qkv

from .cases import Call
from .launches import launches

# Sums outside of the tensor core in a step, of the full tiles and again of the masked ones.
ADDED = {
    "forward_kernel": 1,  # P V is two sums; they are added to the output as one
    "key_gradient_kernel": 3,  # dV, dO V^T, dK; above head dim 64 in two kernels
    "query_gradient_kernel": 2,  # dO V^T, dQ
}


def call_of(head_dim: int) -> Call:
    sizes = {"B": 1, "M": 256, "N": 256, "Hq": 2, "Hk": 2, "D": head_dim}
    return describe(qkv(generator(0), **sizes, dtype=torch.float32), Dense(), {"causal": True})


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sums_stay_outside_of_the_tensor_core(head_dim: int):
    found = dict.fromkeys(ADDED, 0)
    for launch in launches(*call_of(head_dim), "sm_90"):
        if launch.kernel.__name__ in found:
            found[launch.kernel.__name__] += report(launch).added_products
    assert found == {name: 2 * count for name, count in ADDED.items()}


@pytest.mark.parametrize(
    ("device", "head_dim"),
    [("sm_80", 128), ("sm_90", 64), ("sm_90", 128), ("sm_100", 64), ("sm_120", 128)],
)
def test_tf32_fits(device: str, head_dim: int):
    for launch in launches(*call_of(head_dim), device, allows_tf32=True):
        assert report(launch, device).shared <= DEVICES[device].shared
