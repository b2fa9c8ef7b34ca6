"""Cache formats for tests, each with a decoder of whole rows that shares nothing with the format's
own function of single elements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile import CacheFormat, cache_formats

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class Kind(NamedTuple):
    """The format for a head dim, and its decoder: rows (..., bytes) -> (..., head_dim) float32."""

    make: Callable[[int], CacheFormat]
    decode: Callable[[Tensor, int], Tensor]
    multiple: int = 1  # of which head dims are


def numbers(rows: Tensor, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """(..., count) numbers of `dtype` from byte `first` on."""
    stop = first + count * dtype.itemsize
    part = rows[..., first:stop].clone(memory_format=torch.contiguous_format)
    return part.view(dtype).float()


def halves(rows: Tensor, head_dim: int) -> Tensor:
    """(..., head_dim) codes of 4 bits, the lower half of a byte first."""
    count = (head_dim + 1) // 2
    pairs = torch.stack((rows[..., :count] % 16, rows[..., :count] // 16), -1)
    return pairs.flatten(-2)[..., :head_dim]


def e5m2(rows: Tensor, head_dim: int) -> Tensor:
    return numbers(rows, 0, head_dim, torch.float8_e5m2)


def int8(rows: Tensor, head_dim: int, blocks: int) -> Tensor:
    scales = numbers(rows, head_dim, blocks, torch.bfloat16)
    codes = (rows[..., :head_dim].float() - 128).unflatten(-1, (blocks, -1))
    return (codes * scales[..., None]).flatten(-2)


def int4(rows: Tensor, head_dim: int, blocks: int) -> Tensor:
    scales = numbers(rows, (head_dim + 1) // 2, blocks, torch.bfloat16)
    codes = (halves(rows, head_dim).float() - 8).unflatten(-1, (blocks, -1))
    return (codes * scales[..., None]).flatten(-2)


def nvfp4(rows: Tensor, head_dim: int, scale: float) -> Tensor:
    codes = halves(rows, head_dim).long()
    found = E2M1[codes % 8] * torch.where(codes < 8, 1.0, -1.0)
    scales = numbers(rows, head_dim // 2, head_dim // 16, torch.float8_e4m3fn)
    return (found.unflatten(-1, (-1, 16)) * scales[..., None] * scale).flatten(-2)


def flashmla(rows: Tensor) -> Tensor:
    latents = numbers(rows, 0, 512, torch.float8_e4m3fn).unflatten(-1, (4, 128))
    latents = latents * numbers(rows, 512, 4, torch.float32)[..., None]
    return torch.cat((latents.flatten(-2), numbers(rows, 528, 64, torch.bfloat16)), -1)


# Formats that a user might write.


def signs(head_dim: int) -> CacheFormat:
    """A bit for each element: its sign."""
    size = -(-head_dim // 8)

    def pack(x: Tensor) -> Tensor:
        bits = torch.nn.functional.pad((x < 0).to(torch.uint8), (0, 8 * size - head_dim))
        shifts = torch.arange(8, dtype=torch.uint8, device=x.device)
        return (bits.unflatten(-1, (size, 8)) << shifts).sum(-1).to(torch.uint8)

    return CacheFormat(
        size,
        lambda row, d: 1.0 - 2.0 * (row[d // 8] >> (d % 8) & 1),
        pack,
    )


def signs_decoded(rows: Tensor, head_dim: int) -> Tensor:
    bits = torch.stack([rows // 2**n % 2 for n in range(8)], -1).flatten(-2)
    return 1.0 - 2.0 * bits[..., :head_dim].float()


def bfloat16(head_dim: int) -> CacheFormat:
    """bfloat16 with one byte in front of the row, which ends with the first element."""

    def unpack(row: Tensor, d: Tensor) -> Tensor:
        first = torch.where(d == 0, 2 * head_dim - 1, 2 * d - 1)
        return cache_formats.number_at(row, first, torch.bfloat16).float()

    def pack(x: Tensor) -> Tensor:
        rolled = x.bfloat16().roll(-1, -1).contiguous().view(torch.uint8)
        return torch.nn.functional.pad(rolled, (1, 0))

    return CacheFormat(2 * head_dim + 1, unpack, pack)


def bfloat16_decoded(rows: Tensor, head_dim: int) -> Tensor:
    return numbers(rows, 1, head_dim, torch.bfloat16).roll(1, -1)


def _scaled(make: Any, decode: Any, block: int | None) -> Kind:
    """A format of integers with a scale for each block."""
    return Kind(
        partial(make, block=block),
        lambda rows, head_dim: decode(rows, head_dim, 1 if block is None else head_dim // block),
        block or 1,
    )


KINDS: dict[str, Kind] = {
    "e5m2": Kind(cache_formats.e5m2, e5m2),
    "int8": _scaled(cache_formats.int8, int8, None),
    "int8 in blocks": _scaled(cache_formats.int8, int8, 8),
    "int4": _scaled(cache_formats.int4, int4, None),
    "int4 in blocks": _scaled(cache_formats.int4, int4, 8),
    "nvfp4": Kind(partial(cache_formats.nvfp4, scale=0.5), partial(nvfp4, scale=0.5), 16),
    "signs": Kind(signs, signs_decoded),
    "bfloat16": Kind(bfloat16, bfloat16_decoded),
}
