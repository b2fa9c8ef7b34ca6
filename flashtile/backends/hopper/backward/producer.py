"""The producer of the backward: one warp that keeps TMA busy."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..forward.producer import batch_of
from ..shared.intrinsics import copy_to_shared
from .schedule import key_work, visited_block


@gluon.jit
def producer(inputs, channels, tile, sizes, at, mask, cfg: gl.constexpr):
    """Load the tile's keys and values once, and every block of queries that sees them, head after
    head of the group."""
    work = key_work(tile, sizes, at, mask, cfg)
    batch_k, row_k = batch_of(work.b, at.cu_seqlens_k), work.start_k + work.n0
    batch_q = batch_of(work.b, at.cu_seqlens_q)
    i = 0  # blocks so far
    count = work.end - work.begin
    if count > 0:
        load_tile(inputs.k, channels.k, batch_k, row_k, work.kv_head)
        load_tile(inputs.v, channels.v, batch_k, row_k, work.kv_head)
        for g in range(sizes.group):
            h = work.kv_head * sizes.group + g
            for j in range(count):
                block = visited_block(j, work)
                row = work.start_q + block * cfg.BLOCK_M
                place = h * sizes.blocks + work.place + block
                load_rows(inputs.q, inputs.lse, channels.q, i, batch_q, row, h, place)
                load_rows(inputs.dout, inputs.delta, channels.dout, i, batch_q, row, h, place)
                i += 1


@gluon.jit
def load_tile(x, channel, batch, row, head):
    """Start the copy of a tile that is loaded once."""
    full = channel.acquire_empty(0, x.block_type.nbytes)
    copy_to_shared(x, [batch, row, head, 0], full, channel.tile(0))


@gluon.jit
def load_rows(x, statistic, channel, i, batch, row, head, place):
    """Start the copies of a block of rows and of one number for each; rows past the end of the
    tensor are zero."""
    full = channel.acquire_empty(i, x.block_type.nbytes + statistic.block_type.nbytes)
    copy_to_shared(x, [batch, row, head, 0], full, channel.tile(i))
    copy_to_shared(statistic, [place, 0], full, channel.rest(i))
