"""The option of `working_option.patch` works in the emulated kernels of Hopper."""

from __future__ import annotations

import pytest
from working_option import needs_git, patched, run_its_tests

pytest.importorskip("triton", reason="the package triton is not installed")

KERNELS = ("score_functions", "float8")


@needs_git
def test_the_option_works_on_hopper(tmp_path):
    files = [f"tests/hopper_kernels/test_{kernel}_emulated.py" for kernel in KERNELS]
    run_its_tests(patched(tmp_path), *files, at_least=5)
