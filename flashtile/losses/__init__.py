"""Losses of language models."""

from typing import TYPE_CHECKING

from .. import lazy

if TYPE_CHECKING:
    from . import cross_entropy
else:
    __getattr__, __dir__ = lazy.submodules(__name__)
