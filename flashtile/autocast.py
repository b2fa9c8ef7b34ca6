"""Autocast: public functions cast their inputs as autocast requires, and turn it off inside.

PyTorch casts the inputs of single operations: under autocast ``x @ y`` of float32 tensors is a
product in 16 bits, even inside our algorithms. An algorithm that prescribes the dtype of each
product therefore turns autocast off.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_CAST = (torch.float16, torch.bfloat16, torch.float32)  # autocast leaves float64 and float8
_NOTHING_TO_DO = nullcontext()

_Function = TypeVar("_Function", bound=Callable[..., Any])


# Whether autocast is on for any device; five times cheaper than asking for one.
is_any_autocast_on = torch._C._is_any_autocast_enabled


def is_autocasting(x: Any) -> bool:
    """Whether autocast is on for the device of `x`; False for devices other than CPU and CUDA."""
    if not is_any_autocast_on():
        return False
    # PyTorch raises for other devices.
    known = isinstance(x, (Tensor, torch.device)) and _device(x).type in ("cpu", "cuda")
    return known and torch.is_autocast_enabled(_device(x).type)


def autocast_off(x: Tensor | torch.device) -> AbstractContextManager[Any]:
    """A context in which operations on the device of `x` run in the dtypes of their inputs."""
    if not is_autocasting(x):
        return _NOTHING_TO_DO
    return torch.autocast(_device(x).type, enabled=False)


def _device(x: Tensor | torch.device) -> torch.device:
    return x.device if isinstance(x, Tensor) else x


def without_autocast(function: _Function) -> _Function:
    """`function` with autocast off on the device of its first argument."""

    @wraps(function)
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with autocast_off(x):
            return function(x, *args, **kwargs)

    return cast(_Function, run)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts on the device of `x`; None where it is off."""
    return torch.get_autocast_dtype(x.device.type) if is_autocasting(x) else None


def cast_inputs(*inputs: Any) -> tuple[Any, ...]:
    """Cast as PyTorch's own operations do: if autocast is on for the device of the first input,
    cast every float16, bfloat16 or float32 tensor to the autocast dtype."""
    dtype = autocast_dtype(inputs[0])
    if dtype is None:
        return inputs
    return tuple(cast_input(x, dtype) for x in inputs)


def cast_input(x: Any, dtype: torch.dtype) -> Any:
    """`x` in `dtype`, if it is a tensor that autocast would cast."""
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype in _CAST else x
