"""Every option of the kernels, forward and backward, in Triton's interpreter, against the CPU
backend in float64.

Runs in a separate process, because Triton decides at import whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter.py
"""

from __future__ import annotations

import os

import pytest
import torch
from configurations import one_kind_each
from torch import Tensor

from flashtile.backends import cpu
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.lru import clear_caches
from flashtile.problem import AttentionProblem
from flashtile.testing import (
    allowed_error,
    assert_close,
    floor_of,
    generator,
    qkv,
    rounding_variance,
)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")
# The interpreter of Triton 3.6 runs loops with an array as bound, which NumPy 2.4 refuses.

from flashtile.backends import triton as backend
from flashtile.backends.triton import plan

from .cases import CASES, make_call
from .compare import assert_case, converted, everything, expected
from .reference import reference

DTYPES = (torch.float32, torch.float16)


@pytest.mark.parametrize(
    ("name", "dtype"), one_kind_each(CASES, DTYPES), ids=lambda x: str(x).removeprefix("torch.")
)
def test_forward_and_backward(
    name: str, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
):
    """By the kernels for sequences of any length; `test_interpreter_short.py` has the others."""
    monkeypatch.setattr(plan, "SHORT", 0)
    clear_caches()
    assert_case(backend, name, dtype, seed)
    clear_caches()


@pytest.mark.parametrize(
    "name", ["causal, full tiles", "window", "packed", "odd head dims", "block mask"]
)
def test_through_tensor_descriptors(name: str, monkeypatch: pytest.MonkeyPatch, seed: int):
    monkeypatch.setattr(plan, "DESCRIPTOR_WORK", 0)
    monkeypatch.setattr(plan, "SHORT", 0)
    plan.plan.cache_clear()
    assert_case(backend, name, torch.float16, seed, capability=(9, 0))


@pytest.mark.parametrize(
    "name",
    ["causal, full tiles", "packed dropout", "odd head dims", "pages", "relative bias", "bias",
     "bias of keys, 80 keys", "causal block mask, one for all heads"],
)  # fmt: skip
def test_float32_in_six_products(name: str, seed: int):
    """As an H100 multiplies it; elsewhere float32 has products of fused multiply-adds."""
    assert_case(backend, name, torch.float32, seed, capability=(9, 0))


def test_float32_in_tf32(seed: int):
    """Errors as large as TF32 makes them, and no larger, where PyTorch's switch allows it."""
    operands, options = make_call("causal, full tiles", torch.float32, seed)
    dout, dlse = torch.randn(*operands.q.shape), torch.randn(1, 2, 300)
    given = operands, options, dout, dlse
    truth = expected(*given, compute_dtype=torch.float64)
    found = everything(backend, *given, capability=(9, 0), allows_tf32=True)
    for name, x in found.items():
        error = (x - truth[name]).abs().max() / truth[name].abs().max()
        assert 2**-18 < error < 2**-9, name


def in_tf32(x: Tensor) -> Tensor:
    """The nearest numbers with 11 bits."""
    bits = x.contiguous().view(torch.int32) + 0x1000
    return (bits >> 13 << 13).view(torch.float32)


def test_tf32_of_one_sign(seed: int):
    """Rounding dO changes all of a row of dP alike. This cancels where delta is the sum of P * dP,
    as in standard attention; so it must where delta is the sum of dO * O.
    """
    q, k, v = (
        x.abs()
        for x in qkv(generator(seed), B=1, M=131, N=257, Hq=2, Hk=2, D=64, dtype=torch.float32)
    )
    dout, dlse = torch.randn(1, 131, 2, 64), torch.zeros(1, 2, 131)
    given = *describe((q, k, v), Dense(), {}), dout, dlse
    truth = expected(*given, compute_dtype=torch.float64)["dq"]
    found = everything(backend, *given, capability=(9, 0), allows_tf32=True)["dq"]
    Q, K, V, dO = (in_tf32(x.transpose(1, 2)) for x in (q, k, v, dout))
    P = (Q @ K.mT / 8).softmax(-1)
    dP = dO @ V.mT
    dS = P * (dP - (P * dP).sum(-1, keepdim=True))
    standard = (in_tf32(dS) @ K / 8).transpose(1, 2)
    allowed = allowed_error(torch.float32, truth, standard)
    assert (found - truth).abs().max() <= allowed


@pytest.mark.parametrize("name", ["causal", "dropout", "packed", "pages", "block mask", "softcap"])
def test_probabilities(name: str, seed: int):
    operands, options = make_call(name, torch.float32, seed)
    exact = converted(operands, torch.float64)
    problem, exact_problem = (AttentionProblem.of(x, options) for x in (operands, exact))
    _, lse = cpu.forward(exact_problem, exact)
    truth = cpu.probabilities(exact_problem, exact, lse)
    got = backend.probabilities(problem, operands, lse.float())

    plain = cpu.probabilities(problem, operands, lse.float())
    attend = rounding_variance(torch.float32)
    floor = floor_of(reference(operands, options, attend=attend).probs)
    assert_close("probs", got, truth, plain, floor=floor, seed=seed)


@pytest.mark.parametrize("layout", ["dense", "packed", "rows", "pages"])
def test_append(layout: str):
    import flashtile.ops.append  # noqa: F401  (defines the op)
    from flashtile.ops.append.kernel import append

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
    rest = (*new, lengths, cu_seqlens, page_table, cache_rows, None, None)
    torch.ops.flashtile.kvcache_append(*expected, *rest)
    append(*cache, *rest)
    assert all(torch.equal(*pair) for pair in zip(cache, expected, strict=True))
