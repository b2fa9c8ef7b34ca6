"""Layers around attention, with the import paths of ``flash_attn.layers``."""

from typing import TYPE_CHECKING

from .. import lazy

if TYPE_CHECKING:
    from . import apply_rotary, rotary
else:
    __getattr__, __dir__ = lazy.submodules(__name__, "apply_rotary", "rotary")
