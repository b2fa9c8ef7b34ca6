"""dQ in a fixed order, for cfg.IS_ORDERED: tile n of a sequence adds to a block after tile n - 1.

It learns that from a number in memory, the *turn* of the block and the adder: n + 1 once tile n is
done. All tiles walk down from the last row that sees them. So a tile comes to a block later than
the one before it, or, where both start at the same row, at the same time: it falls behind once, by
what an addition and its turn take, and waits no more.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .intrinsics import meet


@gluon.jit
def await_turn(turn, n, before_end, m):
    """Wait until tile n - 1 has added to block m, if it does at all.

    No deadlock: tiles are numbered in the order in which programs start, so that a program waits
    for none but one that runs already, and the first of those that run waits for none.
    """
    if m < before_end:
        # The additions before and after go through another path to memory than this load. Both are
        # of global memory; a fence for all memory would wait for what this thread has stored, too.
        gl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; AGAIN: ld.acquire.gpu.global.b32 t, [$1];"
            " setp.ne.s32 p, t, $2; @p bra AGAIN; fence.proxy.async.global; mov.b32 $0, 0; }",
            "=r,l,r",
            [turn.to(gl.int64, bitcast=True), n],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def await_additions():
    """Wait until what this role has added is in memory (one of its threads started that)."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    meet()


@gluon.jit
def pass_turn(turn, n):
    """Let tile n + 1 add."""
    gl.atomic_xchg(turn, n + 1, sem="release", scope="gpu")
