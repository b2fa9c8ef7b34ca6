"""Submodules that are imported when they are first used as an attribute of their package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


def submodules(
    package: str, *names: str
) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` (PEP 562) for a package with the submodules `names`, by
    default all modules of its folder.

    After the first use a submodule is an ordinary attribute: the import system sets it.
    """
    names = names or tuple(module.name for module in iter_modules(sys.modules[package].__path__))

    def __getattr__(name: str) -> ModuleType:
        if name in names:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return __getattr__, __dir__
