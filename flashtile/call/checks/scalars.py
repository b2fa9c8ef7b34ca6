"""Checks of the plain numbers of a call."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ...gpu.workspace import MAX_SPLITS
from ...problem import Options, default_scale
from .tensors import INTEGERS, as_python
from .window import window


def integer(name: str, x: Any) -> Any:
    """An integer given as one, or as a tensor or a NumPy object that holds one."""
    number = x if isinstance(x, INTEGERS) else as_python(name, x)
    if isinstance(number, bool) or not isinstance(number, INTEGERS):
        raise TypeError(f"{name}: got {x!r}, want an int")
    return number


def length(name: str, x: Any) -> Any:
    """A non-negative length given as an integer."""
    if isinstance(x, (Tensor, bool)) or not isinstance(x, (int, torch.SymInt, Integral)):
        raise TypeError(f"{name}: got {type(x).__name__}, want an int")
    if x < 0:
        raise ValueError(f"{name}: got {x}, want a length of at least 0")
    return x if isinstance(x, (int, torch.SymInt)) else int(x)


def number(name: str, x: Any, wanted: str) -> Any:
    """A finite real number."""
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
        TypeError, ValueError: for anything else, because its truth value may not be what the caller
            meant ("no" is true), and reading a tensor on a GPU makes the host wait.
    """
    if isinstance(x, (bool, torch.SymBool)):
        return bool(x)
    if not isinstance(x, int):
        raise TypeError(f"{name}: got {type(x).__name__}, want True or False")
    if x not in (0, 1):
        raise ValueError(f"{name}: got {x}, want True or False")
    return x == 1


def splits(num_splits: Any) -> Any:
    """The checked number of programs that share a sequence's keys."""
    count = length("num_splits", num_splits)
    if count > MAX_SPLITS:
        raise ValueError(f"num_splits: got {num_splits}, want 0 (chosen for you) to {MAX_SPLITS}")
    return count


def options(
    *,
    head_dim: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: Any,
    causal: bool,
    window_size: Any,
    attention_chunk: Any,
    softcap: Any,
    dropout_p: Any = 0.0,
    num_splits: Any = 0,
    deterministic: bool = False,
) -> Options:
    """The plain numbers of a call, checked and normalised."""
    if softmax_scale is None:
        softmax_scale = default_scale(head_dim)
    else:
        softmax_scale = number("softmax_scale", softmax_scale, "a finite number, or None")
    softcap = 0.0 if softcap is None else number("softcap", softcap, "a number >= 0 (0: off)")
    if softcap < 0:
        raise ValueError(f"softcap: got {softcap}, want a number >= 0 (0: off)")
    dropout_p = number("dropout_p", dropout_p, "a probability in [0, 1)")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: got {dropout_p}, want a probability in [0, 1)")
    chunk = length("attention_chunk", 0 if attention_chunk is None else attention_chunk)
    num_splits = splits(num_splits)
    left, right = window(window_size).under(flag("causal", causal))
    deterministic = flag("deterministic", deterministic)
    return Options(
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        window_left=left,
        window_right=right,
        attention_chunk=chunk,
        softcap=softcap,
        dropout_p=dropout_p,
        num_splits=num_splits,
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
    )
