"""FlashAttention for PyTorch in pure Python: exact attention without the N x N matrix, on every
machine.
"""

from typing import TYPE_CHECKING

from . import lazy
from .api import attention, attention_varlen, attention_with_kvcache
from .combine import flash_attn_combine
from .dispatch import backend
from .explain import explain
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .kvcache import workspace_size
from .masks import BlockMask
from .quantize import Quantized, attention_fp8, quantize_qkv

if TYPE_CHECKING:
    from . import (
        bert_padding,
        flash_blocksparse_attn_interface,
        integrations,
        layers,
        losses,
        models,
        modules,
        testing,
    )
else:
    __getattr__, __dir__ = lazy.submodules(
        __name__,
        "bert_padding",
        "flash_blocksparse_attn_interface",
        "integrations",
        "layers",
        "losses",
        "models",
        "modules",
        "testing",
    )

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "Quantized",
    "attention",
    "attention_fp8",
    "attention_varlen",
    "attention_with_kvcache",
    "backend",
    "explain",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "quantize_qkv",
    "workspace_size",
]
