"""Integrations with other libraries. Importing flashtile imports none of them; each takes effect
only when the user calls it."""

from typing import TYPE_CHECKING

from .. import lazy

if TYPE_CHECKING:
    from . import diffusers, dtensor, sdpa, torch_registry, transformers
else:
    __getattr__, __dir__ = lazy.submodules(
        __name__, "diffusers", "dtensor", "sdpa", "torch_registry", "transformers"
    )
