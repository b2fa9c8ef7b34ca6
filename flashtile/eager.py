"""Run functions that `torch.compile` has compiled as they are written."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# PyTorch has one stance for all threads: the first one that needs it sets it, the last one resets.
_lock = threading.Lock()
_stances: list[Any] = []


@contextmanager
def compiled_functions_run_eagerly() -> Iterator[None]:
    """A context in which compiled functions run eagerly, where every operation of them can be
    seen. It affects all threads.
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
            if not _stances:
                stance.__exit__(None, None, None)
