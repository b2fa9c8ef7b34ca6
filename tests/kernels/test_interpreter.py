"""Every option of the kernels, forward and backward, in Triton's interpreter, against the CPU
backend in float64.

Runs in a process of its own, for Triton decides at import whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter.py
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from flashtile.backends import cpu
from flashtile.problem import AttentionProblem, Operands

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a process of its own", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")
# The interpreter of Triton 3.6 walks loops with an array as bound, which NumPy 2.4 refuses.

from flashtile.backends import triton as backend
from flashtile.backends.triton import plan

from .cases import CASES, make_call

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}


def exact(operands: Operands) -> Operands:
    """The same operands in float64, but what the semantics fix as float32 or integer."""
    return Operands(
        *(x.double() if x is not None and x.is_floating_point() else x for x in operands)
    )


def assert_near(name: str, got: Tensor, truth: Tensor, tolerance: float) -> None:
    assert got.shape == truth.shape, name
    got, infinite = got.double(), torch.isinf(truth)
    assert torch.equal(got[infinite], truth[infinite]), f"{name}: infinities differ"
    error = (got - truth)[~infinite].abs().max().item() if (~infinite).any() else 0.0
    scale = max(1.0, truth[~infinite].abs().max().item()) if (~infinite).any() else 1.0
    assert error <= tolerance * scale, f"{name}: error {error:.3g}, largest value {scale:.3g}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(name: str, dtype: torch.dtype):
    check(name, dtype, capability=None)


@pytest.mark.parametrize("name", ["causal", "window", "packed", "odd head dims", "block mask"])
def test_through_tensor_descriptors(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan, "DESCRIPTOR_WORK", 0)
    plan.plan.cache_clear()
    check(name, torch.float16, capability=(9, 0))


def check(name: str, dtype: torch.dtype, capability: tuple[int, int] | None) -> None:
    """Outputs and gradients of a case, planned as for a device of `capability`."""
    operands, options = make_call(name, dtype)
    reference = exact(operands)
    problem = AttentionProblem.of(operands, options)._replace(capability=capability)
    truth_problem = AttentionProblem.of(reference, options)
    truth = cpu.forward(truth_problem, reference)
    out, lse = backend.forward(problem, operands)
    tolerance = TOLERANCE[dtype]
    assert_near("out", out, truth[0], tolerance)
    assert_near("lse", lse, truth[1], tolerance)

    torch.manual_seed(1)
    dout = torch.randn(out.shape).to(dtype)
    dlse = torch.randn(lse.shape)
    # Both backwards start from the same forward, so that only their own errors count.
    got = backend.backward(problem, operands, out, lse, dout, dlse)
    wanted = cpu.backward(truth_problem, reference, *truth, dout.double(), dlse.double())
    for field, gradient, expected in zip(got._fields, got, wanted, strict=True):
        if expected is None:
            assert gradient is None, field
        else:
            assert gradient is not None, field
            assert_near(field, gradient, expected, 8 * tolerance)


@pytest.mark.parametrize("name", ["causal", "dropout", "packed", "pages", "block mask", "softcap"])
def test_probabilities(name: str):
    operands, options = make_call(name, torch.float32)
    reference = exact(operands)
    problem = AttentionProblem.of(operands, options)
    truth_problem = AttentionProblem.of(reference, options)
    _, lse = cpu.forward(truth_problem, reference)
    wanted = cpu.probabilities(truth_problem, reference, lse)
    got = backend.probabilities(problem, operands, lse.float())
    assert_near("probs", got, wanted, 3e-6)


@pytest.mark.parametrize("layout", ["dense", "packed", "rows", "pages"])
def test_append(layout: str):
    import flashtile.kvcache  # noqa: F401  (defines the op)
    from flashtile.backends.triton.launch import append_to_cache

    torch.manual_seed(0)
    cache = [torch.randn(5, 16, 2, 20), torch.randn(5, 16, 2, 7)]
    new = [torch.randn(3, 4, 2, 20), torch.randn(3, 4, 2, 7)]
    lengths = torch.tensor([0, 14, 7], dtype=torch.int32)
    cu_seqlens = page_table = cache_rows = None
    if layout == "packed":
        new = [x.flatten(0, 1) for x in new]
        cu_seqlens = torch.tensor([0, 1, 1, 9], dtype=torch.int32)
    elif layout == "rows":
        cache_rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    elif layout == "pages":
        lengths = torch.tensor([0, 30, 14], dtype=torch.int32)
        page_table = torch.tensor([[4, 0], [1, 3], [2, 9]], dtype=torch.int32)
    expected = [x.clone() for x in cache]
    rest = (*new, lengths, cu_seqlens, page_table, cache_rows)
    torch.ops.flashtile.kvcache_append(*expected, *rest)
    append_to_cache(*cache, *rest)
    assert all(torch.equal(*pair) for pair in zip(cache, expected, strict=True))
