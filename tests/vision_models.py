"""timm, also where torchvision is missing, of which its attention models use nothing."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest


class _Anything(type):
    """A class that has every attribute, such as the members of an enumeration."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Absent(ModuleType):
    """A module of torchvision of which every name is an empty class."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _AbsentTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def timm() -> Any:
    """The package; the calling test is skipped where it is not installed."""
    finder = _AbsentTorchvision()
    sys.meta_path.append(finder)  # the last to be asked: an installed torchvision comes first
    try:
        return pytest.importorskip("timm")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Absent)]:
            del sys.modules[name]
