"""The forward kernel: shared memory, roles, the scheduler and the producer.

A persistent program has three kinds of roles: a producer warp copies, consumer warpgroups multiply
(warp specialisation, FlashAttention-3, Shah et al. 2024), and for sequences of different lengths a
scheduler warp looks up the tiles. The consumers are in `consumer.py`, the others in this file, and
the ring buffers between them in `channels.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ....gpu.intrinsics import wait_for_earlier_kernels
from ..shared.channels import Described, make_channel, make_queue
from ..shared.dropout import Dropout
from ..shared.intrinsics import CONSUMER_ROWS, copy_to_shared, shared_rows
from ..shared.schedule import (
    NUMBERS,
    WORK_NUMBERS,
    Mask,
    Sizes,
    batch_of,
    entry_size,
    first_entry,
    list_of,
    next_number,
    put_work,
    read_work,
    retire,
    visited_block,
    work_of,
)
from ..shared.softmax import Score
from .consumer import consumer
from .results import Output

# Registers per thread of one of two consumers, one of three consumers, and the other roles.
OF_TWO = gl.constexpr(240)
OF_THREE = gl.constexpr(160)
OF_OTHERS = gl.constexpr(24)


class Channels(NamedTuple):
    """Everything in shared memory."""

    q: Any  # a slot for each consumer, or two
    k: Any
    v: Any
    o: Any  # plain tiles, one for each consumer
    o_tail: Any
    work: Any  # the tiles of queries, and the keys that they see


@gluon.jit
def make_tiles(
    dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """COUNT tiles, and COUNT tails if there is a tail."""
    tiles = gl.allocate_shared_memory(dtype, [COUNT, 1, ROWS, 1, COLUMNS], shared_rows(COLUMNS))
    tails = tiles
    if TAIL > 0:
        tails = gl.allocate_shared_memory(dtype, [COUNT, 1, ROWS, 1, TAIL], shared_rows(TAIL))
    return tiles, tails


@gluon.jit
def make_channels(dtype: gl.constexpr, cfg: gl.constexpr):
    """Allocate the rings and set up their barriers."""
    C: gl.constexpr = cfg.CONSUMERS
    ROWS: gl.constexpr = CONSUMER_ROWS
    q, q_tail = make_tiles(dtype, cfg.Q_SLOTS, ROWS, cfg.BLOCK_D, cfg.TAIL_D)
    o, o_tail = q, q_tail
    if not cfg.IS_Q_REUSED:
        o, o_tail = make_tiles(dtype, C, ROWS, cfg.BLOCK_DV, cfg.TAIL_DV)
    k, k_tail = make_tiles(dtype, cfg.STAGES, cfg.BLOCK_N, cfg.BLOCK_D, cfg.TAIL_D)
    v, v_tail = make_tiles(dtype, cfg.STAGES, cfg.BLOCK_N, cfg.BLOCK_DV, cfg.TAIL_DV)
    channels = Channels(
        make_channel(q, q_tail, cfg.Q_SLOTS, 1),
        make_channel(k, k_tail, cfg.STAGES, C),
        make_channel(v, v_tail, cfg.STAGES, C),
        o,
        o_tail,
        make_queue(2, WORK_NUMBERS, C + 1 if cfg.IS_RAGGED else C),
    )
    fence_async_shared()
    return channels


# The scheduler


@gluon.jit
def scheduler(counter_ptr, channels, sizes, at, mask, cfg: gl.constexpr):
    """If sequences can be shorter than the tensors, take tiles until there are no more, and send
    them to the other roles: one tile ahead, so that no load waits for lengths. Otherwise the
    producer takes tiles, as late as it can: long tiles should go to programs that are idle.
    """
    if cfg.IS_RAGGED:
        wait_for_earlier_kernels()  # one of them writes the list
        count = 0  # tiles so far
        work = send_work(gl.program_id(0), count, channels, sizes, at, mask, cfg)
        while work.begin < work.end:
            count += 1
            channels.work.await_empty(count)  # before, a tile would be taken two tiles ahead
            number = next_number(counter_ptr)
            work = send_work(number, count, channels, sizes, at, mask, cfg)
        retire(counter_ptr)


@gluon.jit
def send_work(number, count, channels, sizes, at, mask, cfg: gl.constexpr):
    """Send the tile of index `number`, the program's tile `count`, and return its work."""
    work = work_of(number, sizes, at, mask, cfg)
    put_work(channels.work, count, work, cfg)
    return work


# The producer


@gluon.jit
def producer(q, k, v, counter_ptr, channels, sizes, at, mask, cfg: gl.constexpr):
    """Load all tiles of this program."""
    load_tiles(load_blocks, q, k, v, counter_ptr, channels, sizes, at, mask, cfg)


@gluon.jit
def load_tiles(
    load_keys: gl.constexpr, q, k, v, counter_ptr, channels, sizes, at, mask, cfg: gl.constexpr
):  # fmt: skip
    """For each tile of this program, load the queries and, with `load_keys`, the blocks of keys and
    values.
    """
    count = 0  # tiles so far
    i = 0  # blocks so far
    if cfg.IS_RAGGED:
        channels.work.acquire(count)
        work = read_work(channels.work, count, sizes, 1, cfg)
    else:
        if cfg.SPANS > 0:
            wait_for_earlier_kernels()  # one of them writes the lists
        work = send_work(gl.program_id(0), count, channels, sizes, at, mask, cfg)
    while work.begin < work.end:
        load_queries(q, count, channels, work, at, cfg)
        i = load_keys(k, v, i, channels, work, sizes, at, mask, cfg)
        count += 1
        if cfg.IS_RAGGED:
            channels.work.release(count - 1)
            channels.work.acquire(count)
            work = read_work(channels.work, count, sizes, 1, cfg)
        else:
            number = next_number(counter_ptr)
            work = send_work(number, count, channels, sizes, at, mask, cfg)
    if not cfg.IS_RAGGED:
        retire(counter_ptr)


@gluon.jit
def load_queries(q, count, channels, work, at, cfg: gl.constexpr):
    """Load the queries of a tile: a slot for each consumer."""
    batch = batch_of(work.b, at.cu_seqlens_q)
    CONSUMERS: gl.constexpr = cfg.CONSUMERS
    for c in gl.static_range(CONSUMERS):
        use = count * CONSUMERS + c
        row = work.start_q + work.m0 + c * CONSUMER_ROWS
        load_tile(q, channels.q, use, batch, row, work.h, cfg.BLOCK_D, cfg.TAIL_D)


@gluon.jit
def load_blocks(k, v, i, channels, work, sizes, at, mask, cfg: gl.constexpr):
    """Load K and V of the tile; return the number of blocks so far."""
    batch = batch_of(work.b, at.cu_seqlens_k)
    head = work.h // sizes.group
    for j in range(work.end - work.begin):
        block = visited_block(j, work, cfg)
        row = work.start_k + work.first_key
        if cfg.HAS_LISTS:
            number = list_of(work.b, work.h, work.m0, sizes, mask, cfg)
            row += gl.load(first_entry(number, sizes, mask, cfg) + entry_size(cfg) * block)
        else:
            row += block * cfg.BLOCK_N
        load_tile(k, channels.k, i, batch, row, head, cfg.BLOCK_D, cfg.TAIL_D)
        load_tile(v, channels.v, i, batch, row, head, cfg.BLOCK_DV, cfg.TAIL_DV)
        i += 1
    return i


@gluon.jit
def load_tile(x, channel, i, batch, row, head, COLUMNS: gl.constexpr, TAIL: gl.constexpr):
    """Start the copy of the rows from `row` into slot `i`; zeros outside of the tensor."""
    BYTES: gl.constexpr = x.tiles.block_type.nbytes * (COLUMNS + TAIL) // COLUMNS
    full = channel.acquire_empty(i, BYTES)
    copy_to_shared(x.tiles, [batch, row, head, 0], full, channel.tile(i))
    if TAIL > 0:
        copy_to_shared(x.tails, [batch, row, head, COLUMNS], full, channel.tail(i))


@gluon.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, q_tail_desc, k_tail_desc, v_tail_desc, o_tail_desc, out_ptr,
    lse_ptr, counter_ptr, at, pointers, B, M, N, total_q, total_k, heads, group, swizzle, tiles,
    left, right, chunk, alibi_batch, scale, softcap, first_kept, drop_scale, blocks,
    cfg: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of every tile."""
    sizes = Sizes(B, M, N, total_q, total_k, heads, group, swizzle, tiles)
    mask = Mask(left, right, chunk, blocks, at.q_runs, at.k_runs)
    dropout = Dropout(pointers.rng_state, first_kept, drop_scale)
    score = Score(scale, softcap, pointers.alibi_slopes, alibi_batch, pointers.sink, dropout)
    q, k, v = (
        Described(q_desc, q_tail_desc),
        Described(k_desc, k_tail_desc),
        Described(v_desc, v_tail_desc),
    )
    output = Output(Described(o_desc, o_tail_desc), out_ptr, lse_ptr)
    channels = make_channels(q_desc.dtype, cfg)
    if cfg.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    consumer,
                    (0, output, channels, sizes, mask, score, cfg),
                ),
                (
                    consumer,
                    (1, output, channels, sizes, mask, score, cfg),
                ),
                (producer, (q, k, v, counter_ptr, channels, sizes, at, mask, cfg)),
                (scheduler, (counter_ptr, channels, sizes, at, mask, cfg)),
            ],
            [4, 1, 1],
            [OF_TWO, OF_OTHERS, OF_OTHERS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    consumer,
                    (0, output, channels, sizes, mask, score, cfg),
                ),
                (
                    consumer,
                    (1, output, channels, sizes, mask, score, cfg),
                ),
                (
                    consumer,
                    (2, output, channels, sizes, mask, score, cfg),
                ),
                (producer, (q, k, v, counter_ptr, channels, sizes, at, mask, cfg)),
                (scheduler, (counter_ptr, channels, sizes, at, mask, cfg)),
            ],
            [4, 4, 1, 1],
            [OF_THREE, OF_THREE, OF_OTHERS, OF_OTHERS],
        )
