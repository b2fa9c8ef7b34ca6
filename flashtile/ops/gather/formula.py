"""Copy the pages of a cache into contiguous rows, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def gather_pages(k: Tensor, v: Tensor, page_table: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the pages of each sequence into one row.

    Args:
        k, v: (num_pages, page_size, kv_heads, ...).
        page_table: (batch, pages per sequence); indices outside of the cache are clamped.
        used: (batch,), number of valid tokens of each sequence; the rest of the row is unspecified.

    Returns:
        k and v as (batch, pages per sequence * page_size, kv_heads, ...).
    """
    pages = page_table.long().clamp(0, max(k.shape[0] - 1, 0))
    return k[pages].flatten(1, 2), v[pages].flatten(1, 2)
