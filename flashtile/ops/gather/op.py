"""The op ``flashtile::gather_pages``."""

from __future__ import annotations

import torch
from torch import Tensor

from . import formula

_library = torch.library.Library("flashtile", "FRAGMENT")
_library.define(
    "gather_pages(Tensor k, Tensor v, Tensor page_table, Tensor used) -> (Tensor, Tensor)"
)


def gather_pages(k: Tensor, v: Tensor, page_table: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """`formula.gather_pages`; on a GPU by a kernel, which does not read the unused pages."""
    gathered: tuple[Tensor, Tensor] = torch.ops.flashtile.gather_pages(k, v, page_table, used)
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


_library.impl("gather_pages", formula.gather_pages, "CPU")
_library.impl("gather_pages", _gather_pages_on_gpu, "CUDA")
torch.library.register_fake("flashtile::gather_pages", _fake_gather_pages, lib=_library)
