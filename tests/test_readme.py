"""The README's table and example are what the package says and does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def test_the_support_table_is_current():
    command = [sys.executable, str(REPOSITORY / "docs" / "support_table.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, (
        "README.md is behind the backends: run `python docs/support_table.py`"
    )


def test_the_python_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
