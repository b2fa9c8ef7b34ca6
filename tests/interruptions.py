"""Calls of another thread in the middle of ours, at every place in turn: a race fails in each run.

Real threads seldom switch where it matters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any, TypeVar

Shared = TypeVar("Shared")
Result = TypeVar("Result")


def interrupted(
    make: Callable[[], Shared],
    call: Callable[[Shared], Result],
    by: Callable[[Shared], Any],
    module: ModuleType,
) -> Iterator[Result]:
    """The results of `call` with `by` run before its first bytecode in `module`, before its second,
    and so on up to its last one; each time on something that `make` returns."""
    number, ran = 0, True
    while ran:
        shared = make()
        result, ran = _interrupted_once(shared, call, by, module, number)
        yield result
        number += 1
    assert number > 3, "Python traces no bytecodes"


def _interrupted_once(
    shared: Shared,
    call: Callable[[Shared], Result],
    by: Callable[[Shared], Any],
    module: ModuleType,
    number: int,
) -> tuple[Result, bool]:
    """The result, and whether there were enough bytecodes for `by` to run."""
    executed = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal executed
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            if executed == number:
                by(shared)  # Python does not trace what a tracer calls
            executed += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = call(shared)
    finally:
        sys.settrace(before)
    return result, executed > number
