"""Detect modules that compute attention without `scaled_dot_product_attention`.

While `refused` is active, a softmax that such a module calls raises an error. A module counts as
attention if the name of its class, or its own name in the model, matches `ATTENTION`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import nn

from .shared_effects import SharedEffect

ATTENTION = re.compile("att(entio)?n|mha", re.IGNORECASE)
HINTS: dict[type[nn.Module], str] = {nn.MultiheadAttention: "; call it with need_weights=False"}


@contextmanager
def _refusing() -> Iterator[None]:
    """Make every softmax function of PyTorch check its caller first."""
    functional = torch.nn.functional
    previous = functional.softmax, torch.softmax
    functional.softmax = _checking(previous[0])
    torch.softmax = _checking(previous[1])
    # torch.Tensor inherits the method, so deleting our attribute restores it. (The type checker
    # does not allow replacing a method.)
    torch.Tensor.softmax = _checking(torch.Tensor.softmax)  # type: ignore[method-assign]
    try:
        yield
    finally:
        functional.softmax, torch.softmax = previous
        del torch.Tensor.softmax


refused = SharedEffect(_refusing)


def _checking(softmax: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(softmax)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _refuse_attention(sys._getframe(1))
        return softmax(*args, **kwargs)

    return checked


def _refuse_attention(frame: FrameType) -> None:
    modules = list(calling_modules(frame))
    if not modules:
        return
    inner, outer = modules[0], modules[-1]
    path = next((name for name, module in outer.named_modules() if module is inner), "")
    if ATTENTION.search(type(inner).__name__) or ATTENTION.search(path.rpartition(".")[2]):
        named = f"{path} ({type(inner).__name__})" if path else type(inner).__name__
        raise RuntimeError(
            f"sdpa.install(strict=True): {named} computes attention with its own softmax instead "
            f"of scaled_dot_product_attention{HINTS.get(type(inner), '')}"
        )


def calling_modules(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose methods are running, innermost first."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not isinstance(module, nn.Softmax):
            yield module
        frame = frame.f_back
