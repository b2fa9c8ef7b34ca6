"""Formats of a key-value cache: how the bytes of a row become the keys or values of one token and
key head.

A format is data: `CacheFormat.unpack` is traced once, when the format is made, as a score function
is, and every backend prints it into its loop over tiles. The formats below are examples, ready to
use. They pad rows to multiples of 16 bytes, which a GPU reads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .score_mod.rows import check_reads, unpacked
from .score_mod.trace import traced_unpack

Unpack = Callable[[Tensor, Tensor], Tensor]
Pack = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CacheFormat:
    """A format of the rows of a cache. A row is one token of one key head: `bytes_per_row` bytes.

    ::

        signs = CacheFormat(
            bytes_per_row=16,  # a bit for each of 128 elements
            unpack=lambda row, d: 1.0 - 2.0 * (row[d // 8] >> d % 8 & 1),
        )

    Args:
        bytes_per_row: size of the last dimension of a cache, which is uint8.
        unpack: element ``d`` of a row: a function of the row, (bytes_per_row,) uint8, and of ``d``,
            a scalar int64, that returns a scalar of a floating dtype. It is traced once, like a
            `score_mod`: its operations are those of single numbers, with ``row[...]`` and
            ``x.view(dtype)``, which reads the bits of a number as another dtype. The index of a
            byte may depend on ``d`` only.
        pack: new keys or values (..., head_dim), in the dtype of the queries, as rows (...,
            bytes_per_row) uint8, in PyTorch on the device of the new tokens. None if no call
            appends.
        head_dim: elements of a row; by default as many as the queries have.

    Raises:
        TypeError, ValueError, NotImplementedError: `unpack` cannot be traced, or its result is not
            one floating number; the message names the operation.
        IndexError: it reads past the row, as far as `head_dim` says; else the call raises it.
    """

    bytes_per_row: int
    unpack: Unpack
    pack: Pack | None = None
    head_dim: int | None = None
    program: str = field(init=False, repr=False, compare=False)  # of `unpack`

    def __post_init__(self) -> None:
        for name in ("bytes_per_row", "head_dim", "unpack", "pack"):
            x = getattr(self, name)
            if x is None and name in ("head_dim", "pack"):
                continue
            if name in ("unpack", "pack") and not callable(x):
                raise TypeError(f"CacheFormat.{name}: got {x!r}, want a function")
            if name not in ("unpack", "pack") and (type(x) is not int or x < 1):
                raise ValueError(f"CacheFormat.{name}: got {x!r}, want an int of at least 1")
        with _named_errors():
            program = str(traced_unpack(self.unpack, self.bytes_per_row))
        object.__setattr__(self, "program", program)
        if self.head_dim is not None:
            self.check_reads(self.head_dim)

    def check_reads(self, head_dim: int) -> None:
        """Raise IndexError if one of so many elements is read from past the row."""
        with _named_errors():
            check_reads(self.program, head_dim, self.bytes_per_row)

    def unpacked(self, rows: Tensor, head_dim: int | None = None) -> Tensor:
        """The elements (..., head_dim) of rows (..., bytes_per_row) uint8, in float32, on their
        device: what a call reads, before it rounds them to the dtype of the queries.
        """
        head_dim = self.head_dim if head_dim is None else head_dim
        if head_dim is None:
            raise ValueError("head_dim: got None, want the number of elements of a row")
        if rows.dtype != torch.uint8 or rows.shape[-1:] != (self.bytes_per_row,):
            got = f"{rows.dtype} of shape {tuple(rows.shape)}"
            raise ValueError(f"rows: got {got}, want torch.uint8 (..., {self.bytes_per_row})")
        self.check_reads(head_dim)
        return unpacked(self.program, rows, head_dim)

    def packed(self, x: Tensor) -> Tensor:
        """The rows (..., bytes_per_row) of new keys or values (..., head_dim).

        Raises:
            ValueError: there is no `pack`, or it returns something else.
        """
        if self.pack is None:
            raise ValueError("CacheFormat.pack: got None, want a function, to append new tokens")
        rows, wanted = self.pack(x), (*x.shape[:-1], self.bytes_per_row)
        is_right = isinstance(rows, Tensor) and rows.dtype == torch.uint8
        if not is_right or tuple(rows.shape) != wanted or rows.device != x.device:
            got = f"{rows.dtype} of shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else rows
            wanted_rows = f"torch.uint8 of shape {wanted} on {x.device}"
            raise ValueError(f"CacheFormat.pack: got {got}, want {wanted_rows}")
        return rows


@contextmanager
def _named_errors() -> Iterator[None]:
    """Errors of a trace, with the name of the function that is traced here."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError, IndexError) as error:
        text = str(error).replace("score_mod:", "CacheFormat.unpack:")
        if isinstance(error.__cause__, IndexError):
            text = f"CacheFormat.unpack: reads past its row: {error.__cause__}"
            raise IndexError(text) from error
        raise type(error)(text) from error


# Parts of formats: numbers of several bytes, the lowest byte first, and blocks with a scale each.


def number_at(row: Tensor, first: Tensor | int, dtype: torch.dtype) -> Tensor:
    """The number of a 16-bit or 32-bit `dtype` whose bytes begin at byte `first` of a row."""
    word = row[first].int()
    for n in range(1, dtype.itemsize):
        word = word | row[first + n].int() << 8 * n
    return (word.to(torch.int16) if dtype.itemsize == 2 else word).view(dtype)


def _joined(*parts: Tensor, size: int) -> Tensor:
    """The bytes of all parts (..., n), one after the other, and zeros up to `size` bytes."""
    # An empty tensor may have any strides, also after `contiguous`.
    copies = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    rows = torch.cat([part.view(torch.uint8) for part in copies], -1)
    return torch.nn.functional.pad(rows, (0, size - rows.shape[-1]))


def _divisor(scales: Tensor) -> Tensor:
    """(..., blocks, 1) float32: 1 where a block is 0."""
    return scales.float().masked_fill(scales.float() == 0, 1.0)[..., None]


def _padded(size: int) -> int:
    return -(-size // 16) * 16


def _blocks(head_dim: int, block: int) -> int:
    """The number of blocks of a row."""
    if block < 1 or head_dim % block:
        raise ValueError(f"block: got {block}, want a divisor of {head_dim}, the head dim")
    return head_dim // block


# Ready formats


def e5m2(head_dim: int) -> CacheFormat:
    """float8_e5m2, without a scale; new numbers saturate."""
    largest = torch.finfo(torch.float8_e5m2).max

    def unpack(row: Tensor, d: Tensor) -> Tensor:
        return row[d].view(torch.float8_e5m2).float()

    def pack(x: Tensor) -> Tensor:
        codes = x.float().clamp(-largest, largest).to(torch.float8_e5m2)
        return _joined(codes, size=_padded(head_dim))

    return CacheFormat(_padded(head_dim), unpack, pack, head_dim)


def int8(head_dim: int, block: int | None = None) -> CacheFormat:
    """Integers from -127 to 127, plus 128, times a bfloat16 scale, one for each token or for each
    block of so many elements.
    """
    return _integers(8, head_dim, block)


def int4(head_dim: int, block: int | None = 32) -> CacheFormat:
    """Integers from -7 to 7, plus 8, two in a byte, times a bfloat16 scale, one for each block of
    so many elements, or for each token if `block` is None.
    """
    return _integers(4, head_dim, block)


def _integers(bits: int, head_dim: int, block: int | None) -> CacheFormat:
    block, zero = head_dim if block is None else block, 2 ** (bits - 1)
    codes = (head_dim * bits + 7) // 8  # bytes
    size = _padded(codes + 2 * _blocks(head_dim, block))

    def unpack(row: Tensor, d: Tensor) -> Tensor:
        code = row[d] if bits == 8 else row[d // 2] >> d % 2 * 4 & 15
        scale = number_at(row, codes + 2 * (d // block), torch.bfloat16)
        return (code.float() - zero) * scale.float()

    def pack(x: Tensor) -> Tensor:
        blocks = x.float().unflatten(-1, (-1, block))
        scales = (blocks.abs().amax(-1) / (zero - 1)).bfloat16()
        numbers = (blocks / _divisor(scales)).flatten(-2).round().clamp(1 - zero, zero - 1) + zero
        return _joined(_halves(numbers) if bits == 4 else numbers.byte(), scales, size=size)

    return CacheFormat(size, unpack, pack, head_dim)


def nvfp4(head_dim: int, scale: float = 1.0) -> CacheFormat:
    """NVFP4: e2m1 numbers, two in a byte, times an e4m3 scale for each 16 elements, times `scale`,
    which is the same for all tokens.
    """
    if not scale > 0:
        raise ValueError(f"scale: got {scale}, want a positive number")
    half, block = (head_dim + 1) // 2, 16
    size = _padded(half + _blocks(head_dim, block))

    def unpack(row: Tensor, d: Tensor) -> Tensor:
        code = (row[d // 2] >> d % 2 * 4).int()
        # e2m1's bits are float16's sign, two lowest exponent bits and highest mantissa bit.
        bits = (code & 7) << 9 | (code & 8) << 12
        number = bits.to(torch.int16).view(torch.float16).float() * 2.0**14
        return number * row[half + d // block].view(torch.float8_e4m3fn).float() * scale

    def pack(x: Tensor) -> Tensor:
        blocks = x.float().unflatten(-1, (-1, block)) / scale
        scales = (blocks.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
        numbers = (blocks / _divisor(scales)).flatten(-2)
        # Halfway between 0, 0.5, 1, 1.5, 2, 3, 4 and 6
        limits = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=x.device)
        codes = torch.bucketize(numbers.abs().contiguous(), limits) + 8 * (numbers < 0)
        return _joined(_halves(codes), scales, size=size)

    return CacheFormat(size, unpack, pack, head_dim)


def flashmla() -> tuple[CacheFormat, CacheFormat]:
    """FlashMLA's rows of 656 bytes: 512 e4m3 latents, their four float32 scales, and 64 bfloat16
    numbers with rotary embedding. Of keys, which are all 576 numbers, and of values, the latents.
    """

    def unpack(row: Tensor, d: Tensor) -> Tensor:
        latent = d.clamp(max=511)
        scale = number_at(row, 512 + 4 * (latent // 128), torch.float32)
        rotated = number_at(row, 528 + 2 * (d - 512).clamp(min=0), torch.bfloat16)
        number = row[latent].view(torch.float8_e4m3fn).float() * scale
        return torch.where(d < 512, number, rotated.float())

    def pack(x: Tensor) -> Tensor:
        blocks = x[..., :512].float().unflatten(-1, (4, 128))
        scales = blocks.abs().amax(-1) / 448
        codes = (blocks / _divisor(scales)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return _joined(codes.flatten(-2), scales, x[..., 512:].bfloat16(), size=656)

    keys = CacheFormat(656, unpack, pack, 576)
    return keys, CacheFormat(656, unpack, None, 512)


def _halves(codes: Tensor) -> Tensor:
    """Codes (..., n) below 16, two in a byte: (..., (n + 1) / 2) uint8."""
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, codes.shape[-1] % 2))
    return codes[..., 0::2] | codes[..., 1::2] << 4
