"""FlashAttention for PyTorch in pure Python: exact attention without the N x N matrix, on CPUs and
CUDA GPUs.
"""

from . import lazy
from .api import attention, attention_varlen, attention_with_kvcache, explain, workspace_size
from .cache_formats import CacheFormat
from .call.dispatch import backend, batch_invariant
from .combine import flash_attn_combine
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .lru import clear_caches
from .masks import BlockMask, Folded, Spans, fold
from .quantize import Quantized, attention_fp8, quantize_qkv
from .statistics import Statistics

# Type checkers read __init__.pyi instead of this file.
_SUBMODULES = (
    "bert_padding",
    "cache_formats",
    "distributed",
    "flash_blocksparse_attn_interface",
    "integrations",
    "layers",
    "losses",
    "models",
    "modules",
    "testing",
)
__getattr__, __dir__ = lazy.submodules(__name__, *_SUBMODULES)

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "CacheFormat",
    "Folded",
    "Quantized",
    "Spans",
    "Statistics",
    "attention",
    "attention_fp8",
    "attention_varlen",
    "attention_with_kvcache",
    "backend",
    "batch_invariant",
    "clear_caches",
    "explain",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "fold",
    "quantize_qkv",
    "workspace_size",
]
