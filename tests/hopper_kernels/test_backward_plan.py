"""The order of tiles that the plan of the Hopper backward chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends.hopper.backward.plan import backward_plan
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.problem import AttentionProblem
from flashtile.testing import generator, qkv


def problem(D: int = 128, **options: Any) -> AttentionProblem:
    inputs = qkv(generator(0), B=1, M=1, N=1, Hq=1, Hk=1, D=D, dtype=torch.bfloat16)
    return AttentionProblem.of(*describe(inputs, Dense(), options))


def test_directions():
    assert backward_plan(problem(causal=True)).IS_ASCENDING
    assert not backward_plan(problem(256, causal=True)).IS_ASCENDING
    options: tuple[dict[str, Any], ...] = (
        {},
        {"causal": True, "deterministic": True},
        {"causal": True, "window_size": (100, 0)},
        {"causal": True, "attention_chunk": 100},
    )
    assert not any(backward_plan(problem(**given)).IS_ASCENDING for given in options)
