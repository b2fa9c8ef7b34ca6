"""Tools to test a backend: the float64 reference, the tolerance rule and makers of inputs."""

from __future__ import annotations

from .cache_reference import (
    CacheReference,
    attention_with_kvcache_reference,
    combine_reference,
    rotate,
)
from .error_model import attention_in_float8, combine_variance, floor_of, rounding_variance
from .inputs import (
    DTYPES,
    ODD_HEAD_DIMS,
    ODD_LENGTHS,
    STRIDE_STYLES,
    alibi_slopes,
    cu_seqlens,
    dense_from_tiles,
    drawn_keep,
    generator,
    normal,
    packed_qkv,
    paged,
    qkv,
    rotary_tables,
    strided,
    tile_kinds,
)
from .judge import Leaves, Run, call_failures, output_failures
from .reference import (
    Reference,
    attention_reference,
    attention_varlen_reference,
    dense_block_mask,
    dense_spans,
    visible_keys,
)
from .tolerance import allowed_error, assert_close, plain_dtype

__all__ = [
    "DTYPES",
    "ODD_HEAD_DIMS",
    "ODD_LENGTHS",
    "STRIDE_STYLES",
    "CacheReference",
    "Leaves",
    "Reference",
    "Run",
    "alibi_slopes",
    "allowed_error",
    "assert_close",
    "attention_in_float8",
    "attention_reference",
    "attention_varlen_reference",
    "attention_with_kvcache_reference",
    "call_failures",
    "combine_reference",
    "combine_variance",
    "cu_seqlens",
    "dense_block_mask",
    "dense_from_tiles",
    "dense_spans",
    "drawn_keep",
    "floor_of",
    "generator",
    "normal",
    "output_failures",
    "packed_qkv",
    "paged",
    "plain_dtype",
    "qkv",
    "rotary_tables",
    "rotate",
    "rounding_variance",
    "strided",
    "tile_kinds",
    "visible_keys",
]
