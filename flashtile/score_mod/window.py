"""Score functions that hide keys as a window does.

A result ``where(visible, x, -inf)``, whose condition compares ``j - i`` with numbers, is the score
`x` under a window. Backends skip what a window hides, but compute what a function hides.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import torch

from .program import CONSTANT, Line, Name, fact, parsed


class Windowed(NamedTuple):
    """A program that changes scores where ``first <= j - i <= last``, and hides all others."""

    program: str  # "" if it does not change them
    first: float
    last: float


EVERYWHERE = (-inf, inf)
_NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}  # of -x and -y
_AND, _OR = ("bitwise_and", "logical_and"), ("bitwise_or", "logical_or")


@fact
def windowed(text: str) -> Windowed:
    """The program without what it hides as a window does."""
    program = parsed(text)
    lines = {line.name: line for line in program.lines}
    result, visible = program.result, EVERYWHERE
    while (found := _shown(lines, result)) is not None:
        result, visible = found[0], _both(visible, found[1])
    if visible == EVERYWHERE:
        return Windowed(text, *visible)
    rest = replace(program, result=result).without_unused()
    return Windowed("" if result == "s" else str(rest), *visible)


def _shown(lines: dict[Name, Line], result: Name) -> tuple[Name, tuple[float, float]] | None:
    """The score that a result shows, and the bounds of j - i where it does; None if it does not."""
    line = lines.get(result)
    name = "" if line is None else line.op.partition(".")[0]
    if line is None or name not in ("where", "masked_fill"):
        return None
    condition, one, other = line.arguments
    is_shown = True
    if name == "masked_fill":
        condition, one, other = one, condition, other
        is_shown = False
    elif _number(lines, one) == -inf:
        one, other, is_shown = other, one, False
    if _number(lines, other) != -inf or not isinstance(one, Name):
        return None
    bounds = _bounds(lines, condition, is_shown)
    return None if bounds is None else (one, bounds)


def _number(lines: dict[Name, Line], x: Any) -> Any:
    """The number that an argument is; None if it is none."""
    if not isinstance(x, Name):
        return x
    line = lines.get(x)
    return line.arguments[0] if line is not None and line.op == CONSTANT else None


def _both(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return max(one[0], other[0]), min(one[1], other[1])


def _bounds(lines: dict[Name, Line], x: Any, is_true: bool) -> tuple[float, float] | None:
    """The bounds of j - i between which a condition is `is_true`; None if these are not all."""
    line = lines.get(x)
    if line is None:
        return None
    name = line.op.partition(".")[0]
    if name in ("bitwise_not", "logical_not"):
        return _bounds(lines, line.arguments[0], not is_true)
    if name in (_AND if is_true else _OR):
        one, other = (_bounds(lines, y, is_true) for y in line.arguments)
        return None if one is None or other is None else _both(one, other)
    if name not in _NEGATED:
        return None
    return _compared(lines, name if is_true else _NEGATED[name], *line.arguments)


def _compared(lines: dict[Name, Line], op: str, x: Any, y: Any) -> tuple[float, float] | None:
    """The bounds of j - i where ``op(x, y)``."""
    size, number = lines.get(x), _number(lines, y)
    if size is not None and size.op == "abs.default":
        if op not in ("lt", "le") or type(number) is not int:
            return None
        inner = size.arguments[0]
        one = _compared(lines, op, inner, number)
        other = _compared(lines, _MIRRORED[op], inner, -number)
        return None if one is None or other is None else _both(one, other)
    left, right = _linear(lines, x), _linear(lines, y)
    if left is None or right is None:
        return None
    of_i, of_j, more = (a - b for a, b in zip(left, right, strict=True))
    if of_i != -of_j or abs(of_j) != 1:
        return None
    if of_j < 0:
        op, more = _MIRRORED[op], -more
    limit = -more  # op(j - i, limit)
    if op in ("lt", "le"):
        return -inf, limit - (op == "lt")
    return limit + (op == "gt"), inf


def _linear(lines: dict[Name, Line], x: Any) -> tuple[int, int, int] | None:
    """The factors of i and of j in an integer, and what is added to them; None if it is not so."""
    if x in ("i", "j"):
        return int(x == "i"), int(x == "j"), 0
    number = _number(lines, x)
    if type(number) is int:
        return 0, 0, number
    line = lines.get(x)
    name = "" if line is None else line.op.partition(".")[0]
    if line is None or line.dtype != torch.int64 or line.options:
        return None
    if name not in ("add", "sub", "rsub", "neg"):
        return None
    one, other = (_linear(lines, y) for y in (0, *line.arguments)[-2:])
    if name == "rsub":
        one, other = other, one
    if one is None or other is None:
        return None
    sign = 1 if name == "add" else -1
    return one[0] + sign * other[0], one[1] + sign * other[1], one[2] + sign * other[2]
