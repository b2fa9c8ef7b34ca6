"""What a consumer of the forward stores: the output of its rows, and their log-sum-exp."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..shared.intrinsics import (
    CONSUMER_ROWS,
    CONSUMER_WARPS,
    copy_to_global,
    log2,
    row_values,
    rows_of_heads,
    store_float32,
)
from ..shared.softmax import LN2, LOG2E, pivot_of, whole_row_sum


class Output(NamedTuple):
    """The destinations of the results."""

    desc: Any  # Described
    ptr: Any
    lse_ptr: Any


@gluon.jit
def normalisation(ME: gl.constexpr, row_max, row_sum, work, sink_ptr, cfg: gl.constexpr):
    """The factor of the output of each row, and its log-sum-exp; 0 and -inf for padding rows and
    for rows that saw no key.
    """
    rows = work.m0 + ME * CONSUMER_ROWS
    rows += gl.arange(0, CONSUMER_ROWS, layout=row_values(cfg.BLOCK_N))
    row_sum = whole_row_sum(row_sum, cfg)
    weight = 1.0
    if sink_ptr is not None:  # a key of logit `sink` whose value is zero
        sink = gl.load(sink_ptr + work.h).to(gl.float32) * LOG2E
        with_sink = gl.maximum(row_max, sink)
        pivot = pivot_of(with_sink, True)
        weight = gl.exp2(row_max - pivot)
        row_sum = row_sum * weight + gl.exp2(sink - pivot)
        row_max = with_sink
    seen = (row_sum > 0.0) & (rows < work.M)
    safe_sum = gl.where(seen, row_sum, 1.0)
    lse = gl.where(seen, (row_max + log2(safe_sum)) * LN2, -float("inf"))
    return gl.where(seen, weight / safe_sum, 0.0), lse


@gluon.jit
def store_lse(ME: gl.constexpr, lse, output, work, sizes, cfg: gl.constexpr):
    """Store the log-sum-exp, (B, Hq, M) or, packed, (Hq, total_q)."""
    rows = work.m0 + ME * CONSUMER_ROWS
    rows += gl.arange(0, CONSUMER_ROWS, layout=row_values(cfg.BLOCK_N))
    if not cfg.IS_PACKED:
        offset = (work.b * sizes.heads + work.h).to(gl.int64) * sizes.M
    else:
        offset = work.h.to(gl.int64) * sizes.total_q + work.start_q
    gl.store(output.lse_ptr + offset + rows, lse, mask=rows < work.M)


@gluon.jit
def store_output(
    ME: gl.constexpr, o, tiles, COLUMN: gl.constexpr, output, work, sizes, COLUMNS: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Store the output's columns from COLUMN, rounded or, of a partial problem, in float32."""
    if cfg.IS_PARTIAL:
        row = work.m0 + ME * CONSUMER_ROWS
        start, M, heads = work.start_q, work.M, sizes.heads
        store_float32(o, output.ptr, row, COLUMN, cfg.DV, start, M, work.h, heads)
    else:
        store_rounded(ME, o, tiles, COLUMN, output, work, COLUMNS, cfg)


@gluon.jit
def store_rounded(
    ME: gl.constexpr, o, tiles, COLUMN: gl.constexpr, output, work, COLUMNS: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Store the output's columns from COLUMN, through shared memory: by TMA, which clips at the end
    of the tensor, or by the threads if a sequence can end before it.
    """
    row = work.m0 + ME * CONSUMER_ROWS
    tile = tiles.index(ME)
    tile.reshape([CONSUMER_ROWS, COLUMNS]).store(o.to(tiles.dtype))
    fence_async_shared()  # TMA will read the tile, or overwrite it with the next queries
    if cfg.IS_RAGGED:
        LAYOUT: gl.constexpr = rows_of_heads(COLUMNS, CONSUMER_WARPS)
        x = tile.reshape([CONSUMER_ROWS, COLUMNS]).load(LAYOUT)
        offs = row + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
        dims = COLUMN + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        strides = output.desc.tiles.strides  # of (batch, row, head, dim)
        offsets = (work.start_q + offs).to(gl.int64) * strides[1] + work.h.to(gl.int64) * strides[2]
        if not cfg.IS_PACKED:
            offsets += work.b.to(gl.int64) * strides[0]
        # Rows start at multiples of 16 bytes, as TMA requires.
        offsets = gl.multiple_of(offsets, [1, 8])
        gl.store(output.ptr + offsets + dims, x, mask=(offs < work.M) & (dims < cfg.DV))
    elif COLUMN == 0:
        copy_to_global(output.desc.tiles, [work.b, row, work.h, 0], tile)
    else:
        copy_to_global(output.desc.tails, [work.b, row, work.h, COLUMN], tile)
