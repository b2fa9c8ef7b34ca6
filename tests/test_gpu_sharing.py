"""Hopper kernels on a GPU that other processes use too.

The GPU switches to another process after about two milliseconds, in the middle of a kernel, and
restores registers and shared memory later. All calls here take longer than that.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flashtile

pytestmark = pytest.mark.gpu

OTHERS = 3  # processes


@pytest.fixture(scope="module", autouse=True)
def other_processes() -> Iterator[None]:
    """Keep the GPU busy while the tests of this module run."""
    if torch.cuda.get_device_capability() != (9, 0):
        found = torch.cuda.get_device_name()
        pytest.skip(f"the Hopper backend wants compute capability 9.0, this is {found}")
    command = [sys.executable, str(Path(__file__).with_name("busy_gpu.py"))]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(OTHERS)]
    try:
        for other in others:
            assert other.stdout is not None
            assert other.stdout.readline() == "busy\n"
        yield
    finally:
        for other in others:
            other.kill()
            other.communicate()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 144, 192, 256])
def test_interrupted_calls_agree_bit_for_bit(head_dim: int, deterministic: bool) -> None:
    g = torch.Generator("cuda").manual_seed(head_dim)
    shape = 1, 16384, 1024 // head_dim, head_dim
    q, k, v, dout = (torch.randn(shape, generator=g, device="cuda").bfloat16() for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> list[torch.Tensor]:
        out, lse = flashtile.attention(
            *leaves, return_lse=True, deterministic=deterministic, backend="hopper"
        )
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        # Otherwise dq is a sum in the order of arrival.
        return [out, lse, dk, dv, *([dq] if deterministic else [dq.isfinite()])]

    first = step()
    for repeat in range(20):
        same = [torch.equal(*pair) for pair in zip(step(), first, strict=True)]
        assert all(same), (repeat, same)
