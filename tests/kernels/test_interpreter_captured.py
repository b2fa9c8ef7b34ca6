"""Gradients of what a score function captures, in Triton's interpreter, against the CPU backend in
float64.

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_captured.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backend_interface import Gradients
from flashtile.backends import cpu
from flashtile.backends import triton as backend
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.problem import AttentionProblem, Operands
from flashtile.score_mod import ScoreFunction, derivative, described
from flashtile.testing import generator, normal, qkv

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


def gradients(
    module: Any,
    call: Call,
    dtype: torch.dtype,
    function: ScoreFunction = everything,
    which: str = "backward",
) -> Gradients:
    """The gradients that a backend computes, for inputs in `dtype`."""
    operands, options = call
    is_half = (x is not None and x.dtype == torch.float16 for x in operands)
    pairs = zip(operands, is_half, strict=True)
    operands = Operands(*(x.to(dtype) if x is not None and half else x for x, half in pairs))
    found = described(function, torch.promote_types(dtype, torch.float32), torch.device("cpu"))
    compute = torch.promote_types(dtype, torch.float32)
    gradient = derivative(found.program, compute, of_captured=True)
    operands = operands._replace(captured=found.values, captured_integers=found.integers)
    options = options._replace(score_mod=found.program, score_mod_gradient=gradient)
    problem = AttentionProblem.of(operands, options)
    out, lse = module.forward(problem, operands)
    dout = torch.randn(out.shape, generator=generator(4), dtype=torch.float64)
    given = problem, operands, out, lse, dout.half().to(out.dtype), None
    result: Gradients = getattr(module, which)(*given)
    return result


def near_and_far(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A table whose ends many tiles share, and one that reaches every distance."""
    near = TABLE[h, (j - i).clamp(-9, 9) + 9]
    return score * near + TABLE[h, (i - j).abs() // 8] * ROWS[near.abs().clamp(0, 3).int()]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("packed", everything),
        ("softcap", everything),
        ("no keys", everything),
        ("score function of near and far keys", near_and_far),
    ],
)
def test_gradients_of_captured_values(name: str, function: ScoreFunction, seed: int) -> None:
    torch.manual_seed(seed)
    call = CASES[name](generator(seed), torch.float16)
    got = gradients(backend, call, torch.float32, function).dcaptured
    truth = gradients(cpu, call, torch.float64, function).dcaptured
    assert got is not None
    assert truth is not None
    assert got.dtype == torch.float32
    largest = float(truth.abs().max())
    torch.testing.assert_close(got.double(), truth.double(), rtol=1e-4, atol=1e-5 * largest + 1e-9)
    assert name == "no keys" or (got != 0).sum() > 12 * call[0].q.shape[-2]  # heads


def test_hidden_scores_have_no_gradient(seed: int) -> None:
    """Not even where the function has none: log(0) and log of negative numbers."""
    slopes = torch.tensor([0.5, 2.0])

    def far(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * torch.log((i - j) * 1.0 + 0.5) - slopes[h] * torch.log((i - j) * 1.0)

    inputs = qkv(generator(seed), B=1, M=20, N=20, Hq=2, Hk=2, D=16, dtype=torch.float16)
    call = describe(inputs, Dense(), {"window_size": (-1, -2)})
    got = gradients(backend, call, torch.float32, far)
    truth = gradients(cpu, call, torch.float64, far)
    for name in ("dq", "dk", "dv", "dcaptured"):
        x, y = getattr(got, name), getattr(truth, name)
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["packed", "softcap"])
def test_alone_for_another_backend(name: str, seed: int) -> None:
    call = CASES[name](generator(seed), torch.float16)
    alone = gradients(backend, call, torch.float32, which="gradients_of_scores")
    assert alone[:3] == (None, None, None)
    assert torch.equal(alone.dcaptured, gradients(backend, call, torch.float32).dcaptured)
