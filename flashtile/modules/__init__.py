"""Building blocks of transformers, with the names that ``flash_attn.modules`` gives them."""

from typing import TYPE_CHECKING

from .. import lazy

if TYPE_CHECKING:
    from . import alibi, attend, block, embedding, inference, mha, mlp
else:
    __getattr__, __dir__ = lazy.submodules(
        __name__, "alibi", "attend", "block", "embedding", "inference", "mha", "mlp"
    )
