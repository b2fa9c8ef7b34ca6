"""The producer: one warp that hands out tiles and keeps TMA busy."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared.intrinsics import copy_to_shared
from ..shared.layouts import CONSUMER_ROWS
from ..shared.schedule import next_number, put_work, retire, start_place, work_of


@gluon.jit
def producer(q, k, v, counter, channels, sizes, at, mask, cfg: gl.constexpr):
    """Load tile after tile of `forward_pass.py`."""
    load_tiles(load_blocks, q, k, v, counter, channels, sizes, at, mask, cfg)


@gluon.jit
def load_tiles(
    load_keys: gl.constexpr, q, k, v, counter, channels, sizes, at, mask, cfg: gl.constexpr
):  # fmt: skip
    """Take tile after tile; load its queries, and by `load_keys` its blocks of keys and values from
    the last to the first."""
    # Blocks that come after the search for the next tile. Where that takes long, because lengths
    # are read, consumers have a block to go meanwhile; elsewhere the block would be late.
    LEFT: gl.constexpr = 1 if cfg.IS_PACKED else 0
    count = 0  # tiles so far
    i = 0  # blocks so far
    work, start_k, place = work_of(gl.program_id(0), start_place(), sizes, at, mask, cfg)
    put_work(channels.work, count, work)
    while work.begin < work.end:
        load_queries(q, count, channels, work, at, cfg)
        blocks = work.end - work.begin
        i = load_keys(k, v, i, 0, blocks - LEFT, channels, work, start_k, sizes.group, at, cfg)
        following, following_k, place = work_of(next_number(counter), place, sizes, at, mask, cfg)
        if LEFT > 0:
            begin = blocks - LEFT
            i = load_keys(k, v, i, begin, blocks, channels, work, start_k, sizes.group, at, cfg)
        count += 1
        work, start_k = following, following_k
        put_work(channels.work, count, work)
    retire(counter)


@gluon.jit
def load_queries(q, count, channels, work, at, cfg: gl.constexpr):
    """Each consumer's rows have a slot of their own."""
    batch = batch_of(work.b, at.cu_seqlens_q)
    CONSUMERS: gl.constexpr = cfg.CONSUMERS
    for consumer in gl.static_range(CONSUMERS):
        use = count * CONSUMERS + consumer
        row = work.start_q + work.m0 + consumer * CONSUMER_ROWS
        load_tile(q, channels.q, use, batch, row, work.h, cfg.BLOCK_D, cfg.REST_D)


@gluon.jit
def load_blocks(k, v, i, begin, end, channels, work, start_k, group, at, cfg: gl.constexpr):
    """Blocks [begin, end) of K and V, counted from the tile's last; the number of blocks so far."""
    batch = batch_of(work.b, at.cu_seqlens_k)
    head = work.h // group
    for j in range(begin, end):
        row = start_k + (work.end - 1 - j) * cfg.BLOCK_N
        load_tile(k, channels.k, i, batch, row, head, cfg.BLOCK_D, cfg.REST_D)
        load_tile(v, channels.v, i, batch, row, head, cfg.BLOCK_DV, cfg.REST_DV)
        i += 1
    return i


@gluon.jit
def load_tile(x, channel, i, batch, row, head, COLUMNS: gl.constexpr, REST: gl.constexpr):
    """Start the copy of the rows from `row` on into slot `i`; zeros past the ends of the tensor."""
    BYTES: gl.constexpr = x.tiles.block_type.nbytes * (COLUMNS + REST) // COLUMNS
    full = channel.acquire_empty(i, BYTES)
    copy_to_shared(x.tiles, [batch, row, head, 0], full, channel.tile(i))
    if REST > 0:
        copy_to_shared(x.rests, [batch, row, head, COLUMNS], full, channel.rest(i))


@gluon.jit
def batch_of(b, cu_seqlens):
    """Where sequence `b` lies in the first dimension: packed sequences share one."""
    batch = b
    if cu_seqlens is not None:
        batch = b * 0
    return batch
