"""Which configurations of a slow test run: a sample by default, all of them on request.

Compiling or interpreting one kernel takes seconds, and options, dtypes, head dims and devices
multiply. ``FLASHTILE_ALL_CONFIGURATIONS=1`` takes every combination, as `make test-triton-full`
does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any, TypeVar

FULL = os.environ.get("FLASHTILE_ALL_CONFIGURATIONS") == "1"

Case = TypeVar("Case")
Kind = TypeVar("Kind")


def sample(cases: Iterable[Case], step: int) -> list[Case]:
    """Every case, or one out of `step`, spread evenly and always the same."""
    return list(cases)[:: 1 if FULL else step]


def one_kind_each(cases: Iterable[Case], kinds: Iterable[Kind]) -> list[tuple[Case, Kind]]:
    """Every case with every kind, or every case with one kind, round robin.

    Each kind occurs if there are at least as many cases as kinds.
    """
    cases, kinds = list(cases), list(kinds)
    if FULL:
        return list(product(cases, kinds))
    return [(case, kinds[i % len(kinds)]) for i, case in enumerate(cases)]


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every combination, or few in which each value meets each value of every other axis.

    Greedy: the next combination is the first one with the most pairs that have not met.
    """
    combined = list(product(*axes))
    if FULL:
        return combined
    pairs = {case: set(combinations(enumerate(case), 2)) for case in combined}
    left, chosen = set().union(*pairs.values()), []
    while left:
        chosen.append(max(combined, key=lambda case: len(pairs[case] & left)))
        left -= pairs[chosen[-1]]
    return chosen
