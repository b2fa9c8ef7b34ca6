"""Choose the backend for a problem: the first one in an ordered tuple that supports it."""

from __future__ import annotations

import threading
from typing import Literal

import torch

from .. import backends
from ..lru import memoised
from ..problem import AttentionProblem

BackendName = Literal["cpu", "hopper", "triton"]  # the folders in `backends/`

# In order of preference.
ORDER: tuple[BackendName, ...] = (
    "cpu",  # every option, on every machine; the tensors must be on the CPU
    "hopper",  # the common options, on an H100 or H200, at the speed of that machine
    "triton",  # every option but float64, on any CUDA GPU from sm_80 on
)

# Imported here and not on first use, because torch.compile cannot trace an import in `select`. This
# imports only the code that decides what a backend supports, not the kernels or their compiler.
for _name in ORDER:
    backends.load(_name)

# Modules of this layer and of those above get the backends from here.
load = backends.load
appender = backends.appender
index_checker = backends.index_checker


class _ThisThread(threading.local):
    """The backends that are forced only in this thread; the last entry of a list applies."""

    # A ContextVar would also separate the tasks of an event loop. But torch.compile (up to 2.13)
    # can neither trace `ContextVar.get` and `.set` nor guard on the value, and a copy on which it
    # can guard would not follow a change of task, which is not announced.
    def __init__(self) -> None:
        self.blocks: list[str | None] = []  # the ``with`` blocks around the running code
        self.held: list[_Choice] = []  # results of `backend` that a ``with`` may still enter


class _Choice:
    """The choice of one call of `backend`, held until a ``with`` enters it or no longer can."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.held = _this_thread.held
        self.held.append(self)


_this_thread = _ThisThread()
_everywhere: list[str | None] = [None]  # forced by the last call of `backend` without a ``with``


class backend:
    """Force one backend from here on, or inside a ``with`` block.

    ::

        flashtile.backend("triton")  # all calls of all threads from here on
        with flashtile.backend("cpu"):  # the calls of this thread inside the block
            ...

    An inner block overrides an outer one, a block overrides a call without ``with``, and an
    argument ``backend=`` overrides all of them. A forced backend never falls back to another one.

    Do not keep the result of a call without ``with``: as long as it is kept, a ``with`` may enter
    it, and the call applies only to this thread. A block around an ``await`` also applies to the
    other tasks of this thread.

    Args:
        name: a backend, or None for flashtile's own choice.

    Raises:
        ValueError: there is no backend of that name.
    """

    _choice: _Choice | None = None  # None if `__init__` raises

    def __init__(self, name: BackendName | None) -> None:
        if name is not None:
            check_name(name)
        self.name = name
        self._choice = _Choice(name)

    def __enter__(self) -> None:
        choice, self._choice = self._choice, None
        if choice is not None and choice in choice.held:
            choice.held.remove(choice)
        _this_thread.blocks.append(self.name)

    def __exit__(self, *exception: object) -> None:
        _this_thread.blocks.pop()

    def __del__(self) -> None:
        # Only now is it certain that this was a call without ``with``. If a choice applied to all
        # threads earlier, another thread's calls between `__init__` and `__enter__` of a block
        # would run on the wrong backend.
        choice = self._choice
        if choice is not None and choice in choice.held:
            _everywhere[0] = choice.name
            del choice.held[: choice.held.index(choice) + 1]  # it overrides earlier calls


def forced() -> str | None:
    """The backend that the caller forces with `backend`, if any."""
    if _this_thread.blocks:
        return _this_thread.blocks[-1]
    if _this_thread.held:
        return _this_thread.held[-1].name
    return _everywhere[0]


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is a backend."""
    if name not in ORDER:
        raise ValueError(f"backend: got {name!r}, want one of {', '.join(map(repr, ORDER))}")


def select(problem: AttentionProblem, name: str | None = None) -> str:
    """The backend for `problem`: `name` if given, else the forced one, neither with a fallback;
    else the first backend that supports the problem.

    Raises:
        NotImplementedError: no backend can run it; the message lists each with its reasons.
    """
    name = name or forced()
    if torch.compiler.is_compiling():  # sizes are symbols, which are not hashable
        return _select(problem, name)
    return _selected(problem, name)


def _select(problem: AttentionProblem, name: str | None) -> str:
    refusals = []
    for candidate in (name,) if name else ORDER:
        reasons = load(candidate).unsupported_reasons(problem)
        if not reasons:
            return candidate
        refusals.append(f"  {candidate}: " + "; ".join(reasons))
    asked = f"backend {name!r} cannot" if name else "no backend can"
    raise NotImplementedError(f"{asked} run this call:\n" + "\n".join(refusals))


_selected = memoised(4096)(_select)
