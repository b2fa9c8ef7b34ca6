"""Copy the pages of a cache into contiguous rows: the op ``flashtile::gather_pages``."""

from __future__ import annotations

from torch import Tensor

from ...operators import library, ops, register_fake

library.define(
    "gather_pages(Tensor k, Tensor v, Tensor page_table, Tensor used) -> (Tensor, Tensor)"
)


def gather_pages(k: Tensor, v: Tensor, page_table: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the pages of each sequence into one row; on a GPU by a kernel, which does not read the
    unused pages.

    Args:
        k, v: (num_pages, page_size, kv_heads, ...).
        page_table: (batch, pages per sequence); indices outside of the cache are clamped.
        used: (batch,), number of valid tokens of each sequence; the rest of the row is unspecified.

    Returns:
        k and v as (batch, pages per sequence * page_size, kv_heads, ...).
    """
    gathered: tuple[Tensor, Tensor] = ops.gather_pages(k, v, page_table, used)
    return gathered


def _formula(k: Tensor, v: Tensor, page_table: Tensor, _used: Tensor) -> tuple[Tensor, Tensor]:
    pages = page_table.long().clamp(0, max(k.shape[0] - 1, 0))
    return k[pages].flatten(1, 2), v[pages].flatten(1, 2)


def _gather_pages_on_gpu(*args: Tensor) -> tuple[Tensor, Tensor]:
    from . import kernel

    return kernel.gather_pages(*args)


def _fake_gather_pages(
    k: Tensor, v: Tensor, page_table: Tensor, _used: Tensor
) -> tuple[Tensor, Tensor]:
    batch, columns = page_table.shape
    k_rows, v_rows = (x.new_empty(batch, columns * x.shape[1], *x.shape[2:]) for x in (k, v))
    return k_rows, v_rows


library.impl("gather_pages", _formula, "CPU")
library.impl("gather_pages", _gather_pages_on_gpu, "CUDA")
register_fake("gather_pages", _fake_gather_pages)
