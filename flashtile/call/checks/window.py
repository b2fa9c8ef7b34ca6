"""Checks of `window_size`, which may be any pair of integers."""

from __future__ import annotations

from typing import Any

from ...masks import Window
from .tensors import INTEGERS, as_python

WANTED = "a pair (left, right) of ints, with -1 or None for an unbounded side"


def window(window_size: Any) -> Window:
    """Check `window_size` and return its two sides, None for unbounded.

    In a `Window` only None is unbounded; -1 is an offset of one position, as in
    FlashAttention-4.
    """
    if window_size is None:
        return Window(None, None)
    sides = as_python("window_size", window_size)
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise ValueError(f"window_size: got {window_size!r}, want {WANTED}")
    left, right = (_side(side, window_size) for side in sides)
    return Window(left, right)


def _side(side: Any, window_size: Any) -> Any:
    if side is None:
        return None
    if not isinstance(side, INTEGERS):
        side = as_python("window_size", side)
    if isinstance(side, bool) or not isinstance(side, INTEGERS):
        raise TypeError(f"window_size: got {window_size!r}, want {WANTED}")
    return None if side == -1 and not isinstance(window_size, Window) else side
