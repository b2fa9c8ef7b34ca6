"""Consumers take turns at the tensor cores (ping-pong, FlashAttention-3, section 3.1).

One issues its two products, then the next one does, while the first takes its exponentials. The
order is a ring of hardware barriers, one for each consumer: it waits at its own and comes to that
of the next. Every consumer has one turn for each block of a tile but the first, whether it sees
the block or lets it pass, so the rings stay in step.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .intrinsics import FIRST_BARRIER, arrive_at_barrier, wait_at_barrier

# Threads of two consumers: the one that waits, and the one before it.
PAIR = gl.constexpr(256)


@gluon.jit
def first_turn(ME: gl.constexpr, cfg: gl.constexpr):
    """The first consumer starts: the last one gives it the turn."""
    if cfg.TAKES_TURNS and ME == cfg.CONSUMERS - 1:
        arrive_at_barrier(FIRST_BARRIER, PAIR)


@gluon.jit
def wait_for_turn(ME: gl.constexpr, cfg: gl.constexpr):
    """Wait until the consumer before this one has issued its products."""
    if cfg.TAKES_TURNS:
        wait_at_barrier(FIRST_BARRIER + ME, PAIR)


@gluon.jit
def give_turn(ME: gl.constexpr, cfg: gl.constexpr):
    """Let the next consumer issue."""
    if cfg.TAKES_TURNS:
        arrive_at_barrier(FIRST_BARRIER + (ME + 1) % cfg.CONSUMERS, PAIR)


@gluon.jit
def last_turn(ME: gl.constexpr, cfg: gl.constexpr):
    """Take the turn that is left over, so that no barrier is left half full."""
    if cfg.TAKES_TURNS and ME == 0:
        wait_at_barrier(FIRST_BARRIER, PAIR)
