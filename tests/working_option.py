"""`working_option.patch`: what a new option of the scores costs.

The patch gives every public function that has the options of `attention` one more, ``curvature=c``,
which adds ``c * s**2`` to a score: on the CPU, Triton and Hopper (16 bits and float8), forward and
backward, in caches and over ranks, with its definition, documentation and tests. It is a program,
two lines before those of `score_mod`, which all backends run already; a new number is another
program, which GPUs compile. Nobody needs the option. The patch is there to be counted, and to be
applied to a copy and tested.

Where code moves, the patch moves too: ``git apply --3way tests/working_option.patch``, resolve what
conflicts, write ``git diff HEAD -- flashtile docs tests`` into the file, and undo the rest. The
stub and the snapshot of the public API, which scripts write, are not part of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATCH = Path(__file__).with_suffix(".patch")
FOLDERS = ("docs", "flashtile", "tests")
BUILT = shutil.ignore_patterns("__pycache__", "_build")


def package_files() -> list[str]:
    """The files of the package that the patch changes."""
    return re.findall(r"^\+\+\+ b/(flashtile/\S+)$", PATCH.read_text(encoding="utf-8"), re.M)


def patched(root: Path) -> Path:
    """`root` with a copy of the package and its tests, in which the option works."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, ignore=BUILT)
    shutil.copy(ROOT / "pyproject.toml", root)
    done = subprocess.run(
        ["git", "apply", str(PATCH)],
        cwd=root,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)},  # no repository around it
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stderr}see tests/working_option.py"
    return root


def run_its_tests(root: Path, *files: str, at_least: int) -> None:
    """Run the tests of the option among those of some files of the copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "curvature"]
    paths = os.pathsep.join((str(root), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [*command, *files],
        cwd=root,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= at_least, done.stdout[-4000:]


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patch")
