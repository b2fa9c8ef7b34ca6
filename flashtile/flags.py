"""True or False, as callers give them."""

from __future__ import annotations

from typing import Any

import torch


def flag(name: str, x: Any) -> bool:
    """`x` as a bool: itself, 0 or 1.

    Raises:
        TypeError, ValueError: for anything else, whose truth may not be what the caller meant:
            "no" is true, and a tensor on a GPU is only known after waiting for it.
    """
    if isinstance(x, (bool, torch.SymBool)):
        return bool(x)
    if not isinstance(x, int):
        raise TypeError(f"{name}: got {type(x).__name__}, want True or False")
    if x not in (0, 1):
        raise ValueError(f"{name}: got {x}, want True or False")
    return x == 1
