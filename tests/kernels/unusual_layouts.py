"""Fifty calls that differ in nothing but lengths, counts and where their tensors lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flashtile.call.layouts import Dense, Packed
from flashtile.call.prepare import describe
from flashtile.problem import Operands, Options
from flashtile.testing import cu_seqlens

Call = tuple[Operands, Options]
Allocate = Callable[..., Tensor]  # (batch, rows, heads, dim) -> a tensor of this shape


def contiguous(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def heads_first(batch: int, rows: int, heads: int, dim: int) -> Tensor:
    return contiguous(batch, heads, rows, dim).transpose(1, 2)


def rows_first(batch: int, rows: int, heads: int, dim: int) -> Tensor:
    return contiguous(rows, batch, heads, dim).transpose(0, 1)


def backwards(batch: int, rows: int, heads: int, dim: int) -> Tensor:
    """All dimensions in the opposite order: the last one has the largest stride."""
    return contiguous(dim, heads, rows, batch).permute(3, 2, 1, 0)


def padded(batch: int = 0, rows: int = 0, heads: int = 0, dim: int = 0) -> Allocate:
    """Part of a tensor that is larger by these numbers."""

    def allocate(*shape: int) -> Tensor:
        larger = (shape[0] + batch, shape[1] + rows, shape[2] + heads, shape[3] + dim)
        return contiguous(*larger)[: shape[0], : shape[1], : shape[2], : shape[3]]

    return allocate


def moved(elements: int, allocate: Allocate = contiguous) -> Allocate:
    """Away from the start of its memory."""

    def at(*shape: int) -> Tensor:
        x = allocate(*shape)
        last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
        return contiguous(last + 1 + elements)[elements:].as_strided(
            x.shape, x.stride(), x.storage_offset() + elements
        )

    return at


def every(number: int, dimension: int) -> Allocate:
    """Every so many elements of one dimension of a larger tensor."""

    def allocate(*shape: int) -> Tensor:
        larger = list(shape)
        larger[dimension] *= number
        index = [slice(None)] * 4
        index[dimension] = slice(None, None, number)
        return contiguous(*larger)[tuple(index)]

    return allocate


def expanded(dimension: int) -> Allocate:
    """One element of a dimension, repeated."""

    def allocate(*shape: int) -> Tensor:
        smaller = list(shape)
        smaller[dimension] = 1
        return contiguous(*smaller).expand(shape)

    return allocate


def odd_unit_strides(batch: int, rows: int, heads: int, dim: int) -> Tensor:
    """Dimensions of size 1 have strides that nothing reads."""
    x = contiguous(batch, rows, heads, dim)
    steps = [7 if n == 1 else step for n, step in zip(x.shape[:3], x.stride(), strict=False)]
    return x.as_strided(x.shape, (*steps, 1))


def fused(batch: int, rows: int, heads: int, dim: int) -> Tensor:
    """The middle third of the features of a joint projection."""
    return contiguous(batch, rows, 3, heads, dim)[:, :, 1]


LAYOUTS: dict[str, Allocate] = {
    "contiguous": contiguous,
    "heads first": heads_first,
    "rows first": rows_first,
    "backwards": backwards,
    "fused": fused,
    "sliced batch": padded(batch=1),
    "sliced rows": padded(rows=3),
    "sliced heads": padded(heads=2),
    "padded by 1": padded(dim=1),
    "padded by 8": padded(dim=8),
    "padded by 16": padded(dim=16),
    "moved by 1": moved(1),
    "moved by 8": moved(8),
    "moved, heads first": moved(5, heads_first),
    "moved, padded": moved(8, padded(dim=3)),
    "every second row": every(2, 1),
    "every third head": every(3, 2),
    "every second feature": every(2, 3),
    "one batch for all": expanded(0),
    "one head for all": expanded(2),
}
# Batch, queries, keys, heads.
SIZES = {
    "odd lengths": (3, 77, 131, 3),
    "round lengths": (2, 128, 256, 4),
    "one sequence": (1, 100, 100, 2),
    "one head": (5, 99, 201, 1),
    "one sequence of one head": (1, 65, 65, 1),
    "many sequences": (33, 70, 70, 2),
    "many heads": (2, 80, 90, 17),
    "large": (4, 1024, 1024, 4),
    "few queries": (2, 3, 300, 2),
    "one query": (4, 1, 513, 2),
    "one query, one key": (2, 1, 1, 2),
    "one key": (2, 90, 1, 2),
}
PACKED = {
    "packed": ([130, 5, 0, 70], [130, 5, 0, 70], 0),
    "packed, one sequence": ([101], [203], 0),
    "packed, one token each": ([1] * 40, [1] * 40, 0),
    "packed, moved offsets": ([70, 90], [80, 100], 1),
    "packed, few queries": ([2, 3, 1], [200, 100, 300], 0),
    "packed, round": ([128, 256], [128, 256], 4),
}


def dense_call(allocate: Allocate, sizes: tuple[int, int, int, int], dim: int) -> Call:
    batch, M, N, heads = sizes
    tensors = allocate(batch, M, heads, dim), *(allocate(batch, N, heads, dim) for _ in "kv")
    return describe(tensors, Dense(), {"causal": True})


def packed_call(allocate: Allocate, name: str, dim: int) -> Call:
    queries, keys, start = PACKED[name]
    offsets = []
    for lengths in (queries, keys):
        counts = cu_seqlens(lengths)
        longer = torch.zeros(len(counts) + start, dtype=torch.int32)
        longer[start:] = counts
        offsets.append(longer[start:])
    q, k, v = (allocate(1, sum(x), 2, dim)[0] for x in (queries, keys, keys))
    return describe((q, k, v), Packed(*offsets, max(queries), max(keys)), {"causal": True})


def calls(dim: int) -> Iterator[tuple[str, Call]]:
    """The names of the layouts and a causal call in each, in bfloat16 with as many key heads as
    query heads."""
    for name, allocate in LAYOUTS.items():
        yield name, dense_call(allocate, SIZES["odd lengths"], dim)
    for name, sizes in SIZES.items():
        if name != "odd lengths":
            yield name, dense_call(contiguous, sizes, dim)
    for name in ("one sequence", "one head", "one query", "one sequence of one head"):
        yield f"{name}, strides of 7", dense_call(odd_unit_strides, SIZES[name], dim)
        yield f"{name}, heads first", dense_call(heads_first, SIZES[name], dim)
    for name in PACKED:
        yield name, packed_call(contiguous, name, dim)
    for where in ("fused", "heads first", "moved by 1", "padded by 8", "sliced heads"):
        yield f"packed, {where}", packed_call(LAYOUTS[where], "packed", dim)
