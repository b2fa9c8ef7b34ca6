"""Rows of several tensors are joined, whatever their strides and the size of an element."""

from __future__ import annotations

import pytest
import torch

from flashtile.distributed.row_copies import join_rows
from flashtile.distributed.schedule import Rows
from flashtile.testing import generator

PIECES = (Rows(1, 2, 5), Rows(0, 0, 1), Rows(0, 4, 6), Rows(1, 0, 2))


def drawn(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    g = generator(rows)
    return torch.randint(-99, 99, (rows, heads, head_dim), generator=g).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("head_dim", [1, 2, 7, 8, 12, 128])
def test_rows_of_some_heads(head_dim: int, dtype: torch.dtype) -> None:
    whole = drawn(6, 4, head_dim, dtype), drawn(5, 4, head_dim, dtype)
    for heads in (slice(0, 4), slice(2, 4), slice(1, 2), slice(0, 0)):
        sources = [x[:, heads] for x in whole]
        want = torch.cat([sources[x][a:b] for x, a, b in PIECES])
        assert torch.equal(join_rows(sources, PIECES), want)
        out = torch.full_like(want, 1.0)
        assert join_rows(sources, PIECES, out) is out
        assert torch.equal(out, want)


def test_odd_addresses() -> None:
    """Neither the start of a tensor nor its rows are at multiples of the words."""
    memory = drawn(1, 1, 200, torch.bfloat16).flatten()
    for first in range(9):
        x = memory[first : first + 96].view(6, 2, 8)
        want = torch.cat([x[4:6], x[0:3]])
        assert torch.equal(join_rows([x], [Rows(0, 4, 6), Rows(0, 0, 3)]), want)


def test_rows_in_one_piece_are_not_copied() -> None:
    x = drawn(6, 4, 8, torch.float32)
    assert join_rows([x], [Rows(0, 2, 5)]).data_ptr() == x[2].data_ptr()
    assert join_rows([x], []).shape == (0, 4, 8)
