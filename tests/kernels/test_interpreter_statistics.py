"""Statistics of the probabilities in Triton's interpreter, against the CPU backend in float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.backends import cpu
from flashtile.problem import AttentionProblem, Operands, Options, lse_dtype
from flashtile.statistics import column_shape
from flashtile.testing import assert_close, floor_of, rounding_variance

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends import triton as backend
from flashtile.backends.triton import plan

from .cases import make_call
from .compare import converted
from .reference import reference

CASES = (
    *("causal", "softcap", "packed", "packed dropout", "pages", "block mask", "packed spans"),
    *("bias", "learned alibi", "relative bias", "score function", "short window"),
    "score function, few queries of grouped heads",
    *("biases by distance in cache rows", "spans and a bias", "odd head dims"),
)


def measured(module: Any, operands: Operands, options: Options, **facts: Any) -> tuple[Tensor, ...]:
    """The largest scores, entropies and sums of columns. `facts` are fields of the problem."""
    problem = AttentionProblem.of(operands, options)._replace(**facts)
    column_sum = torch.zeros(column_shape(problem, operands), dtype=lse_dtype(operands.q.dtype))
    _, lse, *rows = module.forward(problem._replace(has_statistics=True), operands)
    module.column_sums(problem, operands, lse, column_sum)
    return *rows[:2], column_sum


@pytest.mark.parametrize("name", CASES)
def test_statistics(name: str, seed: int) -> None:
    operands, options = make_call(name, torch.float32, seed)
    exact = converted(operands, torch.float64)
    truth = measured(cpu, exact, options)
    plain, got = (measured(module, operands, options) for module in (cpu, backend))
    attend = rounding_variance(torch.float32)
    variance = reference(operands, options, attend=attend)
    P = cpu.probabilities(AttentionProblem.of(exact, options), exact, cpu.forward(
        AttentionProblem.of(exact, options), exact)[1]).abs()  # fmt: skip
    slope = torch.where(P > 0, P, 1.0).log() + 1  # of the entropy, -sum P log P
    floors = {
        "max_logit": floor_of(variance.lse).max(),
        "entropy": floor_of((variance.probs * slope.square()).sum(-1)).max(),
        "column_sum": floor_of(variance.probs.sum(-2)).max(),
    }
    for (what, floor), *three in zip(floors.items(), got, truth, plain, strict=True):
        assert_close(what, *three, floor=floor, seed=seed)


def test_half_precision(seed: int) -> None:
    """Sums are exact in float32, so that only the inputs are rounded."""
    operands, options = make_call("causal", torch.float16, seed)
    truth = measured(cpu, converted(operands, torch.float64), options)
    for x, want in zip(measured(backend, operands, options), truth, strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["causal, full tiles", "window", "packed", "odd head dims", "block mask", "alibi"]
)
def test_through_tensor_descriptors(name: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """With the tiles of Hopper."""
    monkeypatch.setattr(plan, "DESCRIPTOR_WORK", 0)
    plan.plan.cache_clear()
    operands, options = make_call(name, torch.float16, seed)
    truth = measured(cpu, converted(operands, torch.float64), options)
    got = measured(backend, operands, options, capability=(9, 0))
    for x, want in zip(got, truth, strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1e-4, atol=1e-4)


def test_large_scores(seed: int) -> None:
    """Beside scores of -1e9, rounding the log-sum-exp loses the number of keys."""
    operands, options = make_call("bias", torch.float32, seed)
    bias = torch.full_like(operands.bias, -1e9)
    _, _, column_sum = measured(backend, operands._replace(bias=bias), options)
    rows = column_sum.sum(-1)
    torch.testing.assert_close(rows, torch.full_like(rows, operands.q.shape[1]))
