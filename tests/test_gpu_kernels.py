"""Every kernel on the GPU, small and odd, called as the launcher calls it.

The conformance suite checks the public functions. These tests call the kernels directly, so that a
run under a checker of memory accesses is short:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python -m pytest -m gpu tests/test_gpu_kernels.py -k bfloat16
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
from kernels.cases import CASES, SHORT_CASES
from kernels.compare import assert_case
from kernels.decoding import CASES as DECODING
from kernels.decoding import FLOAT8_CASES, assert_decoding
from kernels.huge_scores import HUGE_CASES, assert_huge_case
from processes import output_of

import flashtile
from flashtile.backends import triton
from flashtile.backends.triton import plan
from flashtile.call import memo
from flashtile.gpu import launch_cache
from flashtile.testing import generator, normal, paged

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_buffers")]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=["pointers", "descriptors"])
def tiles_come_through(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """How tiles are loaded; without a patch the plan takes descriptors only for large calls, and
    has kernels of their own for short ones.

    Compiled kernels are cached for the call, whose plan never changes otherwise.
    """
    monkeypatch.setattr(launch_cache, "_prepared", {})
    monkeypatch.setattr(launch_cache, "_compiled", {})
    if request.param == "descriptors":
        monkeypatch.setattr(plan, "DESCRIPTOR_WORK", 0)
        monkeypatch.setattr(plan, "SHORT", 0)
    plan.plan.cache_clear()
    yield
    plan.plan.cache_clear()


@pytest.mark.usefixtures("tiles_come_through")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES | SHORT_CASES)
def test_case(name, dtype, seed):
    assert_case(triton, name, dtype, seed, device="cuda")


@pytest.mark.usefixtures("tiles_come_through")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
@pytest.mark.parametrize("name", HUGE_CASES)
def test_masks_of_huge_numbers(name, dtype, seed):
    """Where fused multiply-adds made NaN, zeros or infinity of scores above 2**31."""
    assert_huge_case(triton, name, dtype, seed, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
@pytest.mark.parametrize("name", DECODING)
def test_decoding(name, dtype, seed):
    assert_decoding(triton, name, dtype, seed, splits=(0, 1, 3, 9), device="cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FLOAT8_CASES)
def test_float8_cache(name, dtype, seed):
    assert_decoding(triton, name, dtype, seed, splits=(0, 1, 3), device="cuda", float8=True)


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_gather_pages(page_size, seed):
    """Used pages side by side; the table's other entries lie outside of the cache."""
    g = generator(seed)
    k, v = (normal(g, 9, page_size, 2, d, dtype=torch.bfloat16).cuda() for d in (64, 40))
    table = torch.tensor([[4, 0, 8], [1, -3, 70]], dtype=torch.int32).cuda()
    used = torch.tensor([2 * page_size + 1, page_size], dtype=torch.int32).cuda()
    for x, rows in zip((k, v), torch.ops.flashtile.gather_pages(k, v, table, used), strict=True):
        assert torch.equal(rows[0], x[[4, 0, 8]].flatten(0, 1))
        assert torch.equal(rows[1, :page_size], x[1])


@pytest.mark.parametrize("storage", ["rows", "pages"])
def test_a_prompt_in_pieces(storage, seed, monkeypatch):
    """Prefill by the chosen backend equals the portable one; also a call from the memo."""
    g = generator(seed)
    q = normal(g, 2, 700, 8, 128, dtype=torch.bfloat16).cuda()
    caches = [normal(g, 2, 2048, 2, 128, dtype=torch.bfloat16) for _ in range(2)]
    call = {"cache_seqlens": torch.tensor([700, 1900], dtype=torch.int32).cuda(), "causal": True}
    if storage == "pages":
        (caches[0], table), (caches[1], _) = (paged(generator(seed), x, 16) for x in caches)
        call["page_table"] = table.cuda()
    args = (q, *(x.cuda() for x in caches))
    decisions = {}
    monkeypatch.setattr(memo, "decisions", decisions)
    wanted = flashtile.attention_with_kvcache(*args, **call, backend="triton").float()
    for _ in range(2):
        got = flashtile.attention_with_kvcache(*args, **call).float()
        assert (got - wanted).abs().max() <= 2e-2 * wanted.abs().max()
    chosen = {d.problem.options.backend for d in decisions.values() if d.problem.M == 700}
    if torch.cuda.get_device_capability() == (9, 0):
        assert "hopper" in chosen


@pytest.mark.parametrize("head_dim", [64, 72])
def test_fifty_layouts_compile_four_variants_at_most(head_dim: int) -> None:
    """In a process that has compiled nothing."""
    output_of(Path(__file__).parent / "compiled_variants.py", head_dim, seconds=400)
