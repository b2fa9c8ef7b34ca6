"""Decide how a checked call runs: by which backend, and a cached call in which form.

The backend is the first one in an ordered tuple that supports the problem.

A cached call runs in one of three forms. With few new tokens the backend may append them while it
attends. With many queries (chunked prefill) the call may become one over packed sequences: the
fastest kernels for many queries read these, but not all caches. Adjacent cache rows already are
packed sequences, of which only the first tokens are used; small pages are first copied into one
tensor, which takes a few per cent of the time of the call. Else the backend attends to the cache
after the append.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .. import backends
from ..backends import BackendName
from ..lru import memoised
from ..problem import Appending, AttentionProblem, Operands
from .layouts import Cached, Layout

# Modules of this layer and of those above get the backends from here.
ORDER, BACKENDS = backends.ORDER, backends.BACKENDS
appender = backends.appender
index_checker = backends.index_checker

# Largest number of new tokens of a sequence that the attention appends: the programs that attend
# share the work by keys, so one of them has to store all of them.
MOST_NEW_TOKENS = 16
# Smallest number of queries for which the copy pays off: times the query heads of one key head.
FEWEST_QUERIES = 2048
# The Hopper backend copies smaller pages in small pieces, which slow down so many queries.
SMALLEST_PAGE = 32
# Largest size in bytes of the copy, which has room for the longest possible sequences.
LARGEST_COPY = 2**30


class Checked(NamedTuple):
    """A call that has passed all checks, before the choice of its backend."""

    problem: AttentionProblem
    operands: Operands
    layout: Layout
    keywords: Mapping[str, Any]  # options that the caller passed
    backend: str | None  # the one that the caller names


def decide(call: Checked) -> AttentionProblem:
    """The problem with its backend; or the problem over packed sequences, if another backend runs
    that; or the problem of appending and attending at once, if the backend can do that.
    """
    problem, operands, layout, _, backend = call
    if problem.options.batch_invariant is None and is_batch_invariant():
        problem = problem._replace(options=problem.options._replace(batch_invariant=True))
    options = problem.options._replace(backend=select(problem, backend))
    problem = problem._replace(options=options)
    if not isinstance(layout, Cached):
        return problem
    packed = packed_problem(problem, operands, backend)
    return packed or appending_problem(problem, operands, layout) or problem


def packed_problem(
    problem: AttentionProblem, operands: Operands, backend: str | None
) -> AttentionProblem | None:
    """The problem over packed sequences, if its backend is not the one that is already chosen."""
    if problem.options.k_unpack:
        return None
    k, v = operands.k, operands.v
    side_by_side = all(x.stride(0) == x.shape[1] * x.stride(1) for x in (k, v))
    copied = problem.B * problem.N * problem.Hk * (problem.D + problem.Dv) * k.element_size()
    if (
        problem.M * problem.group < FEWEST_QUERIES
        or operands.seqused_k is None
        or problem.spans > 0
        or problem.has_key_index
        or operands.leftpad_k is not None
        or operands.cache_batch_idx is not None
        or (copied > LARGEST_COPY if problem.page_size else not side_by_side)
    ):
        return None
    packed = problem._replace(layout="packed", page_size=0)
    chosen = select(packed, backend)
    has_small_pages = chosen == "hopper" and problem.page_size % SMALLEST_PAGE > 0
    if chosen == problem.options.backend and not has_small_pages:
        return None
    return packed._replace(options=problem.options._replace(backend=chosen))


def appending_problem(
    problem: AttentionProblem, operands: Operands, layout: Cached
) -> AttentionProblem | None:
    """The problem of appending and attending at once, if its backend can do that."""
    k, cos = layout.k_new, layout.rotary_cos
    if (
        torch.compiler.is_compiling()
        or k is None
        or layout.formats is not None
        or layout.cu_seqlens_k_new is not None
        or not 0 < k.shape[1] <= MOST_NEW_TOKENS
        or k.shape[-1] != problem.D  # with `qv`, which needs the new tokens in the cache first
        # A backend may copy other caches, and would then append to the copy.
        or not operands.k.stride(-1) == operands.v.stride(-1) == 1
    ):
        return None
    backend = appender(problem.options.backend)
    appending = Appending(
        tokens=1 << (k.shape[1] - 1).bit_length(),
        pairs=0 if cos is None else cos.shape[1],
        is_interleaved=layout.rotary_interleaved,
        has_own_positions=bool(problem.options.facts),
    )
    described = problem._replace(appending=appending)
    return described if backend is not None and backend.appends(described) else None


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
    refusals, last = [], ""
    for candidate in (name,) if name else ORDER:
        backend = BACKENDS[candidate]
        reasons = backend.unsupported_reasons(problem)
        if reasons:
            refusals.append(f"  {candidate}: " + "; ".join(reasons))
        elif not name and backend.defers is not None and backend.defers(problem):
            last = candidate  # if no other one can
        else:
            return candidate
    if last:
        return last
    subject = f"backend {name!r} cannot" if name else "no backend can"
    raise NotImplementedError(f"{subject} run this call:\n" + "\n".join(refusals))


_selected = memoised(4096)(_select)


class InForce(threading.local):
    """The values of one setting that are in force in this thread; the last entry of a list applies.

    Args:
        everywhere: a list of one value, which threads share: that of the last call without a
            ``with``.
    """

    # A ContextVar would also separate the tasks of an event loop. But torch.compile (up to 2.13)
    # can neither trace `ContextVar.get` and `.set` nor guard on the value, and a copy on which it
    # can guard would not follow a change of task, which is not announced.
    def __init__(self, everywhere: list[Any]) -> None:
        self.everywhere = everywhere
        self.blocks: list[Any] = []  # the ``with`` blocks around the running code
        self.held: list[_Choice] = []  # results of a call that a ``with`` may still enter

    def value(self) -> Any:
        """The value that applies to a call of this thread."""
        if self.blocks:
            return self.blocks[-1]
        if self.held:
            return self.held[-1].value
        return self.everywhere[0]


class _Choice:
    """The value of one call, held until a ``with`` enters it or no longer can."""

    def __init__(self, value: Any, in_force: InForce) -> None:
        self.value = value
        self.held = in_force.held
        self.held.append(self)


class Setting:
    """A value that applies from here on, or inside a ``with`` block."""

    _in_force: InForce  # of each subclass
    _choice: _Choice | None = None  # None if `__init__` raises

    def __init__(self, value: Any) -> None:
        self.value = value
        self._choice = _Choice(value, self._in_force)

    def __enter__(self) -> None:
        choice, self._choice = self._choice, None
        if choice is not None and choice in choice.held:
            choice.held.remove(choice)
        self._in_force.blocks.append(self.value)

    def __exit__(self, *exception: object) -> None:
        self._in_force.blocks.pop()

    def __del__(self) -> None:
        # Only now is it certain that this was a call without ``with``. If a choice applied to all
        # threads earlier, another thread's calls between `__init__` and `__enter__` of a block
        # would run with the wrong value.
        choice = self._choice
        if choice is not None and choice in choice.held:
            self._in_force.everywhere[0] = choice.value
            del choice.held[: choice.held.index(choice) + 1]  # it overrides earlier calls


class backend(Setting):
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

    _in_force = InForce([None])

    def __init__(self, name: BackendName | None) -> None:
        if name is not None:
            check_name(name)
        super().__init__(name)


class batch_invariant(Setting):
    """Make calls `batch_invariant` from here on, or inside a ``with`` block, as `backend` does.

    ::

        flashtile.batch_invariant()  # all calls of all threads from here on
        with flashtile.batch_invariant():  # the calls of this thread inside the block
            ...

    Args:
        enabled: whether calls without that argument are; at first, they are not.

    Raises:
        TypeError: `enabled` is not a bool.
    """

    _in_force = InForce([False])

    def __init__(self, enabled: bool = True) -> None:
        if type(enabled) is not bool:
            raise TypeError(f"enabled: got {type(enabled).__name__}, want True or False")
        super().__init__(enabled)


# The backend that the caller forces with `backend`, if any; whether calls that say nothing are
# `batch_invariant`.
forced: Callable[[], str | None] = backend._in_force.value
is_batch_invariant: Callable[[], bool] = batch_invariant._in_force.value


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is a backend."""
    if name not in ORDER:
        raise ValueError(f"backend: got {name!r}, want one of {', '.join(map(repr, ORDER))}")
