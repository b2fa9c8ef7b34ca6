"""Gradients of what a score function captures, in Triton's interpreter, against the CPU backend in
float64.

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_captured.py
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends import cpu
from flashtile.backends import triton as backend
from flashtile.problem import AttentionProblem, Operands
from flashtile.score_mod import derivative, described
from flashtile.testing import generator, normal

from .cases import CASES, Call

G = generator(3)
# (heads, distances), (queries), (keys), (sequences, heads), one number, one that nothing reads.
TABLE, ROWS, KEYS = normal(G, 4, 99), normal(G, 60), normal(G, 60, dtype=torch.bfloat16)
PAIRS, ONE = normal(G, 4, 4), torch.tensor(0.7)
BUCKETS = torch.randint(-5, 5, (99,), generator=G)


def everything(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Every way to share a captured number, and one that is read twice."""
    score = score * ONE + TABLE[h, i - j] / 4 + ROWS[i // 2] * KEYS[BUCKETS[j]]
    return torch.where(i == j, torch.tanh(score), score + PAIRS[b, h] * TABLE[0, j])


def dcaptured(module: object, call: Call, dtype: torch.dtype) -> Tensor:
    """The gradients of all captured values from a backend, for inputs in `dtype`."""
    operands, options = call
    is_half = (x is not None and x.dtype == torch.float16 for x in operands)
    pairs = zip(operands, is_half, strict=True)
    operands = Operands(*(x.to(dtype) if x is not None and half else x for x, half in pairs))
    found = described(everything, torch.promote_types(dtype, torch.float32), torch.device("cpu"))
    compute = torch.promote_types(dtype, torch.float32)
    gradient = derivative(found.program, compute, of_captured=True)
    operands = operands._replace(captured=found.values, captured_integers=found.integers)
    options = options._replace(score_mod=found.program, score_mod_gradient=gradient)
    problem = AttentionProblem.of(operands, options)
    out, lse = module.forward(problem, operands)
    dout = torch.randn(out.shape, generator=generator(4), dtype=torch.float64)
    gradients = module.backward(problem, operands, out, lse, dout.half().to(out.dtype), None)
    return gradients.dcaptured


@pytest.mark.parametrize(
    "name", ["causal", "packed", "softcap", "dropout of few queries", "no keys"]
)
def test_gradients_of_captured_values(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    call = CASES[name](generator(seed), torch.float16)
    got, truth = (
        dcaptured(m, call, t) for m, t in ((backend, torch.float32), (cpu, torch.float64))
    )
    assert got.dtype == torch.float32
    largest = float(truth.abs().max())
    torch.testing.assert_close(got.double(), truth.double(), rtol=1e-4, atol=1e-5 * largest + 1e-9)
    assert name == "no keys" or (got != 0).sum() > 50
