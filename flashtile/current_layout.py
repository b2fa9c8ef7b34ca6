"""The layout of context parallelism that is in force: `with layout:` of `flashtile.distributed`.

Inside the block a tensor holds only this rank's tokens. Attention layers that know how to attend
over all ranks look here; every other call of flashtile raises, because it would silently attend
over this rank's tokens only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Layout(Protocol):
    """What attention layers ask of a `flashtile.distributed.Layout`, which describes it."""

    sequences: int  # of a dense batch; 0 for packed documents
    local_tokens: int
    positions: Tensor

    def positions_on(self, device: torch.device) -> Tensor:
        """`positions` on a device."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole batch of tokens; packed documents are one row."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, over all ranks."""

    def shard(self, x: Tensor, dim: int | None = None, fill: float = 0.0) -> Tensor:
        """This rank's rows of the whole `x`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """`ContextParallel.attention` without the log-sum-exp."""

    def together(self, what: str, check: Callable[[], None]) -> None:
        """Run a check whose error all ranks raise."""


_current: ContextVar[Layout | None] = ContextVar("flashtile_layout", default=None)
_lock = threading.Lock()
blocks = 0  # `with layout:` blocks that threads of this process are in


def get() -> Layout | None:
    """The layout in force in this thread, or None.

    Raises:
        NotImplementedError: torch.compile traces the call; a graph cannot depend on a layout.
    """
    if not blocks:
        return None
    if torch.compiler.is_compiling():
        raise NotImplementedError("with layout: not supported under torch.compile")
    return _current.get()


@contextmanager
def in_force(layout: Layout) -> Iterator[None]:
    """A block in which `layout` is in force in this thread."""
    global blocks
    token = _current.set(layout)
    with _lock:
        blocks += 1
    try:
        yield
    finally:
        with _lock:
            blocks -= 1
        _current.reset(token)


def kept(function: _Function) -> _Function:
    """`function` with the layout that is in force now, also if it is called later: activation
    checkpointing calls a layer again in the backward."""
    layout = get()
    if layout is None:
        return function

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with in_force(layout):
            return function(*args, **kwargs)

    return cast(_Function, run)


def refuse_local_attention() -> None:
    """Raise if a layout is in force.

    Raises:
        RuntimeError: the call would attend over this rank's tokens only.
    """
    if blocks and get() is not None:
        raise RuntimeError(
            "with layout: a call of flashtile inside the block would attend over this rank's "
            "tokens only; use ContextParallel.attention, or call it outside of the block"
        )
