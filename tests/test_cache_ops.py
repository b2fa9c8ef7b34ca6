"""The ops of a cached call against loops over tokens.

Some lengths, rows and pages lie outside of the cache: a call on a GPU does not check their values.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from flashtile.testing import cu_seqlens

B, ROWS, CAPACITY, PAGE = 2, 3, 4, 2
LENGTHS = list(product(range(-1, CAPACITY + 2), repeat=B))
COUNTS = {  # new tokens of each sequence
    "dense": [(0, 0), (1, 1), (3, 3)],
    "packed": [(0, 0), (2, 1), (0, 3), (3, 0)],
}
SHAPES = {"rows": (B, CAPACITY), "chosen rows": (ROWS, CAPACITY), "pages": (6, PAGE)}
SLOTS = {  # (page_table, cache_batch_idx)
    "rows": [(None, None)],
    "chosen rows": [(None, torch.tensor(rows).int()) for rows in ((2, 0), (-1, 1), (1, 3))],
    "pages": [
        (torch.tensor(table).int(), None)
        for table in (((5, 0), (2, 4)), ((-1, 1), (3, 6)), ((0,), (1,)))
    ],
}


def slot_of(position, b, cache, table, rows):
    """(row, slot) in `cache` of a position of sequence `b`; None outside of the cache."""
    if not 0 <= position < (CAPACITY if table is None else table.shape[1] * PAGE):
        return None
    if table is not None:
        row, slot = int(table[b, position // PAGE]), position % PAGE
    else:
        row, slot = b if rows is None else int(rows[b]), position
    return (row, slot) if 0 <= row < cache.shape[0] else None


@pytest.mark.parametrize("storage", SLOTS)
@pytest.mark.parametrize("packing", COUNTS)
def test_tokens_that_fit_are_appended_and_others_dropped(packing, storage):
    for lengths, counts, (table, rows) in product(LENGTHS, COUNTS[packing], SLOTS[storage]):
        starts = cu_seqlens(list(counts)) if packing == "packed" else None
        total = sum(counts) + 2 * (packing == "packed")  # two tokens after the last sequence
        k = 1.0 + torch.arange(total * 6).view(total, 2, 3)
        new = k if packing == "packed" else k.unflatten(0, (B, counts[0]))
        shape = SHAPES[storage]
        caches = [torch.zeros(*shape, 2, 3), torch.zeros(*shape, 2, 3)]
        used = torch.ops.flashtile.kvcache_append(
            *caches, new, -new, torch.tensor(lengths).int(), starts, table, rows, None, None
        )
        wanted = torch.zeros(*shape, 2, 3)
        for b in range(B):
            for i in range(counts[b]):
                slot = slot_of(lengths[b] + i, b, wanted, table, rows)
                if slot is not None:
                    wanted[slot] = k[sum(counts[:b]) + i]
        assert torch.equal(caches[0], wanted)
        assert torch.equal(caches[1], -wanted)
        assert used.dtype == torch.int32
        assert used.tolist() == [n + count for n, count in zip(lengths, counts, strict=True)]


def test_pages_are_copied_side_by_side():
    """Page numbers outside of the cache become the nearest one inside."""
    k = torch.arange(3 * PAGE * 2 * 3).view(3, PAGE, 2, 3)
    v = -k[..., :2]
    for entries in product(range(-2, 5), repeat=4):
        table = torch.tensor(entries).view(2, 2).int()
        used = torch.full((2,), 2 * PAGE).int()
        rows = torch.ops.flashtile.gather_pages(k, v, table, used)
        for pages, copied in zip((k, v), rows, strict=True):
            for b, column in product(range(2), range(2)):
                page = pages[min(max(int(table[b, column]), 0), 2)]
                assert torch.equal(copied[b, column * PAGE : (column + 1) * PAGE], page)


@pytest.mark.parametrize("own", [True, False], ids=["own positions", "the first one's"])
@pytest.mark.parametrize("packing", COUNTS)
def test_a_new_token_is_rotated_by_its_position(packing, own):
    """(1, 0) turned by one radian for each position. Packed tensors end with two unused tokens."""
    steps = torch.arange(12.0)[:, None]
    for counts, base in product(COUNTS[packing], ((0, 3), (7, 1))):
        starts = cu_seqlens(list(counts)) if packing == "packed" else None
        total = sum(counts) + 2 * (packing == "packed")
        new = torch.tensor([1.0, 0.0]).expand(total, 1, 2)
        if packing == "dense":
            new = new.unflatten(0, (B, counts[0]))
        k_cache, v_cache = torch.zeros(B, CAPACITY, 1, 2), torch.zeros(B, CAPACITY, 1, 2)
        q, _ = torch.ops.flashtile.kvcache_rotate_append(
            new, k_cache, v_cache, new, new, steps.cos(), steps.sin(),
            torch.zeros(B).int(), torch.tensor(base).int(), starts, starts,
            *[None] * 4, True, own,
        )  # fmt: skip
        assert q.shape == new.shape
        q = q.reshape(-1, 2)
        for b in range(B):
            for i in range(counts[b]):
                angle = float(base[b] + i)
                wanted = pytest.approx([math.cos(angle), math.sin(angle)], abs=1e-6)
                assert k_cache[b, i, 0].tolist() == wanted
                assert v_cache[b, i, 0].tolist() == [1, 0]
                angle = float(base[b] + i * own)
                wanted = pytest.approx([math.cos(angle), math.sin(angle)], abs=1e-6)
                assert q[sum(counts[:b]) + i].tolist() == wanted


def test_a_rotation_overflows_in_float16_as_a_cast_does():
    """Only float8 saturates. (60000, 60000) turned by 45 degrees is (0, 84853)."""
    k_cache, v_cache = (torch.zeros(1, 2, 1, 2).half() for _ in "kv")
    new = torch.full((1, 1, 1, 2), 6e4).half()
    angle, zero = torch.full((1, 1), math.pi / 4), torch.zeros(1).int()
    q, _ = torch.ops.flashtile.kvcache_rotate_append(
        new, k_cache, v_cache, new, new, angle.cos(), angle.sin(), zero, zero, *[None] * 6,
        True, True,
    )  # fmt: skip
    assert q[0, 0, 0, 1] == k_cache[0, 0, 0, 1] == math.inf
    assert v_cache[0, 0, 0].tolist() == new[0, 0, 0].tolist()
