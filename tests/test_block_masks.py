"""Every small block mask against loops over its tiles: what is stored, and the dense form."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import create_block_mask

from flashtile.masks import BlockMask
from flashtile.testing import generator

EMPTY, FULL, PARTIAL = 0, 1, 2
TILE_SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 4)]


def every_mask(M, N):
    """All bool masks (M, N)."""
    for bits in product((False, True), repeat=M * N):
        yield torch.tensor(bits).view(M, N)


def check(mask, dense, tile_size):
    """`mask` has the tiles of `dense` (batch, heads, M, N): kinds, and the partial ones in order.

    What a partial tile holds after the last row and key is never read.
    """
    (BM, BN), (B, H, M, N) = tile_size, dense.shape
    assert mask.tile_size == tile_size
    assert mask.lengths == (M, N)
    assert (mask.kinds.dtype, mask.partial_index.dtype) == (torch.uint8, torch.int32)
    assert mask.partial_tiles.dtype == torch.bool
    kinds = torch.full((B, H, -(-M // BM), -(-N // BN)), EMPTY)
    index = torch.full_like(kinds, -1)
    partial = []
    for tile_index in product(*map(range, kinds.shape)):
        b, h, m, n = tile_index
        tile = dense[b, h, m * BM : (m + 1) * BM, n * BN : (n + 1) * BN]
        if tile.all():
            kinds[tile_index] = FULL
        elif tile.any():
            kinds[tile_index] = PARTIAL
            index[tile_index] = len(partial)
            partial.append(tile)
    assert mask.kinds.tolist() == kinds.tolist()
    assert mask.partial_index.tolist() == index.tolist()
    assert mask.partial_tiles.shape == (len(partial), BM, BN)
    for stored, tile in zip(mask.partial_tiles, partial, strict=True):
        rows, keys = tile.shape
        assert torch.equal(stored[:rows, :keys], tile)
    for m, n in ((M, N), (M - 1, N), (M, N - 1)):  # a shorter call takes the corner
        assert torch.equal(mask.to_dense(m, n), dense[:, :, :m, :n])


@pytest.mark.parametrize("tile_size", TILE_SIZES, ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (1, 5), (3, 2), (2, 3)], ids=str)
def test_from_dense(lengths, tile_size):
    for dense in every_mask(*lengths):
        check(BlockMask.from_dense(dense, tile_size), dense[None, None], tile_size)


@pytest.mark.parametrize("lead", [(2, 1), (1, 3), (2, 3)], ids=str)
def test_from_dense_of_batches_and_heads(lead, seed):
    for tile_size in TILE_SIZES:
        dense = torch.rand(*lead, 5, 4, generator=generator(seed)) < 0.6
        check(BlockMask.from_dense(dense, tile_size), dense, tile_size)


def test_tiles_of_128_by_default():
    assert BlockMask.from_dense(torch.ones(3, 300).bool()).tile_size == (128, 128)


@pytest.mark.parametrize("tile_size", TILE_SIZES, ids=str)
@pytest.mark.parametrize("number", [1, 2])
def test_from_tiles(number, tile_size):
    """Any number but 0 makes a tile full, also 2, the number of a partial one."""
    for visible in every_mask(2, 3):
        dense = visible.repeat_interleave(tile_size[0], 0).repeat_interleave(tile_size[1], 1)
        check(BlockMask.from_tiles(visible * number, tile_size), dense[None, None], tile_size)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 3), (3, 2)], ids=str)
def test_from_flex(lengths):
    """`create_block_mask` counts what is past the last row and key as hidden."""
    for dense in every_mask(*lengths):
        flex = create_block_mask(
            lambda b, h, i, j, dense=dense: dense[i, j], None, None, *lengths, "cpu", (2, 2)
        )
        mask = BlockMask.from_flex(flex)
        assert mask.lengths == lengths
        assert mask.tile_size == (2, 2)
        assert torch.equal(mask.to_dense(*lengths)[0, 0], dense)


def test_from_flex_reads_only_the_used_slots_of_each_row(seed):
    """Slots past the count repeat indices of used ones; tiles differ for each batch and head. The
    elements may be numbers."""
    dense = torch.rand(2, 3, 4, 6, generator=generator(seed)) < 0.5
    kinds = BlockMask.from_dense(dense, (2, 2)).kinds
    slots = []
    for kind in (PARTIAL, FULL):
        columns = (kinds == kind).int().sort(dim=-1, descending=True, stable=True).indices
        counts = (kinds == kind).sum(-1)
        unused = torch.arange(3) >= counts[..., None]
        slots += [counts.int(), columns.masked_fill(unused, 0).int()]
    flex = FlexBlockMask.from_kv_blocks(
        *slots, BLOCK_SIZE=(2, 2), mask_mod=lambda b, h, i, j: dense[b, h, i, j].int()
    )
    check(BlockMask.from_flex(flex), dense, (2, 2))
