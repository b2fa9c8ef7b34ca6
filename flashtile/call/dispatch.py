"""Choose the backend for a problem: the first one in an ordered tuple that supports it."""

from __future__ import annotations

import threading
from typing import Literal

import torch

from .. import backends
from ..problem import AttentionProblem

BackendName = Literal["cpu", "hopper", "triton"]  # the folders in `backends/`

# In order of preference.
ORDER: tuple[BackendName, ...] = (
    "cpu",  # every option, on every machine; the tensors must be on the CPU
    "hopper",  # the common options, on an H100 or H200, at the speed of that machine
    "triton",  # every option but float64, on any CUDA GPU from sm_80 on
)

# Import them here and not on first use, because `select` cannot import while it is traced. This
# imports only the code that decides what a backend supports, not kernels or their compiler.
for _name in ORDER:
    backends.load(_name)

_selected: dict[tuple[AttentionProblem, str | None], str] = {}
_CACHE_SIZE = 4096


class _ThisThread(threading.local):
    """The backends of the ``with`` blocks around the running code, innermost last."""

    # Not a ContextVar, which torch.compile can neither trace nor guard on.
    def __init__(self) -> None:
        self.blocks: list[str | None] = []


_this_thread = _ThisThread()
_process_wide: list[backend] = []  # calls of `backend` that are not ``with`` blocks, latest last


class backend:
    """Force one backend: from here on, or inside a ``with`` block.

    ::

        flashtile.backend("triton")  # all calls of all threads from here on
        with flashtile.backend("cpu"):  # the calls of this thread inside the block
            ...

    An inner block wins over an outer one, a block over a call without ``with``, and an argument
    ``backend=`` over all of them. A forced backend never falls back to another one.

    Args:
        name: a backend, or None for flashtile's own choice.

    Raises:
        ValueError: when there is no backend of that name.
    """

    def __init__(self, name: BackendName | None) -> None:
        if name is not None:
            check_name(name)
        self.name = name
        _process_wide.append(self)

    def __enter__(self) -> None:
        # Only a ``with`` block gets here, and a block applies to this thread only.
        if self in _process_wide:
            _process_wide.remove(self)
        _this_thread.blocks.append(self.name)

    def __exit__(self, *exception: object) -> None:
        _this_thread.blocks.pop()


def forced() -> str | None:
    """The backend that the caller forces by `backend`, if any."""
    if _this_thread.blocks:
        return _this_thread.blocks[-1]
    return _process_wide[-1].name if _process_wide else None


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is a backend."""
    if name not in ORDER:
        raise ValueError(f"backend: got {name!r}, want one of {', '.join(map(repr, ORDER))}")


def unsupported_reasons(name: str, problem: AttentionProblem) -> list[str]:
    """The reasons why backend `name` cannot run `problem`, as sentences; empty when it can."""
    return backends.load(name).unsupported_reasons(problem)


def select(problem: AttentionProblem, name: str | None = None) -> str:
    """The backend for `problem`: `name` when given (never falls back), else the forced one, else
    the first that can.

    Raises:
        NotImplementedError: when none fits; the message lists every backend with its reasons.
    """
    name = name or forced()
    if torch.compiler.is_compiling():  # sizes are symbols there, which do not hash
        return _select(problem, name)
    key = (problem, name)
    chosen = _selected.get(key)
    if chosen is None:
        chosen = _select(problem, name)
        if len(_selected) >= _CACHE_SIZE:
            _selected.clear()
        _selected[key] = chosen
    return chosen


def _select(problem: AttentionProblem, name: str | None) -> str:
    refusals = []
    for candidate in (name,) if name else ORDER:
        reasons = unsupported_reasons(candidate, problem)
        if not reasons:
            return candidate
        refusals.append(f"  {candidate}: " + "; ".join(reasons))
    asked = f"backend {name!r} cannot" if name else "no backend can"
    raise NotImplementedError(f"{asked} run this call:\n" + "\n".join(refusals))
