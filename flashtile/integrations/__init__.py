"""Integrations with other libraries. ``import flashtile`` imports none of these libraries; an
integration takes effect only when the user calls it.
"""

from typing import TYPE_CHECKING

from .. import lazy

if TYPE_CHECKING:
    from . import diffusers, dtensor, sdpa, torch_registry, transformers
else:
    __getattr__, __dir__ = lazy.submodules(
        __name__, "diffusers", "dtensor", "sdpa", "torch_registry", "transformers"
    )
