"""Which backend runs a problem: one ordered tuple, first one without objections wins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from . import backends
from .problem import AttentionProblem

# In order of preference. Names of folders in `backends/`.
ORDER: tuple[str, ...] = (
    "cpu",  # every option, on every machine; the tensors must be on the CPU
    "hopper",  # the common options, on an H100 or H200, at the speed of that machine
    "triton",  # every option but float64 and float8, on any CUDA GPU from sm_80 on
)

# Here and not on first use: a tracer that walks through `select` cannot import. This imports what
# answers for a backend, not its kernels nor what compiles them.
for _name in ORDER:
    backends.load(_name)

_forced: str | None = (
    None  # process-wide, as PyTorch's own sdpa_kernel is; a tracer can guard on it
)
_selected: dict[tuple[AttentionProblem, str | None], str] = {}
_CACHE_SIZE = 4096


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Force one backend inside a ``with`` block; an argument ``backend=`` of a call wins over it.

    Process-wide, like ``torch.nn.attention.sdpa_kernel``.

    Raises:
        ValueError: when there is no backend of that name.
    """
    check_name(name)
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def forced() -> str | None:
    """The backend that a ``with`` block forces, if any."""
    return _forced


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is a backend."""
    if name not in ORDER:
        raise ValueError(f"backend: got {name!r}, want one of {', '.join(map(repr, ORDER))}")


def unsupported_reasons(name: str, problem: AttentionProblem) -> list[str]:
    """Why backend `name` cannot run `problem`, in plain sentences; empty when it can."""
    return backends.load(name).unsupported_reasons(problem)


def select(problem: AttentionProblem, name: str | None = None) -> str:
    """The backend for `problem`: `name` when given (never falls back), else the forced one, else
    the first that can.

    Raises:
        NotImplementedError: when none fits; the message lists every backend with its reasons.
    """
    name = name or _forced
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
