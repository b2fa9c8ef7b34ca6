"""The producer of float8 tiles: K with its rows in the order of `fp8_layouts`, V with its keys
adjacent."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..forward.producer import batch_of, load_tiles
from ..shared.intrinsics import copy_to_shared
from .layouts import KEY_GROUP


class Keys(NamedTuple):
    """K as TMA sees it: groups of rows (group, 2, 4, 2, all heads side by side)."""

    groups: Any
    batch_groups: Any  # from one batch to the next; sequences have one more than they fill, packed
    head_step: Any  # elements from one head to the next


@gluon.jit
def producer8(q, keys, v_tiles, counter, channels, sizes, at, mask, cfg: gl.constexpr):
    """Load tile after tile of `fp8_pass.py`."""
    load_tiles(load_blocks8, q, keys, v_tiles, counter, channels, sizes, at, mask, cfg)


@gluon.jit
def load_blocks8(
    keys, v_tiles, i, begin, end, channels, work, start_k, group, at, cfg: gl.constexpr
):
    """Blocks [begin, end) of K and V, counted from the tile's last; the number of blocks so far."""
    batch = batch_of(work.b, at.cu_seqlens_k)
    head = work.h // group
    first_group, first_key = work.b * keys.batch_groups, start_k
    if at.cu_seqlens_k is not None:  # `fp8_launch.in_groups`
        first_group = start_k // KEY_GROUP + work.b
        first_key = first_group * KEY_GROUP
    for j in range(begin, end):
        row = (work.end - 1 - j) * cfg.BLOCK_N
        full = channels.k.acquire_empty(i, keys.groups.block_type.nbytes)
        place = [first_group + row // KEY_GROUP, 0, 0, 0, head * keys.head_step]
        copy_to_shared(keys.groups, place, full, channels.k.tile(i))
        full = channels.v.acquire_empty(i, v_tiles.block_type.nbytes)
        copy_to_shared(v_tiles, [batch, head, 0, first_key + row], full, channels.v.tile(i))
        i += 1
    return i
