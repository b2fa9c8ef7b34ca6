"""The seven functions of FlashAttention-2: same names, positional order, defaults and return
values.

``from flash_attn import ...`` becomes ``from flashtile import ...``. Everything newer is
keyword-only (`Extras`), with the meaning it has in `flashtile.attention`.
"""

from .cache import flash_attn_with_kvcache
from .dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from .extras import CacheExtras, Extras, PaddedExtras
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
