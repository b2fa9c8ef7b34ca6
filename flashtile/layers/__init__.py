"""Layers around attention, with the import paths of ``flash_attn.layers``, and the functions of
``flash_attn.ops``.
"""

from typing import TYPE_CHECKING

from .. import lazy

if TYPE_CHECKING:
    from . import (
        activations,
        apply_rotary,
        dense,
        dropout_norm,
        norm,
        patch_embed,
        rotary,
        tensor_parallel,
    )
else:
    __getattr__, __dir__ = lazy.submodules(__name__)
