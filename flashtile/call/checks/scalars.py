"""Checks of the plain numbers of a call."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ...gpu.workspace import MAX_SPLITS
from .tensors import INTEGERS, as_python


def integer(name: str, x: Any) -> Any:
    """An integer, given as an int or as a tensor or NumPy object that holds one."""
    number = x if isinstance(x, INTEGERS) else as_python(name, x)
    if isinstance(number, bool) or not isinstance(number, INTEGERS):
        raise TypeError(f"{name}: got {x!r}, want an int")
    return number


def length(name: str, x: Any) -> Any:
    """Check and return a non-negative length, given as an integer."""
    if isinstance(x, (Tensor, bool)) or not isinstance(x, (int, torch.SymInt, Integral)):
        raise TypeError(f"{name}: got {type(x).__name__}, want an int")
    if x < 0:
        raise ValueError(f"{name}: got {x}, want a length of at least 0")
    return x if isinstance(x, (int, torch.SymInt)) else int(x)


def number(name: str, x: Any, wanted: str) -> Any:
    """Check and return a finite real number."""
    if isinstance(x, bool) or not isinstance(x, (Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name}: got {type(x).__name__}, want {wanted}")
    try:
        value = float(x)
    except OverflowError:  # an int larger than every float
        value = math.inf
    if not -math.inf < value < math.inf:  # False for NaN as well
        raise ValueError(f"{name}: got {x}, want {wanted}")
    return value


def flag(name: str, x: Any) -> bool:
    """`x` as a bool: itself, 0 or 1.

    Raises:
        TypeError, ValueError: `x` is anything else. Its truth value may not be what the caller
            meant ("no" is true), and reading a tensor on a GPU makes the host wait.
    """
    if type(x) is bool:
        return x
    if isinstance(x, torch.SymBool):
        return bool(x)
    if not isinstance(x, int):
        raise TypeError(f"{name}: got {type(x).__name__}, want True or False")
    if x not in (0, 1):
        raise ValueError(f"{name}: got {x}, want True or False")
    return x == 1


def generator(x: Any, device: torch.device) -> None:
    """Check the generator from which a call on `device` draws."""
    if not isinstance(x, torch.Generator):
        raise TypeError(f"generator: got {type(x).__name__}, want a torch.Generator")
    if x.device.type != device.type:
        raise ValueError(f"generator: got one of {x.device}, want one of {device}, as q")


def splits(name: str, x: Any) -> Any:
    """Check and return the number of programs that share a sequence's keys."""
    count = length(name, x)
    if count > MAX_SPLITS:
        raise ValueError(f"{name}: got {x}, want 0 (the backend chooses) to {MAX_SPLITS}")
    return count


def scale(name: str, x: Any) -> Any:
    """Check and return a factor on the scores; None for the default."""
    return None if x is None else number(name, x, "a finite number, or None")


def softcap(name: str, x: Any) -> Any:
    """Check and return a bound on the scores' magnitude; 0 or None is off."""
    wanted = "a number >= 0 (0: off)"
    bound = 0.0 if x is None else number(name, x, wanted)
    if bound < 0:
        raise ValueError(f"{name}: got {bound}, want {wanted}")
    return bound


def chunk(name: str, x: Any) -> Any:
    """Check and return a number of positions; 0 or None is off."""
    return length(name, 0 if x is None else x)


def probability(name: str, x: Any) -> Any:
    """Check and return a probability below 1."""
    wanted = "a probability in [0, 1)"
    p = number(name, x, wanted)
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name}: got {p}, want {wanted}")
    return p
