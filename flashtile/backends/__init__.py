"""The backends, one folder each: a module with the functions that `backend_interface` describes.

A backend never imports another one. Outside this package, only `call.dispatch`, which chooses the
backend of a call, `autograd`, which runs it, and the commands of `cli` import from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Literal, cast

from ..backend_interface import Appender, Backend, IndexChecker

BackendName = Literal["cpu", "hopper", "triton"]  # the folders here

# In order of preference.
ORDER: tuple[BackendName, ...] = (
    "cpu",  # every option, on every machine; the tensors must be on the CPU
    "hopper",  # the common options, on an H100 or H200, at the speed of that machine
    "triton",  # every option but float64, on any CUDA GPU from sm_80 on
)

# Imported here and not on first use, because torch.compile cannot trace an import. This imports
# only the code that decides what a backend supports, not the kernels or their compiler.
BACKENDS: dict[str, Backend] = {
    name: cast(Backend, import_module(f".{name}", __name__)) for name in ORDER
}


def appender(name: str) -> Appender | None:
    """The backend `name`, if it is an `Appender`."""
    module = BACKENDS[name]
    return cast(Appender, module) if hasattr(module, "append_and_forward") else None


def index_checker(name: str) -> IndexChecker | None:
    """The backend `name`, if it is an `IndexChecker`."""
    module = BACKENDS[name]
    return cast(IndexChecker, module) if hasattr(module, "check_indices") else None
