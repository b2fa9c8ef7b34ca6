"""A new option of the scores changes few files, and works on the CPU and over ranks.

`tests/kernels` and `tests/hopper_kernels` have the same for the kernels.
"""

from __future__ import annotations

import pytest
from working_option import needs_git, package_files, patched, run_its_tests

pytestmark = pytest.mark.slow

PACKAGE_FILES = 6  # it may only fall: lower it when the patch gets smaller


def test_the_option_changes_no_more_files_than_it_did():
    assert len(package_files()) == PACKAGE_FILES


@needs_git
def test_the_option_works_on_the_cpu_and_over_ranks(tmp_path):
    files = ("tests/conformance", "tests/distributed/test_context.py")
    run_its_tests(patched(tmp_path), *files, at_least=20)
