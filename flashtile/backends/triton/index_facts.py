"""What can be known in advance of the numbers that a score function computes in a tile.

The difference j - i of a query and a key decides most of what score functions read. All scores of a
diagonal share it, and in a tile it lies between that of two corners. So kernels need not look at
every index: see `score_source.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...score_mod.program import CONSTANT, Line, Name

# On what a number of a tile depends: its query, its key, and the difference of both. Without the
# first or the second, a tile has one number for each key, or for each query.
QUERY, KEY, DIFFERENCE = "i", "j", "d"
Axes = frozenset[str]
Bounds = tuple[str, str]

# Integers that hold every index; narrower ones wrap around.
_WIDE = (torch.int32, torch.int64)
# Operations whose result has the bounds of the first argument, but for the limits given.
_SAME = ("_to_copy", "detach", "alias", "clone")


def is_everywhere(axes: Axes) -> bool:
    """Whether every score of a tile may have another number."""
    return DIFFERENCE in axes or {QUERY, KEY} <= axes


class Facts:
    """Facts of the numbers of a program's lines, by name."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = {line.name: line for line in lines}
        self._axes: dict[Any, Axes] = {Name(x): frozenset(x) for x in (QUERY, KEY)}
        self._axes |= {Name(x): frozenset((QUERY, KEY)) for x in "sg"}
        self._slopes: dict[Any, tuple[int, int]] = {Name("i"): (1, 0), Name("j"): (0, 1)}
        for line in lines:
            self._learn(line)

    def axes(self, x: Any) -> Axes:
        """On what a number depends."""
        return self._axes.get(x, frozenset())

    def bounds(self, x: Any) -> Bounds | None:
        """The least and the greatest value of an index in a tile, as expressions of `corners`; None
        if they are not known.
        """
        if isinstance(x, int):
            return f"{x}", f"{x}"
        if x in ("i", "j"):
            of = "row" if x == "i" else "key"
            return f"corners.first_{of}", f"corners.last_{of}"
        line = self._lines.get(x)
        if line is None:
            return None
        if line.op == CONSTANT:
            return self.bounds(line.arguments[0])
        return self._bounds_of(line) if line.dtype == torch.int32 else None

    def _learn(self, line: Line) -> None:
        """The axes of a line and, if it is a multiple of i plus one of j plus a number that is the
        same for all scores, these factors.
        """
        slopes = self._slope_of(line)
        axes: Axes = frozenset().union(*(self.axes(x) for x in line.names))
        if slopes is not None:
            self._slopes[line.name] = slopes
            if slopes[0] == -slopes[1] != 0:
                axes = frozenset(DIFFERENCE)
        self._axes[line.name] = axes

    def _slope_of(self, line: Line) -> tuple[int, int] | None:
        name = line.op.partition(".")[0]
        if name not in ("add", "sub", "neg", *_SAME) or line.dtype not in _WIDE:
            return None
        known = [self._slopes.get(x, None if self.axes(x) else (0, 0)) for x in line.arguments[:2]]
        one, *others = known
        other = others[0] if others else (0, 0)
        if one is None or other is None:
            return None
        factor = dict(line.options).get("alpha", 1)
        if name == "add":
            return one[0] + factor * other[0], one[1] + factor * other[1]
        if name == "sub":
            return one[0] - factor * other[0], one[1] - factor * other[1]
        if name == "neg":
            return -one[0], -one[1]
        return one

    def _bounds_of(self, line: Line) -> Bounds | None:
        name, options = line.op.partition(".")[0], dict(line.options)
        if options.get("alpha", 1) != 1:
            return None
        least, greatest = self.bounds(line.arguments[0]) or ("", "")
        if not least:
            return None
        if name in _SAME:
            return least, greatest
        if name == "neg":
            return f"-({greatest})", f"-({least})"
        if name == "abs":
            opposite = f"tl.maximum({least}, -({greatest}))"
            return f"tl.maximum({opposite}, 0)", f"tl.maximum(-({least}), {greatest})"
        if name in ("add", "sub"):
            other = self.bounds(line.arguments[1])
            if other is None:
                return None
            if name == "add":
                return f"({least} + {other[0]})", f"({greatest} + {other[1]})"
            return f"({least} - ({other[1]}))", f"({greatest} - ({other[0]}))"
        if name in ("clamp", "clamp_min", "clamp_max"):
            return self._limited(least, greatest, limits_of(line))
        return None

    def _limited(self, least: str, greatest: str, limits: Mapping[str, Any]) -> Bounds | None:
        for function, limit in (("maximum", limits.get("min")), ("minimum", limits.get("max"))):
            if limit is not None:
                known = self.bounds(limit)
                if known is None:
                    return None
                least = f"tl.{function}({least}, {known[0]})"
                greatest = f"tl.{function}({greatest}, {known[1]})"
        return least, greatest


def limits_of(line: Line) -> dict[str, Any]:
    """The arguments ``min`` and ``max`` of a `clamp`, `clamp_min` or `clamp_max`."""
    name = line.op.partition(".")[0]
    names = {"clamp": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}[name]
    return dict(zip(names, line.arguments[1:], strict=False)) | dict(line.options)
