"""Masks made of huge numbers, in Triton's interpreter.

The interpreter does not fuse a multiplication with an addition. What fused ones make of scores
above 2**31 shows only on a GPU, where `tests/test_gpu_kernels.py` runs the same cases.

Runs in a separate process, because Triton decides at import whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/test_interpreter_huge_scores.py
"""

from __future__ import annotations

import os

import pytest
import torch
from configurations import one_kind_each

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends import cpu
from flashtile.backends import triton as backend
from flashtile.problem import AttentionProblem
from flashtile.testing import assert_close, floor_of, generator, rounding_variance

from .compare import converted, everything
from .huge_scores import HUGE_CASES, assert_huge_case
from .reference import reference

DTYPES = (torch.float32, torch.float16)


@pytest.mark.parametrize(
    ("name", "dtype"),
    one_kind_each(HUGE_CASES, DTYPES),
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_forward_and_backward(name: str, dtype: torch.dtype, seed: int):
    assert_huge_case(backend, name, dtype, seed)


@pytest.mark.parametrize("name", ["dense", "softcap, sink and dropout", "packed", "pages"])
def test_probabilities(name: str, seed: int):
    torch.manual_seed(seed)  # of the dropout
    operands, options = HUGE_CASES[name](True)(generator(seed), torch.float32)
    torch.manual_seed(seed)
    calm, calm_options = HUGE_CASES[name](False)(generator(seed), torch.float32)
    exact = converted(operands, torch.float64)
    problem, exact_problem = (AttentionProblem.of(x, options) for x in (operands, exact))
    _, lse = cpu.forward(exact_problem, exact)
    truth = cpu.probabilities(exact_problem, exact, lse)
    got = backend.probabilities(problem, operands, lse.float())
    plain = cpu.probabilities(problem, operands, lse.float())
    attend = rounding_variance(torch.float32)
    floor = floor_of(reference(calm, calm_options, attend=attend).probs)
    assert_close("probs", got, truth, plain, floor=floor, seed=seed)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("dense", torch.float32),
        ("packed", torch.float32),
        ("score function", torch.float32),
        ("wide heads, score function", torch.float16),
        ("wide heads, packed score function", torch.float16),
    ],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_a_part_of_the_keys(name: str, dtype: torch.dtype, seed: int):
    """Its log-sum-exps are of all keys, so no sum is added up. The CPU backend does the same."""
    operands, options = HUGE_CASES[name](True)(generator(seed), dtype)
    torch.manual_seed(seed)
    *rows, Hq, _ = operands.q.shape
    dout = torch.randn(*rows, Hq, operands.v.shape[-1]).to(dtype)
    dlse = torch.zeros((Hq, *rows) if len(rows) == 1 else (rows[0], Hq, rows[1]))
    given = operands, options, dout, dlse
    got, wanted = (everything(x, *given, is_partial=True) for x in (backend, cpu))
    for field in ("dq", "dk", "dv"):
        x, y = got[field].float(), wanted[field].float()
        allowed = 8 * y.abs().max().item() * torch.finfo(dtype).eps
        torch.testing.assert_close(x, y, rtol=0.0, atol=allowed)
