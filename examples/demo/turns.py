"""Times of implementations that take turns: the best of three runs each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from flashtile.cli.timing import Call, timer_for

Advance = Callable[[], None]  # called after each run

ROUNDS = 3
RUNS = ROUNDS + 1  # with the one that warms up


def best_of_three(calls: Mapping[str, Call], device: str) -> dict[str, float]:
    """Seconds of each call. All of them have run before: nothing is done for the first time."""
    timer = timer_for(device)
    best = dict.fromkeys(calls, math.inf)
    for _ in range(ROUNDS):
        for name, call in calls.items():  # the machine's speed drifts alike for all
            best[name] = min(best[name], timer(call) / 1e3)
    return best
