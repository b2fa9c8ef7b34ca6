"""Language models built from `flashtile.modules`."""

from typing import TYPE_CHECKING

from .. import lazy

if TYPE_CHECKING:
    from . import (
        bert,
        checkpoints,
        decoding,
        families,
        generation,
        gpt,
        gpt_config,
        hugging_face,
        vit,
    )
else:
    __getattr__, __dir__ = lazy.submodules(__name__)
