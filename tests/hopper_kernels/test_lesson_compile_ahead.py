"""Lesson 8's kernel compiled for sm_90a, with the compiler's report read. No GPU is needed."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interprets instead of compiling (TRITON_INTERPRET=1)", allow_module_level=True)

from compiled_kernels import report

from examples.learn.hopper_ablation import SCHEDULES, empty_trace
from examples.learn.hopper_attention import Schedule, describe

from .launches import SHARED_LIMIT


@pytest.mark.parametrize("is_traced", [False, True], ids=["", "traced"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_it_compiles_to_what_the_lesson_says(schedule: Schedule, is_traced: bool):
    x = torch.empty(2, 256, 128, dtype=torch.bfloat16)
    trace = empty_trace(x, x) if is_traced else None
    found = report(describe(x, x, x, x, replace(schedule, IS_TRACED=is_traced), trace))
    assert found.spilled == 0 and found.shared <= SHARED_LIMIT
    assert not found.warnings  # among them those of products that wait for each other
    assert not found.unused_barriers
    assert found.value_products == ["register"]  # P stays put
    # One KV loop for each consumer, with the waits that its schedule names.
    assert len(found.blocks) == (2 if schedule.HAS_ROLES else 1)
    for block in found.blocks:
        assert block.count("HGMMA") == 2 * 128 // 16
        first, *_, last = block.exponentials
        assert block.count("WARPGROUP.DEPBAR") == (2 if schedule.HAS_OVERLAP else 1)
        assert first == 0
        assert (last == 0) == schedule.HAS_OVERLAP
        assert ("BAR.ARV" in block.counts) == schedule.HAS_PING_PONG
        assert ("CS2R" in block.counts) == is_traced
