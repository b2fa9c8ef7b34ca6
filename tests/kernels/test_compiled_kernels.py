"""The record of compiled kernels: what belongs to a key, and what finds a line that is wrong."""

from __future__ import annotations

import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interprets instead of compiling (TRITON_INTERPRET=1)", allow_module_level=True)

import compiled_kernels
from compiled_kernels import CHECKED, FILE, key, report

from flashtile.gpu.launch import Launch

MODULE = """
import triton
import triton.language as tl

STEP = tl.constexpr(2)

@triton.jit
def added(x, C: tl.constexpr):
    return x + C

@triton.jit
def some_kernel(x_ptr, n, C: tl.constexpr):
    tl.store(x_ptr + n * STEP, added(tl.load(x_ptr + n), C))
"""


@pytest.fixture
def launch_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A launch of the kernel of a module that was written differently. No file gets its lines."""
    monkeypatch.setattr(compiled_kernels, "PARTS", None)

    def make(
        old: str = "",
        new: str = "",
        dtype: torch.dtype = torch.float32,
        warps: int = 4,
        **given: int,
    ) -> Launch:
        assert old in MODULE
        path = tmp_path / f"module_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(MODULE.replace(old, new) if old else MODULE)
        spec = spec_from_file_location(path.stem, path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        arguments = {"x_ptr": torch.zeros(32, dtype=dtype), "n": 5, "C": 1} | given
        return Launch(module.some_kernel, (1,), arguments, warps, stages=3)

    return make


@pytest.mark.parametrize(
    "change",
    [
        {"old": "STEP = tl.constexpr(2)", "new": "STEP = tl.constexpr(3)"},
        {"old": "return x + C", "new": "return x - C"},
        {"old": "tl.load(x_ptr + n)", "new": "tl.load(x_ptr)"},
        {"C": 2},
        {"n": 16},  # a multiple of 16 is another variant of Triton's
        {"n": 2**40},
        {"dtype": torch.bfloat16},
        {"warps": 8},
    ],
    ids=str,
)
def test_a_changed_kernel_has_another_key(launch_of: Any, change: dict[str, Any]):
    assert key(launch_of(**change)) != key(launch_of())


def test_another_device_has_another_key(launch_of: Any):
    assert key(launch_of(), "sm_80") != key(launch_of(), "sm_90")


@pytest.mark.parametrize(
    "change",
    [
        {"old": "STEP =", "new": "# A comment\n\n\nSTEP ="},
        {"old": "return x", "new": "# (BLOCK,)\n\n    return x"},
        {"old": "return x", "new": '"""A docstring\n\n    of lines."""\n    return x'},
        {"old": "def some", "new": "def never_called(x):\n    return x\n\n@triton.jit\ndef some"},
        {"n": 7},
    ],
    ids=str,
)
def test_what_compiles_to_the_same_has_the_same_key(launch_of: Any, change: dict[str, Any]):
    assert key(launch_of(**change)) == key(launch_of())


def launches(launch_of: Any, is_checked: bool) -> Launch:
    """A launch whose kernel always compiles, or one that may be recorded."""
    made = (launch_of(C=number) for number in range(9 * CHECKED))
    return next(x for x in made if (int(key(x), 16) % CHECKED == 0) == is_checked)


def test_a_recorded_kernel_is_not_compiled(launch_of: Any, monkeypatch: pytest.MonkeyPatch):
    launch = launches(launch_of, is_checked=False)
    monkeypatch.setitem(compiled_kernels._lines, key(launch), '{"registers":7,"shared":8}')
    monkeypatch.setattr(compiled_kernels, "_compiled", None)
    assert report(launch)[:3] == (7, 8, 0)


def test_a_wrong_number_of_a_checked_kernel_is_found(
    launch_of: Any, monkeypatch: pytest.MonkeyPatch
):
    launch = launches(launch_of, is_checked=True)
    made = compiled_kernels._as_json(compiled_kernels._compiled(launch, "sm_90"))
    monkeypatch.setitem(compiled_kernels._lines, key(launch), made)
    found = report(launch)
    wrong = made.replace(f":{found.registers},", f":{found.registers + 1},", 1)
    monkeypatch.setitem(compiled_kernels._lines, key(launch), wrong)
    with pytest.raises(AssertionError, match="make compiled"):
        report(launch)


def test_the_lines_are_sorted_and_each_has_a_key_of_its_own():
    lines = FILE.read_text(encoding="utf-8").splitlines()
    assert lines == sorted(lines)
    assert len({line.split()[3] for line in lines}) == len(lines)
