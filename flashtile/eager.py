"""Run functions that `torch.compile` has compiled eagerly, as their source says."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

# PyTorch has one compiler stance for all threads: the first one that needs another stance sets it,
# and the last one resets it.
_lock = threading.Lock()
_stances: list[Any] = []


@contextmanager
def compiled_functions_run_eagerly() -> Iterator[None]:
    """A context in which compiled functions run eagerly, so that a dispatch mode sees each of their
    operations.

    It affects all threads for as long as it lasts, about a millisecond for each trace of a score
    function: compiled functions that other threads call run eagerly, too. A stance that the user
    sets meanwhile stays set, and PyTorch may then compile functions inside of this context.
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
    """Whether `stance` is still set. PyTorch has no public function that tells."""
    from torch._dynamo import eval_frame

    ours = getattr(stance, "stance", None)
    return getattr(eval_frame, "_stance", ours) is ours


def _reset(stance: Any) -> None:
    try:
        stance.__exit__(None, None, None)
    except RuntimeError:  # a thread that runs compiled code may not reset it; any other one may
        with ThreadPoolExecutor(1) as thread:
            thread.submit(stance.__exit__, None, None, None).result()
