"""The backends, one folder each: a module with the functions that `backend_interface` describes.

A backend never imports another one. Outside this package, only `call.dispatch`, which chooses the
backend of a call, `autograd`, which runs it, and the commands of `cli` import from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from ..backend_interface import Appender, Backend, IndexChecker

_loaded: dict[str, Backend] = {}


def load(name: str) -> Backend:
    """The backend module `name`, imported once; the first launch imports its kernels."""
    if name not in _loaded:
        _loaded[name] = cast(Backend, import_module(f".{name}", __name__))
    return _loaded[name]


def appender(name: str) -> Appender | None:
    """The backend module `name`, if it is an `Appender`."""
    module = load(name)
    return cast(Appender, module) if hasattr(module, "append_and_forward") else None


def index_checker(name: str) -> IndexChecker | None:
    """The backend module `name`, if it is an `IndexChecker`."""
    module = load(name)
    return cast(IndexChecker, module) if hasattr(module, "check_indices") else None
