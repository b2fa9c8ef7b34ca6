"""Registers and global memory of the emulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flashtile.dropout import ROUNDS, WORD, philox4x32


class Tile(Tensor):
    """Registers: a tensor whose integer division truncates, as the machine's does."""

    type = property(lambda _: SimpleNamespace(layout=None))  # type: ignore[assignment]  # Gluon's

    def __floordiv__(self, other: Any) -> Any:
        return torch.div(self, other, rounding_mode="trunc")

    def __rfloordiv__(self, other: Any) -> Any:
        return torch.div(torch.as_tensor(other), self, rounding_mode="trunc")

    def __mod__(self, other: Any) -> Any:
        return torch.fmod(self, other)

    def __iadd__(self, other: Any) -> Any:  # registers have no aliases
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other

    def to(  # type: ignore[override]  # its arguments are those of Triton's method, not of Tensor's
        self, dtype: Any, bitcast: bool = False
    ) -> Any:
        """The only type that bits are cast to is an unsigned word, kept in 64 bits."""
        return super().to(dtype) & WORD if bitcast else super().to(dtype)

    def __hash__(self) -> int:
        return id(self)


def tile(x: Any) -> Tile:
    return torch.as_tensor(x).as_subclass(Tile)


class Pointer:
    """A pointer into memory."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)

    def to(self, dtype: Any, bitcast: bool = False) -> Pointer:
        return self

    def flat(self) -> Tensor:
        whole = torch.empty(0, dtype=self.memory.dtype).set_(self.memory.untyped_storage())
        return whole[self.memory.storage_offset() :]


class Descriptor:
    """A tensor as TMA sees it."""

    def __init__(self, described: Any) -> None:
        self.base, self.shape, self.strides = described.base, described.shape, described.strides
        self.block_shape = list(described.block_shape)
        self.dtype, self.layout = described.base.dtype, None
        size = torch.Size(self.block_shape).numel() * described.base.element_size()
        self.block_type = SimpleNamespace(nbytes=size)

    def parts(self, coord: list[Any], x: Tensor) -> tuple[Tensor, Tensor]:
        """The elements of the tensor in the box, and those of `x` that they meet."""
        # TMA raises an illegal instruction for anything else.
        assert int(coord[-1]) * self.base.element_size() % 16 == 0
        lengths, offset = [], self.base.storage_offset()
        for at, length, total, stride in zip(
            map(int, coord), self.block_shape, self.shape, self.strides, strict=True
        ):
            assert at >= 0
            lengths.append(max(min(length, total - at), 0))
            offset += at * stride
        x = x.view(self.block_shape)[tuple(map(slice, lengths))]
        if x.numel() == 0:
            return x, x
        offset %= 2**64 // self.base.element_size()  # as addresses of 64 bits
        return self.base.as_strided(lengths, self.strides, offset), x


def load(p: Pointer, mask: Any = None, other: Any = 0) -> Tile:
    offset = torch.as_tensor(p.offset)
    if mask is None:
        return tile(p.flat()[offset].clone())
    mask, offset = torch.broadcast_tensors(torch.as_tensor(mask), offset)
    found = p.flat()[offset.masked_fill(~mask, 0)]
    return tile(torch.where(mask, found, torch.tensor(other, dtype=found.dtype)))


def store(p: Pointer, value: Any, mask: Any = True) -> None:
    offset = torch.as_tensor(p.offset)
    value = torch.as_tensor(value).to(p.memory.dtype)
    mask, offset, value = torch.broadcast_tensors(torch.as_tensor(mask), offset, value)
    p.flat()[offset[mask]] = value[mask]


def where(condition: Any, x: Any, y: Any) -> Tile:
    return tile(torch.where(torch.as_tensor(condition), torch.as_tensor(x), torch.as_tensor(y)))


def philox(key: Tensor, *counter: Tensor, n_rounds: int) -> tuple[Tile, ...]:
    """The words of `flashtile.dropout`."""
    assert n_rounds == ROUNDS
    words = philox4x32(counter, (key & WORD, (key >> 32) & WORD))
    return tuple(map(tile, words))
