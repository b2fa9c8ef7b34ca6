"""The option of `working_option.patch` works in Triton's interpreter, forward and backward."""

from __future__ import annotations

import os

import pytest
from working_option import needs_git, patched, run_its_tests

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a separate process", allow_module_level=True)


@needs_git
def test_the_option_works_on_triton(tmp_path):
    run_its_tests(patched(tmp_path), "tests/kernels/test_interpreter.py", at_least=2)
