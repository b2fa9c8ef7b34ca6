"""What `explain` says of a GPU that is not here."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile.backends.triton import plan


def explained(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> str:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(plan, "TRITON_IS_INSTALLED", True)
    plan.plan.cache_clear()
    with FakeTensorMode():  # tensors without memory: a device is only a name
        q = torch.empty(1, 128, 4, 64, dtype=torch.bfloat16, device="cuda")
        return str(flashtile.explain(q, q, q, causal=True, backend="triton"))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_a_gpu_that_was_only_compiled_for(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
):
    name = f"sm_{capability[0]}{capability[1]}"
    report = explained(monkeypatch, capability)
    assert "-> triton: yes" in report
    assert f"this architecture ({name}) has been compiled for, never run on" in report


def test_an_amd_gpu_was_only_compiled_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan, "_is_rocm", lambda: True)
    report = explained(monkeypatch, (9, 4))
    assert "this architecture (ROCm) has been compiled for, never run on" in report


def test_a_gpu_that_ran(monkeypatch: pytest.MonkeyPatch):
    assert "never run" not in explained(monkeypatch, (9, 0))
