"""Rotary embedding of a tensor, into another tensor or in place. A program rotates one token.

The angles are those of `formula.py`. A thread reads both features of a pair before it writes
either, so the output may be the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...gpu.launch import Launch
from ...gpu.launch_cache import run_all
from ...gpu.rows import rows_of

# Pairs of features that one step of a program rotates.
PAIRS = 2048
LARGEST_FLOAT8 = tl.constexpr(448.0)  # of e4m3


@dataclass(frozen=True)
class Rotation:
    """Compile-time parameters of a rotation."""

    HALF: int  # pairs of a head
    BLOCK_HALF: int
    BLOCK_HEADS: int
    BLOCK_TAIL: int  # covers the features that are not rotated
    IS_INTERLEAVED: bool
    IS_BACKWARD: bool  # rotates by the opposite angle


def rotation_of(cos: Tensor, head_dim: int, interleaved: bool, backward: bool = False) -> Rotation:
    """The rotation of heads of `head_dim` by a table (positions, pairs)."""
    half = cos.shape[1]
    block_half = triton.next_power_of_2(max(half, 1))
    return Rotation(
        HALF=half,
        BLOCK_HALF=block_half,
        BLOCK_HEADS=max(1, PAIRS // block_half),
        BLOCK_TAIL=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        IS_INTERLEAVED=interleaved,
        IS_BACKWARD=backward,
    )


@triton.jit
def sequence_of_token(token, cu_seqlens_ptr, B, CHUNK: tl.constexpr):
    """The sequence of a token of a packed tensor: the number of sequences that end before it."""
    count = token * 0
    for first in range(0, B, CHUNK):
        offs = first + tl.arange(0, CHUNK)
        end = tl.load(cu_seqlens_ptr + 1 + offs, mask=offs < B, other=2**31 - 1)
        count += tl.sum((end <= token).to(tl.int32), 0)
    return count


@triton.jit
def index_of_token(token, cu_seqlens_ptr, B, seq):
    """(sequence, index in it) of a token; (B, -1) after the last sequence of a packed tensor."""
    if cu_seqlens_ptr is not None:
        b = sequence_of_token(token, cu_seqlens_ptr, B, 128)
        index = token - tl.load(cu_seqlens_ptr + b, mask=b < B, other=0).to(tl.int32)
        index = tl.where(b < B, index, -1)
    else:
        b = token // seq
        index = token % seq
    return b, index


@triton.jit
def token_base(x, token, b, index, cu_seqlens_ptr):
    """Pointer to the heads of a token; `x` is packed if `cu_seqlens_ptr` is given."""
    if cu_seqlens_ptr is not None:
        base = x.ptr + token.to(tl.int64) * x.row
    else:
        base = x.ptr + b.to(tl.int64) * x.batch + index.to(tl.int64) * x.row
    return base


@triton.jit
def as_stored(x, target, descale_ptr, head, inside):
    """`x` in the dtype of `target`; for float8, divided by its head's scale and saturated."""
    dtype: tl.constexpr = target.ptr.dtype.element_ty
    if dtype.primitive_bitwidth == 8:
        x = x.to(tl.float32)
        if descale_ptr is not None:
            x = x / tl.load(descale_ptr + head + 0 * inside.to(tl.int32), mask=inside, other=1.0)
        inside_range = tl.minimum(tl.maximum(x, -LARGEST_FLOAT8), LARGEST_FLOAT8)
        x = tl.where(x == x, inside_range, x)  # NaN stays NaN
    return x.to(dtype)


@triton.jit
def rotate_heads(
    target, target_base, source, source_base, descale_ptr, position, cos_ptr, sin_ptr, table_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, HAS_TAIL: tl.constexpr, rotation: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of one token by the angles of its position; copy them if the position is
    outside the table. HAS_TAIL: the target already holds the features after the rotated ones.
    """
    HALF: tl.constexpr = rotation.HALF
    BLOCK_HEADS: tl.constexpr = rotation.BLOCK_HEADS
    # (1, BLOCK_HALF)
    pairs = tl.arange(0, rotation.BLOCK_HALF)[None, :]
    row = position.to(tl.int64) + 0 * pairs
    known = (row >= 0) & (row < table_rows) & (pairs < HALF)
    offs = row * HALF + pairs
    c = tl.load(cos_ptr + offs, mask=known, other=1.0).to(tl.float32)
    s = tl.load(sin_ptr + offs, mask=known, other=0.0).to(tl.float32)
    if rotation.IS_BACKWARD:
        s = -s
    if rotation.IS_INTERLEAVED:
        first = 2 * pairs
        second = 2 * pairs + 1
    else:
        first = pairs
        second = pairs + HALF
    for head0 in range(0, HEADS, BLOCK_HEADS):
        heads = head0 + tl.arange(0, BLOCK_HEADS)[:, None]
        inside = (heads < HEADS) & (pairs < HALF)
        read = source_base + heads.to(tl.int64) * source.head
        write = target_base + heads.to(tl.int64) * target.head
        # (BLOCK_HEADS, BLOCK_HALF)
        a = tl.load(read + first * source.dim, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(read + second * source.dim, mask=inside, other=0.0).to(tl.float32)
        rotated_a = as_stored(a * c - b * s, target, descale_ptr, heads, inside)
        rotated_b = as_stored(a * s + b * c, target, descale_ptr, heads, inside)
        tl.store(write + first * target.dim, rotated_a, mask=inside)
        tl.store(write + second * target.dim, rotated_b, mask=inside)
        if not HAS_TAIL and 2 * HALF < DIM:
            offs_tail = 2 * HALF + tl.arange(0, rotation.BLOCK_TAIL)[None, :]
            inside = (heads < HEADS) & (offs_tail < DIM)
            x = tl.load(read + offs_tail * source.dim, mask=inside)
            x = as_stored(x, target, descale_ptr, heads, inside)
            tl.store(write + offs_tail * target.dim, x, mask=inside)


@triton.jit(do_not_specialize=["offset", "B", "seq", "table_rows"])
def rotary_kernel(
    x, out, cos_ptr, sin_ptr, offsets_ptr, cu_seqlens_ptr, offset, B, seq, table_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, IS_IN_PLACE: tl.constexpr, rotation: tl.constexpr,
):  # fmt: skip
    """Rotate one token of `x`, whose position is its index in its sequence plus the offset."""
    token = tl.program_id(0)
    b, index = index_of_token(token, cu_seqlens_ptr, B, seq)
    position = index.to(tl.int64) + offset
    if offsets_ptr is not None:
        position += tl.load(offsets_ptr + b, mask=b < B, other=0)
    position = tl.where(b < B, position, -1)
    source_base = token_base(x, token, b, index, cu_seqlens_ptr)
    target_base = token_base(out, token, b, index, cu_seqlens_ptr)
    rotate_heads(
        out, target_base, x, source_base, None, position, cos_ptr, sin_ptr, table_rows, HEADS, DIM,
        IS_IN_PLACE, rotation,
    )  # fmt: skip


def rotary_launch(
    x: Tensor,
    out: Tensor,
    cos: Tensor,
    sin: Tensor,
    offsets: Tensor | None,
    offset: int,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    backward: bool,
) -> Launch:
    """Rotate `x` (batch, seq, heads, head_dim), or packed (total, heads, head_dim), into `out`,
    which may be `x`.
    """
    packed = cu_seqlens is not None
    arguments = {
        "x": rows_of(x),
        "out": rows_of(out),
        "cos_ptr": cos.contiguous(),
        "sin_ptr": sin.contiguous(),
        "offsets_ptr": None if offsets is None else offsets.contiguous(),
        "cu_seqlens_ptr": None if cu_seqlens is None else cu_seqlens.contiguous(),
        "offset": offset,
        "B": x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        "seq": 1 if packed else x.shape[1],
        "table_rows": cos.shape[0],
        "HEADS": x.shape[-2],
        "DIM": x.shape[-1],
        "IS_IN_PLACE": _is_in_place(x, out),
        "rotation": rotation_of(cos, x.shape[-1], interleaved, backward),
    }
    tokens = x.shape[0] if packed else x.shape[0] * x.shape[1]
    return Launch(rotary_kernel, (tokens if x.numel() else 0,), arguments, 4, 1)


def _is_in_place(x: Tensor, out: Tensor) -> bool:
    return out.data_ptr() == x.data_ptr()


def rotate(
    x: Tensor,
    out: Tensor,
    cos: Tensor,
    sin: Tensor,
    offsets: Tensor | None,
    offset: int,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    backward: bool,
) -> None:
    """Launch `rotary_launch` with the same arguments."""

    def describe(given: Any, made: Any) -> list[Launch]:
        x, out, cos, sin, offsets, cu_seqlens = given
        how = (offset, cu_seqlens, interleaved, backward)
        return [rotary_launch(x, out, cos, sin, offsets, *how)]

    # A number that grows with each step of decoding is a number of the kernel, of 32 or 64 bits.
    kernel = (interleaved, backward, _is_in_place(x, out), offset.bit_length() < 32)
    given = (x, out, cos, sin, offsets, cu_seqlens)
    run_all("rotary", (offset, *kernel), given, (), describe, kernel)
