"""A change of global state that is active while at least one user needs it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager


class SharedEffect:
    """A context from `make`, which the first user enters and the last user leaves.

    Callers must hold a lock.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._users = 0
        self._context: AbstractContextManager[None] | None = None

    def start(self) -> None:
        """Add a user."""
        if self._context is None:
            context = self._make()
            context.__enter__()
            self._context = context
        self._users += 1

    def stop(self) -> None:
        """Remove a user."""
        self._users -= 1
        if self._users == 0 and self._context is not None:
            context, self._context = self._context, None
            context.__exit__(None, None, None)
