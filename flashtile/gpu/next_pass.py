"""The pass that will probably follow: its kernels are compiled at the same time as those of this
pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


class _ThisThread(threading.local):
    next_pass: Callable[[], Any] | None = None
    launches: list[Any] | None = None


_this_thread = _ThisThread()


@contextmanager
def followed_by(next_pass: Callable[[], Any]) -> Iterator[None]:
    """Inside the block, this thread compiles the kernels of `next_pass`, a call with tensors that
    have no memory, together with the first new ones that it needs.
    """
    _this_thread.next_pass = next_pass
    try:
        yield
    finally:
        _this_thread.next_pass = None


def described() -> list[Any] | None:
    """Where launches are written down, while the next pass is described instead of run."""
    return _this_thread.launches


def launches_of_next_pass() -> list[Any]:
    """What the next pass would launch; nothing if it raises an error, as it will do later."""
    next_pass, _this_thread.next_pass = _this_thread.next_pass, None
    found: list[Any] = []
    if next_pass is not None:
        _this_thread.launches = found
        try:
            with suppress(Exception):
                next_pass()
        finally:  # also after KeyboardInterrupt: later passes would be described, not run
            _this_thread.launches = None
    return found
