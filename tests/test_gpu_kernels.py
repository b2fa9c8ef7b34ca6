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
from kernels.cases import CASES, make_call

from flashtile.backends import cpu, triton
from flashtile.backends.triton import plan
from flashtile.problem import AttentionProblem, Operands
from flashtile.testing import assert_close

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


def converted(operands: Operands, dtype: torch.dtype) -> Operands:
    """Floating operands in another dtype."""
    floating = (x is not None and x.is_floating_point() for x in operands)
    return Operands(*(x.to(dtype) if f else x for x, f in zip(operands, floating, strict=True)))


def everything(backend, operands, options, dout, dlse):
    """Outputs and gradients by name."""
    problem = AttentionProblem.of(operands, options)
    out, lse = backend.forward(problem, operands)
    dlse = dlse.masked_fill(lse.cpu() == -torch.inf, 0.0).to(lse)
    gradients = backend.backward(problem, operands, out, lse, dout.to(out), dlse)
    results = {"out": out, "lse": lse} | gradients._asdict()
    return {name: x.cpu() for name, x in results.items() if x is not None}


@pytest.mark.usefixtures("tiles_come_through")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
def test_case(name, dtype, seed):
    operands, options = make_call(name, dtype, seed)
    rows, Hq, Dv = operands.q.shape[:-1], operands.q.shape[-2], operands.v.shape[-1]
    dout = torch.randn(*rows[:-1], Hq, Dv).to(dtype)
    packed = operands.cu_seqlens_q is not None
    dlse = torch.randn((Hq, rows[0]) if packed else (rows[0], Hq, rows[1]))
    truth = everything(cpu, converted(operands, torch.float64), options, dout, dlse)
    plain = everything(cpu, operands, options, dout, dlse)
    on_gpu = Operands(*(None if x is None else x.cuda() for x in operands))
    got = everything(triton, on_gpu, options, dout, dlse)
    assert got.keys() == truth.keys()
    for field, x in got.items():
        assert_close(field, x, truth[field], plain[field], dtype=dtype, seed=seed)
