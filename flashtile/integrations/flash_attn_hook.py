"""Lets ``import flash_attn``, or ``import xformers``, find flashtile in every process of an
environment.

``flashtile flash-attn install`` copies this file into site-packages, beside a ``.pth`` file that
imports the copy and calls `start` whenever Python starts. So nothing is imported here that takes
time: flashtile, and with it PyTorch, follows when a program first asks for one of `NAMES`.
"""

from __future__ import annotations

import sys
from _thread import RLock

TYPE_CHECKING = False  # `typing` takes long to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

NAMES = {  # by the module of `flashtile.integrations` that serves them
    "flash_attn": ("flash_attn", "flash_attn_2_cuda", "flash_attn_3", "flash_attn_interface"),
    "xformers": ("xformers",),
}


class Hook:
    """A finder that gives way to that of the `install` of an integration."""

    def __init__(self, integration: str, choice: dict[str, object]) -> None:
        self.integration, self.choice = integration, choice
        self.lock = RLock()
        self.is_installing = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module to serve; None for all others, or without flashtile."""
        if name.partition(".")[0] not in NAMES[self.integration]:
            return None
        with self.lock:  # another thread waits until the modules are there
            if self.is_installing:  # `install` asks whether the real one is there
                return None
            if self in sys.meta_path and not self.install():
                return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        return next(filter(None, specs), None)

    def install(self) -> bool:
        """Whether flashtile, if it is there, serves the names now."""
        import importlib.util

        if importlib.util.find_spec("flashtile") is None:
            return False
        self.is_installing = True
        try:
            package = "flashtile.integrations"
            modules = importlib.import_module(f"{package}.flash_attn_modules")
            try:
                importlib.import_module(f"{package}.{self.integration}").install(**self.choice)
            except modules.RealPackageError:  # which lacks the module that is looked for
                return False
        finally:
            self.is_installing = False
        sys.meta_path.remove(self)
        return True


def start(integration: str, **choice: object) -> None:
    """Append a hook: the last finder, so that a package that is really there comes first.

    `choice` are arguments of the `install` of the integration.
    """
    sys.meta_path.append(Hook(integration, choice))
