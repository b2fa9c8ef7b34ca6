"""Lesson 8's kernel compiled for sm_90a, with the compiler's report read. No GPU is needed."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interprets instead of compiling (TRITON_INTERPRET=1)", allow_module_level=True)

from examples.learn.hopper_ablation import SCHEDULES, empty_trace
from examples.learn.hopper_attention import Schedule, describe

from .compile_ahead import report

SHARED_LIMIT = 232448  # bytes a program


@pytest.mark.parametrize("is_traced", [False, True], ids=["", "traced"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_it_compiles_to_what_the_lesson_says(schedule: Schedule, is_traced: bool):
    x = torch.empty(2, 256, 128, dtype=torch.bfloat16)
    trace = empty_trace(x, x) if is_traced else None
    found = report(describe(x, x, x, x, replace(schedule, IS_TRACED=is_traced), trace))
    assert found.spilled == 0 and found.shared <= SHARED_LIMIT
    assert found.warnings == []  # among them those of products that wait for each other
    assert found.unused_barriers == []
    assert all(operand.startswith("R") for operand in found.value_products)  # P stays put
    # One KV loop for each consumer, with the waits that its schedule names.
    assert len(found.blocks) == (2 if schedule.HAS_ROLES else 1)
    for names in found.blocks:
        products = [name.partition(".")[0] for name in names].count("HGMMA")
        assert products == 2 * 128 // 16
        waits = [n for n, name in enumerate(names) if name.startswith("WARPGROUP.DEPBAR")]
        exponentials = [n for n, name in enumerate(names) if name.startswith("MUFU.EX2")]
        assert len(waits) == (2 if schedule.HAS_OVERLAP else 1)
        assert waits[0] < exponentials[0]
        assert (exponentials[-1] < waits[-1]) == schedule.HAS_OVERLAP
        assert ("BAR.ARV" in names) == schedule.HAS_PING_PONG
        assert any(name.startswith("CS2R") for name in names) == is_traced
