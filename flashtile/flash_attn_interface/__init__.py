"""The seven functions of FlashAttention-2, with the same names, positional order, defaults and
return values.

``from flash_attn import ...`` becomes ``from flashtile import ...``. All newer options are
keyword-only (`Extras`) and mean the same as in `flashtile.attention`.
"""

from ..call.options import CacheExtras, Extras, PaddedExtras
from .cache import flash_attn_with_kvcache
from .dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from .varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "CacheExtras",
    "Extras",
    "PaddedExtras",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
