"""The backends, one folder each: a module with the functions that `backend_interface` describes.

A backend never imports another one. Outside this package, only `call.dispatch`, which chooses the
backend of a call, `autograd`, which runs it, and the commands of `cli` import from here.
"""

from __future__ import annotations

from typing import Literal, cast

import torch

from ..backend_interface import Appender, Backend, ForwardMode, IndexChecker, ScoreGradients
from . import cpu

BackendName = Literal["cpu", "hopper", "triton"]  # the folders here

# In order of preference.
ORDER: tuple[BackendName, ...] = (
    "cpu",  # every option, on every machine; the tensors must be on the CPU
    "hopper",  # the common options, on an H100 or H200, at the speed of that machine
    "triton",  # every option but float64, on any CUDA GPU from sm_80 on
)


class _Backends(dict[str, Backend]):
    """The backends by name. Those of GPUs are imported when they are first asked for: a call on a
    CPU never does. The import is a statement, because torch.compile traces that.
    """

    def __missing__(self, name: str) -> Backend:
        if name == "hopper":
            from . import hopper

            found = cast(Backend, hopper)
        elif name == "triton":
            from . import triton

            found = cast(Backend, triton)
        else:
            raise KeyError(name)
        if not torch.compiler.is_compiling():  # a graph would have to repeat the change
            self[name] = found
        return found


BACKENDS = _Backends(cpu=cast(Backend, cpu))


def appender(name: str) -> Appender | None:
    """The backend `name`, if it is an `Appender`."""
    module = BACKENDS[name]
    return cast(Appender, module) if hasattr(module, "append_and_forward") else None


def index_checker(name: str) -> IndexChecker | None:
    """The backend `name`, if it is an `IndexChecker`."""
    module = BACKENDS[name]
    return cast(IndexChecker, module) if hasattr(module, "check_indices") else None


def score_gradients() -> ScoreGradients:
    """The backend with the gradients of what scores read, if that of a backward lacks them."""
    return cast(ScoreGradients, BACKENDS["triton"])


def forward_mode(device_type: str) -> ForwardMode | None:
    """The backend with kernels for forward mode, whichever ran the forward; None on a CPU."""
    return cast(ForwardMode, BACKENDS["triton"]) if device_type == "cuda" else None
