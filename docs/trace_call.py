"""Trace a call of `flash_attn_func` to its kernel: ``python docs/trace_call.py [cpu | triton]``.

It prints the files that hand the call on, in order, and beside each the files that it asks for
something and that answer before the call goes on. A file hands the call on if it is still running
when the kernel is launched; `call/prepare.py`, which checks the call and chooses its backend, has
returned by then and counts as well.

Without a GPU, Triton's interpreter runs the kernel (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import flashtile

PACKAGE = Path(flashtile.__file__).parent
PREPARE = "call/prepare.py"
# Files of PyTorch's operators and of Triton's kernels: where a kernel is launched.
LAUNCHERS = {"cpu": "/torch/_ops.py", "triton": "/triton/runtime/"}


class Trace(NamedTuple):
    """What happens between the call of a function and the launch of its kernel."""

    path: list[str]  # the files that hand the call on
    asked: dict[str, list[str]]  # by a file of the path: those that it asks
    entered: Counter[str]  # how often a file is called from another one


def trace(backend: str) -> Trace:
    """The first call with its arguments, in a process that has made other calls."""
    q, k, v = (torch.randn(1, 37, heads, 32) for heads in (4, 2, 2))

    def call() -> None:
        # The command line gives a string, where the type wants one of the names.
        with flashtile.backend(backend):  # type: ignore[arg-type]
            flashtile.flash_attn_func(q, k, v, causal=True)

    call()  # which imports the kernels
    flashtile.clear_caches()
    entered: Counter[str] = Counter()
    entries: list[list[str]] = []
    running: list[str] = []

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or running:
            return
        code, stack = frame.f_code, files_of(frame)
        if LAUNCHERS[backend] in code.co_filename and code.co_name in ("__call__", "run"):
            if stack[0].startswith("flash_attn_interface"):
                running.extend(stack)
        elif is_ours(frame) and stack[0].startswith("flash_attn_interface"):
            entries.append(stack)
            entered[stack[-1]] += frame.f_back is None or frame.f_back.f_code.co_filename != (
                code.co_filename
            )

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    path = running.copy()
    path.insert(path.index("api.py") + 1, PREPARE)
    asked: dict[str, list[str]] = {stop: [] for stop in path}
    for stack in entries:
        stop, *answers = stack[next_stranger(stack, path) - 1 :]
        if answers and answers[0] not in asked[stop]:
            asked[stop].append(answers[0])
    return Trace(path, asked, entered)


def is_ours(frame: FrameType) -> bool:
    """Whether a frame runs code of the package."""
    return Path(frame.f_code.co_filename).is_relative_to(PACKAGE)


def files_of(frame: FrameType) -> list[str]:
    """The files of the package that are running, outermost first; neighbours are different."""
    found: list[str] = []
    current: FrameType | None = frame
    while current is not None:
        if is_ours(current):
            name = Path(current.f_code.co_filename).relative_to(PACKAGE).as_posix()
            if found[-1:] != [name]:
                found.append(name)
        current = current.f_back
    return found[::-1]


def next_stranger(stack: list[str], path: list[str]) -> int:
    """Index of the first file of a stack that does not hand the call on, or the stack's length."""
    return next((i for i, file in enumerate(stack) if file not in path), len(stack))


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    if name == "triton":  # the interpreter takes tensors on the CPU
        from flashtile.backends import triton

        triton.unsupported_reasons = lambda problem: []
    found = trace(name)
    for number, file in enumerate(found.path, 1):
        again = f" (entered {found.entered[file]} times)" if found.entered[file] > 1 else ""
        print(f"{number}. {file}{again}")
        print("".join(f"       {other}\n" for other in found.asked[file]), end="")
