"""The lessons' kernels, compiled for Hopper with every tile that their tuning tries."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interprets instead of compiling (TRITON_INTERPRET=1)", allow_module_level=True)

from compiled_kernels import DEVICES, report

from examples.learn import first_kernels, triton_attention
from flashtile.gpu.launch import Launch

DEVICE = "sm_90"  # Triton compiles it as sm_90a


def launch(kernel: Any, *given: Any, warps: int = 4, stages: int = 3, **tile: int) -> Launch:
    """A launch with arguments in the order of the kernel's."""
    arguments = dict(zip(kernel.arg_names, given, strict=False)) | tile
    return Launch(kernel, (1, 1, 1), arguments, warps, stages)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_fits(causal: bool):
    D = 128
    x, row = torch.empty(2, 256, D, dtype=torch.bfloat16), torch.empty(2, 256)
    sizes = (256, 256, 0.1, D, causal)
    gradients = (x, x, x, x, row, row)
    calls = (
        (triton_attention.forward_kernel, (x, x, x, x, row)),
        (triton_attention.dk_dv_kernel, (*gradients, x, x)),
        (triton_attention.dq_kernel, (*gradients, x)),
    )
    for kernel, tensors in calls:
        assert len(kernel.configs) == len(triton_attention.TILES)
        spilled = []
        for config in kernel.configs:
            how = {"warps": config.num_warps, "stages": config.num_stages, **config.kwargs}
            found = report(launch(kernel.fn, *tensors, *sizes, **how), DEVICE)
            assert found.shared <= DEVICES[DEVICE].shared, (config, found)
            spilled.append(found.spilled)
        assert 0 in spilled, kernel.fn.__name__  # tuning finds a tile that needs no stack


def test_first_kernels_fit():
    x = torch.empty(256, 256)
    strides = x.stride()
    calls = (
        launch(first_kernels.add_kernel, x, x, x, 256, BLOCK=1024),
        launch(first_kernels.softmax_kernel, x, x, *strides, 256, 256, BLOCK=256),
        launch(
            first_kernels.matmul_kernel, x, x, x, *strides, *strides, 256, 256, 256, 256,
            BLOCK_M=64, BLOCK_N=64, BLOCK_K=32,
        ),
    )  # fmt: skip
    for call in calls:
        found = report(call, DEVICE)
        assert found.shared <= DEVICES[DEVICE].shared and found.spilled == 0, found
