"""The float8 forward kernel: its shared memory and producer; other roles as in the 16-bit kernel.

The producer copies K with its rows in the order of `softmax.py`, and V with adjacent keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..forward.kernel import OF_OTHERS, OF_THREE, OF_TWO, Channels, load_tiles, scheduler
from ..forward.results import Output
from ..shared.channels import Described, make_channel, make_queue
from ..shared.intrinsics import CONSUMER_ROWS, copy_to_shared, shared_rows
from ..shared.schedule import NUMBERS, WORK_NUMBERS, Mask, Sizes, batch_of
from ..shared.softmax import Score
from .consumer import Scales, consumer
from .softmax import KEY_GROUP


@gluon.jit
def make_channels(dtype: gl.constexpr, out_dtype: gl.constexpr, cfg: gl.constexpr):
    """Allocate the rings and set up their barriers."""
    C: gl.constexpr = cfg.CONSUMERS
    D: gl.constexpr = cfg.BLOCK_D
    DV: gl.constexpr = cfg.BLOCK_DV
    BLOCK: gl.constexpr = cfg.BLOCK_N
    rows: gl.constexpr = [cfg.Q_SLOTS, 1, CONSUMER_ROWS, 1, D]
    q = gl.allocate_shared_memory(dtype, rows, shared_rows(D, 8))
    o = gl.allocate_shared_memory(out_dtype, [C, 1, CONSUMER_ROWS, 1, DV], shared_rows(DV))
    groups: gl.constexpr = [cfg.STAGES, BLOCK // KEY_GROUP, 2, 4, 2, D]
    k = gl.allocate_shared_memory(dtype, groups, shared_rows(D, 8, 5))
    v = gl.allocate_shared_memory(dtype, [cfg.STAGES, 1, 1, DV, BLOCK], shared_rows(BLOCK, 8))
    channels = Channels(
        make_channel(q, q, cfg.Q_SLOTS, 1),
        make_channel(k, k, cfg.STAGES, C),
        make_channel(v, v, cfg.STAGES, C),
        o,
        o,
        make_queue(2, WORK_NUMBERS, C + 1 if cfg.IS_RAGGED else C),
    )
    fence_async_shared()
    return channels


# The producer


class Keys(NamedTuple):
    """K as TMA reads it: groups of rows (group, 2, 4, 2, adjacent heads)."""

    groups: Any
    batch_groups: Any  # stride of a batch in groups; packed sequences ignore it
    head_step: Any  # stride of a head in elements


@gluon.jit
def producer(q, keys, v_desc, counter_ptr, channels, sizes, at, mask, cfg: gl.constexpr):
    """Load all tiles of this program."""
    load_tiles(load_blocks, q, keys, v_desc, counter_ptr, channels, sizes, at, mask, cfg)


@gluon.jit
def load_blocks(keys, v_desc, i, channels, work, sizes, at, mask, cfg: gl.constexpr):
    """Load K and V of the tile; return the number of blocks so far."""
    batch = batch_of(work.b, at.cu_seqlens_k)
    head = work.h // sizes.group
    first_group, first_key = work.b * keys.batch_groups, work.start_k
    if at.cu_seqlens_k is not None:  # see `launch.grouped`
        first_group = work.start_k // KEY_GROUP + work.b
        first_key = first_group * KEY_GROUP
    for j in range(work.end - work.begin):
        row = (work.end - 1 - j) * cfg.BLOCK_N
        full = channels.k.acquire_empty(i, keys.groups.block_type.nbytes)
        coord = [first_group + row // KEY_GROUP, 0, 0, 0, head * keys.head_step]
        copy_to_shared(keys.groups, coord, full, channels.k.tile(i))
        full = channels.v.acquire_empty(i, v_desc.block_type.nbytes)
        copy_to_shared(v_desc, [batch, head, 0, first_key + row], full, channels.v.tile(i))
        i += 1
    return i


@gluon.jit(do_not_specialize=(*NUMBERS, "batch_groups", "head_step"))
def float8_kernel(
    q_desc, k_desc, v_desc, o_desc, out_ptr, lse_ptr, counter_ptr, at, scales, batch_groups,
    head_step, B, M, N, total_q, total_k, heads, group, swizzle, tiles, left, right, scale,
    softcap, cfg: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of every tile."""
    sizes = Sizes(B, M, N, total_q, total_k, heads, group, swizzle, tiles)
    mask = Mask(left, right, 0)
    score = Score(scale, softcap, None, 0, None, None)
    q, keys = Described(q_desc, None), Keys(k_desc, batch_groups, head_step)
    scales = Scales(scales.q, scales.k, scales.v)
    output = Output(Described(o_desc, None), out_ptr, lse_ptr)
    channels = make_channels(q_desc.dtype, o_desc.dtype, cfg)
    if cfg.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (0, output, channels, scales, sizes, mask, score, cfg)),
                (consumer, (1, output, channels, scales, sizes, mask, score, cfg)),
                (producer, (q, keys, v_desc, counter_ptr, channels, sizes, at, mask, cfg)),
                (scheduler, (counter_ptr, channels, sizes, at, mask, cfg)),
            ],
            [4, 1, 1],
            [OF_TWO, OF_OTHERS, OF_OTHERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (0, output, channels, scales, sizes, mask, score, cfg)),
                (consumer, (1, output, channels, scales, sizes, mask, score, cfg)),
                (consumer, (2, output, channels, scales, sizes, mask, score, cfg)),
                (producer, (q, keys, v_desc, counter_ptr, channels, sizes, at, mask, cfg)),
                (scheduler, (counter_ptr, channels, sizes, at, mask, cfg)),
            ],
            [4, 4, 1, 1],
            [OF_THREE, OF_THREE, OF_OTHERS, OF_OTHERS],
        )
