"""The writer of the backward: a warp that adds dQ to memory, so that no consumer waits for that.

Where there is an order, an addition takes longer than a step: the turn is awaited, the sum goes to
memory, the turn is passed on. So two writers take every other step each. Two steps of a tile add to
different blocks, and the order is one of the tiles that add to the same block.

Where cfg.ADDERS is 2 it has nothing to do. With 256 columns shared memory has no room for a second
pair of pieces, and a consumer that adds its own waits less; or, for cfg.FROM_REGISTERS, consumers
add from their registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .intrinsics import add_to_global, recast
from .order import await_additions, await_turn, pass_turn
from .query_gradient import PIECE_ROWS
from .schedule import key_work, visited_block


@gluon.jit
def writer(ME: gl.constexpr, outputs, staging, tile, sizes, at, mask, cfg: gl.constexpr):
    """Add dQ of a tile of keys: every step, or every other one."""
    if cfg.ADDERS == 1:
        add_pairs(ME, outputs, staging, key_work(tile, sizes, at, mask, cfg), sizes, cfg)


@gluon.jit
def add_pairs(ME: gl.constexpr, outputs, staging, work, sizes, cfg: gl.constexpr):
    """Add what both consumers put into the staging ring, block after block of the tile's walk."""
    count = work.end - work.begin
    if ME == 0 and count > 0:  # the first one is nobody's
        staging.acquire(0)
        staging.release(0)
    i = 1  # pairs so far
    for g in range(sizes.group):
        h = work.kv_head * sizes.group + g
        for j in range(count):
            block = visited_block(j, work)
            place = h * sizes.blocks + work.place + block
            if i % cfg.WRITERS == ME:
                add_pair(outputs, staging, i, place, block, work, cfg)
            i += 1


@gluon.jit
def add_pair(outputs, staging, i, place, block, work, cfg: gl.constexpr):
    """Add pair `i` to block `place` of the workspace, `block` of its sequence."""
    SHAPE: gl.constexpr = [staging.SLOTS, 2 * PIECE_ROWS, 256]
    LAYOUT: gl.constexpr = outputs.workspace.layout
    pairs = recast(staging.tiles, gl.float32, SHAPE, LAYOUT)
    if cfg.IS_ORDERED:
        await_turn(outputs.turns + place, work.n, work.before, block)
    staging.acquire(i)
    row = place * (2 * PIECE_ROWS)
    add_to_global(outputs.workspace, [row, 0], pairs.index(i % staging.SLOTS))
    tma.store_wait(0)
    staging.release(i)
    if cfg.IS_ORDERED:
        await_additions()
        pass_turn(outputs.turns + place, work.n)
