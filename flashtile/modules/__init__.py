"""Building blocks of transformers, with the names of ``flash_attn.modules``."""

from typing import TYPE_CHECKING

from .. import lazy

if TYPE_CHECKING:
    from . import alibi, attend, block, embedding, flash_attention, inference, mha, mlp
else:
    __getattr__, __dir__ = lazy.submodules(__name__)
