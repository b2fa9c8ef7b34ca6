"""Fill uninitialised buffers of flashtile with NaN, so that unwritten elements are found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flashtile.gpu import memory


def poisoned_makers() -> Iterator[tuple[Any, str, Any]]:
    """(Object, attribute, replacement) for all that makes uninitialised tensors.

    The replacements poison what flashtile makes, and nothing else.
    """
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted"):
        yield torch, name, _poisoning(getattr(torch, name))
    for name in ("new_empty", "new_empty_strided"):
        yield torch.Tensor, name, _poisoning(getattr(torch.Tensor, name))
    makers = {kind: _poisoning(make) for kind, make in memory._EMPTY_STRIDED.items()}
    yield memory, "_EMPTY_STRIDED", makers


def _poisoning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return _poison(tensor) if _is_ours(sys._getframe(1)) else tensor

    return wrapper


def _is_ours(frame: Any) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.split(".")[0] == "flashtile" and not name.startswith("flashtile.testing")


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "meta" or type(tensor) is not torch.Tensor:
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)
