"""Every kernel on the GPU, small and odd, called as the launcher calls it.

The conformance suite judges what users see; here nothing stands between the case and the kernels,
so that a run under a checker of memory accesses is short:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python -m pytest -m gpu tests/test_gpu_kernels.py -k bfloat16
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernels.cases import CASES
from kernels.compare import assert_case
from kernels.decoding import CASES as DECODING
from kernels.decoding import assert_decoding

from flashtile.backends import triton
from flashtile.backends.triton import plan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_buffers")]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=["pointers", "descriptors"])
def tiles_come_through(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """How tiles are loaded; by itself the plan takes descriptors for large calls alone."""
    if request.param == "descriptors":
        monkeypatch.setattr(plan, "DESCRIPTOR_WORK", 0)
    plan.plan.cache_clear()
    yield
    plan.plan.cache_clear()


@pytest.mark.usefixtures("tiles_come_through")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
def test_case(name, dtype, seed):
    assert_case(triton, name, dtype, seed, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
@pytest.mark.parametrize("name", DECODING)
def test_decoding(name, dtype, seed):
    assert_decoding(triton, name, dtype, seed, splits=(0, 1, 3, 9), device="cuda")
