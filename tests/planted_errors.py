"""Plants errors in a copy of the package, one at a time, and runs the tests that should catch them.

    python tests/planted_errors.py [--jobs N] [--list] [NAME ...]

A planted error names a function or class, not a line, so that the list survives moved code: the
text `right` occurs exactly once in the source of exactly one definition called `symbol` in
``flashtile/``, and becomes `wrong`. An error is caught if its tests fail, and missed if they pass.
The list shows how much a faster suite still sees. `test_planted_errors.py` keeps it up to date.
"""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from planted_outside_kernels import CPU, DISTRIBUTED, INTEGRATIONS_AND_MODELS, MASKS_AND_SCORES
from planting import ROOT, Planted, planted_source

SECONDS = 900  # of one error's tests; a planted error may also make them wait forever


TRITON: list[Planted] = []

HOPPER: list[Planted] = []

PLANTED = [*CPU, *MASKS_AND_SCORES, *TRITON, *HOPPER, *DISTRIBUTED, *INTEGRATIONS_AND_MODELS]


def is_caught(error: Planted, copy: Path) -> tuple[bool, str]:
    """Whether the error's tests fail in the copy, and the end of what they print."""
    path, text = planted_source(error, copy)
    before = path.read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if error.interpreted:
        environment["TRITON_INTERPRET"] = "1"
    try:
        done = subprocess.run(
            [*command, *shlex.split(error.tests)],
            cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True, f"not done after {SECONDS} s"
    finally:
        path.write_text(before, encoding="utf-8")
    if done.returncode not in (0, 1):  # no test ran, or not the ones that are named
        raise RuntimeError(
            f"{error.name}: pytest stopped with {done.returncode}\n{done.stdout[-2000:]}"
        )
    return done.returncode == 1, done.stdout


def copies(number: int, folder: Path) -> Iterator[Path]:
    """Copies of the working tree's files."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for i in range(number):
        copy = folder / str(i)
        for name in names:
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        yield copy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="planted errors to try (all of them)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tried at once")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    args = parser.parse_args()
    unknown = set(args.names) - {error.name for error in PLANTED}
    if unknown:
        parser.error(f"no planted error is called {', '.join(sorted(unknown))}")
    errors = [error for error in PLANTED if not args.names or error.name in args.names]
    if args.list:
        print("\n".join(error.name for error in errors))
        return 0
    missed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as threads:
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for copy in copies(args.jobs, Path(folder)):
            free.put(copy)

        def attempt(error: Planted) -> tuple[Planted, bool, str, float]:
            copy, start = free.get(), time.monotonic()
            try:
                return error, *is_caught(error, copy), time.monotonic() - start
            finally:
                free.put(copy)

        for number, (error, caught, output, seconds) in enumerate(threads.map(attempt, errors), 1):
            missed += not caught
            verdict = "caught" if caught else "MISSED"
            print(
                f"{number:3d}/{len(errors)}  {verdict}  {seconds:6.1f} s  {error.name}", flush=True
            )
            if not caught:
                print("\n".join(output.splitlines()[-3:]), flush=True)
    print(f"{len(errors) - missed} caught, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
