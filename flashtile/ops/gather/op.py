"""The op ``flashtile::gather_pages``."""

from __future__ import annotations

from torch import Tensor

from ...operators import library, ops, register_fake
from . import formula

library.define(
    "gather_pages(Tensor k, Tensor v, Tensor page_table, Tensor used) -> (Tensor, Tensor)"
)


def gather_pages(k: Tensor, v: Tensor, page_table: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """`formula.gather_pages`; on a GPU by a kernel, which does not read the unused pages."""
    gathered: tuple[Tensor, Tensor] = ops.gather_pages(k, v, page_table, used)
    return gathered


def _gather_pages_on_gpu(*args: Tensor) -> tuple[Tensor, Tensor]:
    from . import kernel

    return kernel.gather_pages(*args)


def _fake_gather_pages(
    k: Tensor, v: Tensor, page_table: Tensor, used: Tensor
) -> tuple[Tensor, Tensor]:
    batch, columns = page_table.shape
    k_rows, v_rows = (x.new_empty(batch, columns * x.shape[1], *x.shape[2:]) for x in (k, v))
    return k_rows, v_rows


library.impl("gather_pages", formula.gather_pages, "CPU")
library.impl("gather_pages", _gather_pages_on_gpu, "CUDA")
register_fake("gather_pages", _fake_gather_pages)
