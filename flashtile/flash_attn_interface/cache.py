"""Key-value caches: `flash_attn_with_kvcache`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..api import Result, attention_with_kvcache
from ..call import checks
from ..call.options import CacheExtras, WindowSize

if TYPE_CHECKING:
    from typing_extensions import Unpack


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    return_lse: bool = False,
    **extras: Unpack[CacheExtras],
) -> Result:
    """Append `k` and `v` to a key-value cache, then attend to it.

    For inference: no gradient is recorded, and the cache is written in place. Masks are aligned to
    the bottom-right corner of each sequence's own length, as in `flash_attn_func`.

    Args:
        q: (batch, seq_q, heads, head_dim).
        k_cache, v_cache: (cache rows, capacity, kv_heads, head_dim), or pages: (num_pages,
            page_size, kv_heads, head_dim).
        k, v: (batch, seq_new, kv_heads, head_dim), written at `cache_seqlens`.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), tables that rotate the new keys and the
            queries.
        cache_seqlens: an int or (batch,) int32, number of tokens in each cache before the append.
        cache_batch_idx: (batch,) int32, the cache row of each sequence.
        cache_leftpad: (batch,) int32, index of each sequence's first token in its cache row.
        block_table, page_table: (batch, pages per sequence) int32; two names of one argument.
        softmax_scale: factor on the scores; ``head_dim ** -0.5`` by default.
        causal: hide the keys after each query.
        window_size: (left, right) keys that a query sees on its two sides; -1 is unbounded.
        softcap: bound on the scores' magnitude, ``softcap * tanh(s / softcap)``; 0 is off.
        alibi_slopes: (heads,) or (batch, heads) float32; adds ``-slope * |distance|`` to a score.
        rotary_interleaved: rotate pairs (0, 1), (2, 3), ... instead of the two halves.
        num_splits: programs that share one sequence's keys on a GPU; 0 lets the backend choose.
        return_softmax_lse, return_lse: return (out, lse); two names of one argument.
        extras: keyword options as `flashtile.attention_with_kvcache` describes them.

    Returns:
        out (batch, seq_q, heads, value_head_dim), on request lse (batch, heads, seq_q) float32.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        NotImplementedError: no backend can run the call; the message gives the reasons of each.
    """
    return attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=checks.one_page_table(block_table, page_table),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        return_lse=return_softmax_lse or return_lse,
        **extras,
    )
