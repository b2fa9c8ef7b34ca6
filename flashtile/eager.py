"""Run functions that `torch.compile` has compiled as they are written."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

# PyTorch has one stance for all threads: the first one that needs it sets it, the last one resets.
_lock = threading.Lock()
_stances: list[Any] = []


@contextmanager
def compiled_functions_run_eagerly() -> Iterator[None]:
    """A context in which compiled functions run eagerly, where every operation of them can be
    seen.

    It affects all threads: a compiled function that another thread calls meanwhile runs eagerly,
    too, about a millisecond for each trace of a score function. A stance that the user sets
    meanwhile stays set; then functions may be compiled inside of this context.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes seconds
        yield
        return
    with _lock:
        _stances.append(_stances[0] if _stances else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _lock:
            stance = _stances.pop()
            if not _stances and _is_set(stance):
                _reset(stance)


def _is_set(stance: Any) -> bool:
    """Whether nobody has set another stance since, for which PyTorch has no public function."""
    from torch._dynamo import eval_frame

    ours = getattr(stance, "stance", None)
    return getattr(eval_frame, "_stance", ours) is ours


def _reset(stance: Any) -> None:
    try:
        stance.__exit__(None, None, None)
    except RuntimeError:  # a thread that runs compiled code may not, but any other one may
        with ThreadPoolExecutor(1) as thread:
            thread.submit(stance.__exit__, None, None, None).result()
