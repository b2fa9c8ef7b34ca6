"""What plain PyTorch makes of a call, again and again in other orders of summation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

Run = dict[str, Tensor]


class PlainRuns:
    """Results by name of `run(0)`, `run(1)`, ..., at most `orders` of them.

    In float32 the error of a few numbers is a matter of luck, so more than one run may be needed to
    know it. A run is made when it is asked for, once for all names.
    """

    def __init__(self, run: Callable[[int], Run], orders: int) -> None:
        self._run = run
        self._orders = orders
        self._runs: list[Run] = []

    def results(self, name: str) -> Iterator[Tensor]:
        """One tensor of every run."""
        for i in range(self._orders):
            if i == len(self._runs):
                self._runs.append(self._run(i))
            yield self._runs[i][name]
