"""Rows of keys and values are copied in wide words, whatever their strides and element sizes."""

from __future__ import annotations

import pytest
import torch

from flashtile.distributed.buffers import PackedKV
from flashtile.distributed.schedule import Rows
from flashtile.testing import generator

PIECES = (Rows(1, 2, 5), Rows(0, 0, 1), Rows(0, 4, 6), Rows(1, 0, 2))


def drawn(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    g = generator(rows)
    return torch.randint(-99, 99, (rows, heads, head_dim), generator=g).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dims", [(1, 1), (2, 7), (7, 8), (8, 8), (12, 8), (128, 64)], ids=str)
def test_rows_of_some_heads(dims: tuple[int, int], dtype: torch.dtype) -> None:
    own = [drawn(6, 4, dim, dtype) for dim in dims]
    for heads in (slice(0, 4), slice(2, 4), slice(1, 2), slice(0, 0)):
        words = PackedKV.of(*own).of_heads(heads)
        message = words.empty(5)
        message.copy_(torch.arange(len(message)))
        arrived = words.split(message, 5)
        received = words.keys_and_values(arrived)
        sent = torch.cat([x.flatten() for x in received])
        assert torch.equal(sent, message)  # the keys, and then the values
        joined = words.keys_and_values(words.buffer([words.rows, arrived], PIECES))
        for got, x, part in zip(joined, own, received, strict=True):
            sources = x[:, heads], part
            assert torch.equal(got, torch.cat([sources[n][a:b] for n, a, b in PIECES]))
        sent = torch.cat([torch.cat([x[4:6, heads], x[:1, heads]]).flatten() for x in own])
        assert torch.equal(words.message([(4, 6), (0, 1)]), sent)


def test_odd_addresses() -> None:
    """Neither the start of a tensor nor its rows are at multiples of the words."""
    memory = drawn(1, 1, 300, torch.bfloat16).flatten()
    for first in range(9):
        for gap in range(9):
            k = memory[first:].as_strided((6, 2, 8), (16 + gap, 8, 1), first)
            words = PackedKV.of(k, k)
            pieces = [Rows(0, 4, 6), Rows(0, 0, 3)]
            for got in words.keys_and_values(words.buffer([words.rows], pieces)):
                assert torch.equal(got, torch.cat([k[4:6], k[0:3]]))


def test_rows_in_one_piece_are_not_copied() -> None:
    x = drawn(6, 4, 8, torch.float32)
    words = PackedKV.of(x, x)
    for piece in words.buffer([words.rows], [Rows(0, 2, 5)]):
        assert piece.data_ptr() == x[2].data_ptr()
    assert all(len(piece) == 0 for piece in words.buffer([words.rows], []))


@pytest.mark.parametrize("name", ["every second number", "negative"])
def test_numbers_that_words_do_not_hold(name: str) -> None:
    plain = drawn(6, 4, 16, torch.float32)
    own = plain[..., ::2] if name == "every second number" else torch._neg_view(plain)
    words = PackedKV.of(own, own)
    for got in words.keys_and_values(words.buffer([words.rows], [Rows(0, 4, 6), Rows(0, 0, 3)])):
        assert torch.equal(got, torch.cat([own[4:6], own[0:3]]))
