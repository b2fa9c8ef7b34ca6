"""Ring buffers in shared memory, between the roles of a program.

A slot holds a tile and, if the head dim is not a power of two, a second tile with its tail, the
remaining columns. Each slot has two mbarriers: full and empty. Use `i` of a ring is in slot
`i % SLOTS` and round `i // SLOTS`, and a wait passes the parity of its round. Producer and
consumers count their uses themselves.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .intrinsics import (
    FIRST_BARRIER,
    aggregate,
    arrive_alone,
    arrive_at_barrier,
    one_value,
    shared_value,
    wait_at_barrier,
)


class Described(NamedTuple):
    """The TMA descriptors of a tensor of head rows: for tiles of its first columns and, if the
    head dim is not a power of two, for its tail.
    """

    tiles: Any
    tails: Any


@aggregate
class Channel:
    """A ring of tiles that TMA fills."""

    tiles: gl.shared_memory_descriptor  # (SLOTS, ...)
    tails: gl.shared_memory_descriptor  # `tiles` again if there is no tail
    full: gl.shared_memory_descriptor  # (SLOTS, 1) mbarriers
    empty: gl.shared_memory_descriptor
    SLOTS: gl.constexpr
    TAIL: gl.constexpr  # columns of a tail, 0 if there is none

    @gluon.constexpr_function
    def __init__(self, tiles, tails, full, empty, SLOTS):
        self.tiles = tiles
        self.tails = tails
        self.full = full
        self.empty = empty
        self.SLOTS = gl.constexpr(SLOTS)
        self.TAIL = gl.constexpr(0 if tails.shape == tiles.shape else tails.shape[-1])

    @gluon.jit
    def await_empty(self, i):
        """Wait until slot `i` is empty."""
        slot = i % self.SLOTS
        mbarrier.wait(self.empty.index(slot), ((i // self.SLOTS) & 1) ^ 1)

    @gluon.jit
    def acquire_empty(self, i, BYTES: gl.constexpr):
        """Wait until slot `i` is empty, then expect BYTES; return its full barrier."""
        slot = i % self.SLOTS
        mbarrier.wait(self.empty.index(slot), ((i // self.SLOTS) & 1) ^ 1)
        mbarrier.expect(self.full.index(slot), BYTES)
        return self.full.index(slot)

    @gluon.jit
    def acquire(self, i):
        """Wait until slot `i` is full."""
        slot = i % self.SLOTS
        mbarrier.wait(self.full.index(slot), (i // self.SLOTS) & 1)

    @gluon.jit
    def tile(self, i):
        """The tile of slot `i`."""
        return self.tiles.index(i % self.SLOTS)

    @gluon.jit
    def tail(self, i):
        """The tail of slot `i`."""
        return self.tails.index(i % self.SLOTS)

    @gluon.jit
    def release(self, i):
        """Release slot `i`, after all threads of this consumer have read it."""
        mbarrier.arrive(self.empty.index(i % self.SLOTS), count=1)

    @gluon.jit
    def release_operand(self, i):
        """Release slot `i`, after the products of this consumer that read it have completed.

        A product needs operands from all four warps and completes for the whole warpgroup, so it
        is enough that one thread has waited for it.
        """
        arrive_alone(self.empty.index(i % self.SLOTS))


@gluon.jit
def make_channel(tiles, tails, SLOTS: gl.constexpr, RELEASES: gl.constexpr):
    """The ring of `tiles` and `tails`; a slot is empty after RELEASES releases."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=RELEASES)
    return Channel(tiles, tails, full, empty, SLOTS)


@gluon.jit
def put(queue, i, numbers):
    """Send a tuple of numbers from one warp to other roles, as use `i` of the ring."""
    COUNT: gl.constexpr = len(numbers)
    slot = i % queue.SLOTS
    mbarrier.wait(queue.empty.index(slot), ((i // queue.SLOTS) & 1) ^ 1)
    for n in gl.static_range(COUNT):
        queue.tiles.index(slot * COUNT + n).store(gl.full([1], numbers[n], gl.int32, one_value(1)))
    mbarrier.arrive(queue.full.index(slot), count=1)


@gluon.jit
def number_of(queue, i, N: gl.constexpr, WARPS: gl.constexpr):
    """Number N of use `i` of the ring, which is full."""
    COUNT: gl.constexpr = queue.tiles.shape[0] // queue.SLOTS
    return gl.max(queue.tiles.index(i % queue.SLOTS * COUNT + N).load(one_value(WARPS)), 0)


@gluon.jit
def make_queue(SLOTS: gl.constexpr, COUNT: gl.constexpr, RELEASES: gl.constexpr):
    """A ring whose slots hold COUNT numbers."""
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS * COUNT, 1], shared_value())
    return make_channel(numbers, numbers, SLOTS, RELEASES)


# Ping-pong (FlashAttention-3, section 3.1): the consumers alternate at the tensor cores. While one
# issues its two products, another computes exponentials. Each consumer has a hardware barrier, and
# the barriers form a ring: a consumer waits at its own barrier and arrives at that of the next
# consumer. It does so once for every block of a tile except the first, including skipped blocks, so
# that the counts of all consumers agree.

# Threads of two consumers: the one that waits and the one before it.
PAIR = gl.constexpr(256)


@gluon.jit
def open_ping_pong(ME: gl.constexpr, cfg: gl.constexpr):
    """Let the first consumer start: the last one arrives at its barrier."""
    if cfg.HAS_PING_PONG and ME == cfg.CONSUMERS - 1:
        arrive_at_barrier(FIRST_BARRIER, PAIR)


@gluon.jit
def await_ping_pong(ME: gl.constexpr, cfg: gl.constexpr):
    """Wait until the consumer before this one has issued its products."""
    if cfg.HAS_PING_PONG:
        wait_at_barrier(FIRST_BARRIER + ME, PAIR)


@gluon.jit
def pass_ping_pong(ME: gl.constexpr, cfg: gl.constexpr):
    """Let the next consumer issue."""
    if cfg.HAS_PING_PONG:
        arrive_at_barrier(FIRST_BARRIER + (ME + 1) % cfg.CONSUMERS, PAIR)


@gluon.jit
def close_ping_pong(ME: gl.constexpr, cfg: gl.constexpr):
    """Wait for the last arrival, so that no barrier is left half full."""
    if cfg.HAS_PING_PONG and ME == 0:
        wait_at_barrier(FIRST_BARRIER, PAIR)
