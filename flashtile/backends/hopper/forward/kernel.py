"""The forward kernel: shared memory, and who does what.

A persistent program has three roles: one producer warp copies, and consumer warpgroups multiply
(warp specialisation, FlashAttention-3, Shah et al. 2024). `producer.py` and `consumer.py` hold the
roles, `channels.py` what lies between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..shared.arguments import NUMBERS, Described, Mask, Output, Score, Sizes
from ..shared.channels import make_channel, make_queue
from ..shared.layouts import CONSUMER_ROWS, shared_rows
from ..shared.schedule import WORK_NUMBERS
from .consumer import consumer
from .producer import producer

# Registers a thread that a role asks for: two consumers, three consumers, the producer.
OF_TWO = gl.constexpr(240)
OF_THREE = gl.constexpr(160)
OF_PRODUCER = gl.constexpr(24)


class Channels(NamedTuple):
    """Everything in shared memory."""

    q: Any  # a slot for each consumer, or two
    k: Any
    v: Any
    o: Any  # plain tiles, one for each consumer
    o_rest: Any
    work: Any  # where the tiles of queries lie, and which keys they see


@gluon.jit
def make_tiles(
    dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    REST: gl.constexpr,
):  # fmt: skip
    """COUNT tiles, and COUNT tiles with the rest of their columns if there is one."""
    tiles = gl.allocate_shared_memory(dtype, [COUNT, 1, ROWS, 1, COLUMNS], shared_rows(COLUMNS))
    rests = tiles
    if REST > 0:
        rests = gl.allocate_shared_memory(dtype, [COUNT, 1, ROWS, 1, REST], shared_rows(REST))
    return tiles, rests


@gluon.jit
def make_channels(dtype: gl.constexpr, cfg: gl.constexpr):
    """Allocate the rings and set up their barriers."""
    C: gl.constexpr = cfg.CONSUMERS
    ROWS: gl.constexpr = CONSUMER_ROWS
    q, q_rest = make_tiles(dtype, cfg.Q_SLOTS, ROWS, cfg.BLOCK_D, cfg.REST_D)
    o, o_rest = q, q_rest
    if not cfg.O_REUSES_Q:
        o, o_rest = make_tiles(dtype, C, ROWS, cfg.BLOCK_DV, cfg.REST_DV)
    k, k_rest = make_tiles(dtype, cfg.STAGES, cfg.BLOCK_N, cfg.BLOCK_D, cfg.REST_D)
    v, v_rest = make_tiles(dtype, cfg.STAGES, cfg.BLOCK_N, cfg.BLOCK_DV, cfg.REST_DV)
    channels = Channels(
        make_channel(q, q_rest, cfg.Q_SLOTS, 1),
        make_channel(k, k_rest, cfg.STAGES, C),
        make_channel(v, v_rest, cfg.STAGES, C),
        o,
        o_rest,
        make_queue(2, WORK_NUMBERS, C),
    )
    fence_async_shared()
    return channels


@gluon.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    q_tiles, k_tiles, v_tiles, o_tiles, q_rests, k_rests, v_rests, o_rests, out_ptr, lse_ptr,
    counter, at, pointers, B, M, N, total_q, total_k, heads, group, section, tiles, left, right,
    chunk, alibi_batch, scale, softcap, cfg: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of every tile; see `arguments.py` for what each argument holds."""
    sizes = Sizes(B, M, N, total_q, total_k, heads, group, section, tiles)
    mask = Mask(left, right, chunk)
    score = Score(scale, softcap, pointers.alibi_slopes, alibi_batch, pointers.sink)
    q, k, v = (
        Described(q_tiles, q_rests),
        Described(k_tiles, k_rests),
        Described(v_tiles, v_rests),
    )
    output = Output(Described(o_tiles, o_rests), out_ptr, lse_ptr)
    channels = make_channels(q_tiles.dtype, cfg)
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
                (producer, (q, k, v, counter, channels, sizes, at, mask, cfg)),
            ],
            [4, 1],
            [OF_TWO, OF_PRODUCER],
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
                (producer, (q, k, v, counter, channels, sizes, at, mask, cfg)),
            ],
            [4, 4, 1],
            [OF_THREE, OF_THREE, OF_PRODUCER],
        )
