"""A memo of the decisions for earlier calls.

The checks, the description of the problem and the choice of a backend depend on shapes, dtypes,
devices and numbers, never on the values of tensors. If a call agrees with an earlier one in all of
these, it reuses that decision, because short calls on a GPU take less time than the checks.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..lru import Memo, memoised
from ..masks import Window
from ..problem import AttentionProblem
from . import dispatch


class Decision(NamedTuple):
    """A call that has passed all checks."""

    problem: AttentionProblem  # with the backend
    has_extras: bool  # tensors besides q, k and v


_PLAIN = frozenset((bool, int, float, str, type(None)))
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_TUPLES = frozenset((tuple, Window))
_decisions: Memo[Any, Decision] = Memo(4096)


def key_of(names: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
    """Everything about the arguments `given` that decides a call, and the global state that does.

    Args:
        names: of the arguments, which are not the same ones in every call.

    Returns:
        None where that cannot be said in advance: under a tracer, whose sizes are symbols, and for
        arguments of other kinds (a block mask, a subclass of Tensor, something to be refused).
    """
    if torch.compiler.is_compiling():
        return None
    kinds = tuple(map(type, given))  # True is no number here, though it equals 1
    places = _places(kinds)
    if places is None:
        return None
    facts: list[Any] = [
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        dispatch.forced(),
        names,
        kinds,
        places.plain(given),
    ]
    for place in places.tensors:
        x = given[place]
        if x.is_nested:  # which have no shape, and are refused
            return None
        facts += (x.shape, x.dtype, x.device, x.requires_grad, x.layout)
    for place in places.tuples:
        parts = tuple(map(type, given[place]))
        if not _PLAIN.issuperset(parts):
            return None
        facts += (parts, given[place])
    return tuple(facts)


class Places(NamedTuple):
    """Where arguments stand whose kind does not say all of them."""

    plain: Callable[[tuple[Any, ...]], Any]  # picks those whose value is what counts
    tensors: tuple[int, ...]
    tuples: tuple[int, ...]


@memoised(1024)
def _places(kinds: tuple[type, ...]) -> Places | None:
    """None where one is of another kind."""

    def of(wanted: Set[Any]) -> tuple[int, ...]:
        return tuple(place for place, kind in enumerate(kinds) if kind in wanted)

    if not (_PLAIN | _TENSORS | _TUPLES).issuperset(kinds):
        return None
    plain = of(_PLAIN - {type(None)})
    pick = itemgetter(*plain) if plain else _none
    return Places(pick, of(_TENSORS), of(_TUPLES))


def _none(given: tuple[Any, ...]) -> tuple[()]:
    """What `itemgetter` picks of no arguments."""
    return ()


def get(key: Any) -> Decision | None:
    """The decision for a call of this key, if there was one."""
    return None if key is None else _decisions.get(key)


def put(key: Any, decision: Decision) -> None:
    """Keep a decision for `get`."""
    if key is not None:
        _decisions[key] = decision
