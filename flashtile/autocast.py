"""Autocast at the boundary: entrances cast their inputs as it says, and inside it is off.

PyTorch casts the inputs of single operations: under autocast ``x @ y`` of float32 tensors is a
product in 16 bits, wherever it is written. An algorithm that says in which dtype each product runs
turns autocast off around itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

_CAST = (torch.float16, torch.bfloat16, torch.float32)  # float64 and float8 stay
_NOTHING_TO_DO = nullcontext()

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_autocasting(x: Any) -> bool:
    """Whether autocast is on where `x` is; PyTorch raises when asked about other devices."""
    if not torch._C._is_any_autocast_enabled():  # a fifth of what asking for a device costs
        return False
    known = isinstance(x, Tensor) and x.device.type in ("cpu", "cuda")
    return known and torch.is_autocast_enabled(x.device.type)


def autocast_off(x: Tensor) -> AbstractContextManager[Any]:
    """A block in which operations on the device of `x` run in the dtypes of their inputs."""
    if not is_autocasting(x):
        return _NOTHING_TO_DO
    return torch.autocast(x.device.type, enabled=False)


def without_autocast(function: _Function) -> _Function:
    """`function` with autocast off on the device of its first argument."""

    @wraps(function)
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with autocast_off(x):
            return function(x, *args, **kwargs)

    return run  # type: ignore[return-value]


def cast_inputs(*inputs: Any) -> tuple[Any, ...]:
    """Under autocast on the device of the first input, cast as PyTorch's own operations do: every
    tensor of float16, bfloat16 or float32 to the dtype of autocast."""
    if not is_autocasting(inputs[0]):
        return inputs
    dtype = torch.get_autocast_dtype(inputs[0].device.type)
    return tuple(cast_input(x, dtype) for x in inputs)


def cast_input(x: Any, dtype: torch.dtype) -> Any:
    """`x` in `dtype`, if it is a tensor that autocast would cast."""
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype in _CAST else x
