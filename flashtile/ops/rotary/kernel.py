"""Rotary embedding of the tokens of a tensor, into another tensor or in place: a program a token.

The angles are those of `layers/rotary.py`. Both features of a pair are read before either is
written, by the same thread, so that the input may be the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...gpu.launch import Launch, run
from ...gpu.rows import rows_of

# Pairs of features that one step of a program turns.
PAIRS = 2048
LARGEST_FLOAT8 = tl.constexpr(448.0)  # of e4m3


@dataclass(frozen=True)
class Turn:
    """What a rotation is compiled for."""

    HALF: int  # pairs of a head
    BLOCK_HALF: int
    BLOCK_HEADS: int
    BLOCK_REST: int  # covers the features that are passed through
    IS_INTERLEAVED: bool
    IS_BACKWARD: bool  # by the opposite angle


def turn_of(cos: Tensor, head_dim: int, interleaved: bool, backward: bool = False) -> Turn:
    """The rotation of heads of `head_dim` by a table (positions, pairs)."""
    half = cos.shape[1]
    block_half = triton.next_power_of_2(max(half, 1))
    return Turn(
        HALF=half,
        BLOCK_HALF=block_half,
        BLOCK_HEADS=max(1, PAIRS // block_half),
        BLOCK_REST=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        IS_INTERLEAVED=interleaved,
        IS_BACKWARD=backward,
    )


@triton.jit
def sequence_of_token(token, cu_seqlens, B, CHUNK: tl.constexpr):
    """The sequence that owns a row of a packed tensor: how many sequences have ended by then."""
    count = token * 0
    for first in range(0, B, CHUNK):
        offs = first + tl.arange(0, CHUNK)
        end = tl.load(cu_seqlens + 1 + offs, mask=offs < B, other=2**31 - 1)
        count += tl.sum((end <= token).to(tl.int32), 0)
    return count


@triton.jit
def place_of_token(token, cu_seqlens, B, seq):
    """(sequence, place in it) of a token; behind the last sequence of a packed tensor, (B, -1)."""
    if cu_seqlens is not None:
        b = sequence_of_token(token, cu_seqlens, B, 128)
        place = token - tl.load(cu_seqlens + b, mask=b < B, other=0).to(tl.int32)
        place = tl.where(b < B, place, -1)
    else:
        b = token // seq
        place = token % seq
    return b, place


@triton.jit
def token_base(x, token, b, place, cu_seqlens):
    """Pointer to the heads of a token, of a packed tensor or not."""
    if cu_seqlens is not None:
        base = x.ptr + token.to(tl.int64) * x.row
    else:
        base = x.ptr + b.to(tl.int64) * x.batch + place.to(tl.int64) * x.row
    return base


@triton.jit
def as_stored(x, target, descale, head, inside):
    """`x` in the dtype of `target`; in float8 divided by its head's factor, as large as can be at
    most."""
    dtype: tl.constexpr = target.ptr.dtype.element_ty
    if dtype.primitive_bitwidth == 8:
        x = x.to(tl.float32)
        if descale is not None:
            x = x / tl.load(descale + head + 0 * inside.to(tl.int32), mask=inside, other=1.0)
        inside_range = tl.minimum(tl.maximum(x, -LARGEST_FLOAT8), LARGEST_FLOAT8)
        x = tl.where(x == x, inside_range, x)  # NaN stays NaN
    return x.to(dtype)


@triton.jit
def turn_heads(
    target, target_base, source, source_base, descale, position, cos, sin, table_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, KEEPS_REST: tl.constexpr, turn: tl.constexpr,
):  # fmt: skip
    """All heads of one token, turned by the angles of its position; as they are outside of the
    table. KEEPS_REST: the target holds the features behind the rotated ones already."""
    HALF: tl.constexpr = turn.HALF
    BLOCK_HEADS: tl.constexpr = turn.BLOCK_HEADS
    # (1, BLOCK_HALF)
    pairs = tl.arange(0, turn.BLOCK_HALF)[None, :]
    row = position.to(tl.int64) + 0 * pairs
    known = (row >= 0) & (row < table_rows) & (pairs < HALF)
    place = row * HALF + pairs
    c = tl.load(cos + place, mask=known, other=1.0).to(tl.float32)
    s = tl.load(sin + place, mask=known, other=0.0).to(tl.float32)
    if turn.IS_BACKWARD:
        s = -s
    if turn.IS_INTERLEAVED:
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
        turned_a = as_stored(a * c - b * s, target, descale, heads, inside)
        turned_b = as_stored(a * s + b * c, target, descale, heads, inside)
        tl.store(write + first * target.dim, turned_a, mask=inside)
        tl.store(write + second * target.dim, turned_b, mask=inside)
        if not KEEPS_REST and 2 * HALF < DIM:
            rest = 2 * HALF + tl.arange(0, turn.BLOCK_REST)[None, :]
            inside = (heads < HEADS) & (rest < DIM)
            x = tl.load(read + rest * source.dim, mask=inside)
            x = as_stored(x, target, descale, heads, inside)
            tl.store(write + rest * target.dim, x, mask=inside)


@triton.jit(do_not_specialize=["offset", "B", "seq", "table_rows"])
def rotary_kernel(
    x, out, cos, sin, offsets_ptr, cu_seqlens, offset, B, seq, table_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, IN_PLACE: tl.constexpr, turn: tl.constexpr,
):  # fmt: skip
    """One token of `x`, at its place in its sequence plus the offset."""
    token = tl.program_id(0)
    b, place = place_of_token(token, cu_seqlens, B, seq)
    position = place.to(tl.int64) + offset
    if offsets_ptr is not None:
        position += tl.load(offsets_ptr + b, mask=b < B, other=0)
    position = tl.where(b < B, position, -1)
    source_base = token_base(x, token, b, place, cu_seqlens)
    target_base = token_base(out, token, b, place, cu_seqlens)
    turn_heads(
        out, target_base, x, source_base, None, position, cos, sin, table_rows, HEADS, DIM,
        IN_PLACE, turn,
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
    """Write `x` (batch, seq, heads, head_dim) or, packed, (total, heads, head_dim), turned, to
    `out`, which may be `x`."""
    packed = cu_seqlens is not None
    in_place = out.data_ptr() == x.data_ptr()
    arguments = {
        "x": rows_of(x),
        "out": rows_of(out),
        "cos": cos.contiguous(),
        "sin": sin.contiguous(),
        "offsets_ptr": None if offsets is None else offsets.contiguous(),
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.contiguous(),
        "offset": offset,
        "B": x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        "seq": 1 if packed else x.shape[1],
        "table_rows": cos.shape[0],
        "HEADS": x.shape[-2],
        "DIM": x.shape[-1],
        "IN_PLACE": in_place,
        "turn": turn_of(cos, x.shape[-1], interleaved, backward),
    }
    tokens = x.shape[0] if packed else x.shape[0] * x.shape[1]
    return Launch(rotary_kernel, (tokens if x.numel() else 0,), arguments, 4, 1)


def rotate(x: Tensor, *rest: Any) -> None:
    """Launch `rotary_launch` of the same arguments."""
    run([rotary_launch(x, *rest)], x)
