"""Calls without queries, keys, sequences, cache rows or pages, in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends import triton as backend
from flashtile.call.layouts import Dense, Packed
from flashtile.call.prepare import describe
from flashtile.problem import AttentionProblem, Operands, Options

Call = tuple[Operands, Options]


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(total_q: int, total_k: int, starts_q: Tensor, starts_k: Tensor, N: int = 30) -> Call:
    k = torch.randn(total_k, 2, 16)
    layout = Packed(starts_q, starts_k, 7, N)
    return describe((torch.randn(total_q, 4, 16), k, k), layout, {})


def dense(B: int, M: int, N: int, **more: Tensor) -> Call:
    k = torch.randn(B, N, 2, 16)
    operands, options = describe((torch.randn(B, M, 4, 16), k, k), Dense(), {})
    return operands._replace(**more), options


CASES: dict[str, Callable[[], Call]] = {
    "packed, no queries": lambda: packed(0, 50, lengths(0, 0, 0), lengths(0, 20, 50)),
    "packed, no keys": lambda: packed(5, 0, lengths(0, 2, 5), lengths(0, 0, 0)),
    "packed, no bound of keys": lambda: packed(5, 0, lengths(0, 2, 5), lengths(0, 0, 0), N=0),
    "packed, no sequences": lambda: packed(0, 50, lengths(0), lengths(0)),
    "dense, no batch": lambda: dense(0, 3, 5),
    "dense, no queries": lambda: dense(2, 0, 5),
    "dense, no keys": lambda: dense(2, 3, 0),
    "a cache of capacity 0": lambda: dense(2, 3, 0, seqused_k=lengths(4, 0)),
}


@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_seen(case: str, num_splits: int):
    operands, options = CASES[case]()
    problem = AttentionProblem.of(operands, options._replace(num_splits=num_splits))
    out, lse = backend.forward(problem, operands)
    assert not out.any()
    assert (lse == -torch.inf).all()
    gradients = backend.backward(problem, operands, out, lse, torch.ones_like(out), None)
    assert not any(x.any() for x in gradients[:3])
