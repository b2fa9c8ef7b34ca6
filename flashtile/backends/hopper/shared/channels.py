"""Ring buffers in shared memory, between the producer and the consumers.

A slot holds a tile and, where the head dim is no power of two, a second tile with the rest of its
columns. It is full or empty; each has an mbarrier. Use number `i` of a ring is in slot
`i % SLOTS`, in round `i // SLOTS`, and a wait names the parity of the round that it waits for. Both
sides count their uses, so nothing is sent along.
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
    """A tensor of head rows as TMA sees it, in tiles of its first columns and, where
    the head dim is no power of two, of the rest of them."""

    tiles: Any
    tails: Any


@aggregate
class Channel:
    """A ring of tiles that TMA fills."""

    tiles: gl.shared_memory_descriptor  # (SLOTS, ...)
    tails: gl.shared_memory_descriptor  # the same as `tiles` where there is no rest
    full: gl.shared_memory_descriptor  # (SLOTS, 1) mbarriers
    empty: gl.shared_memory_descriptor
    SLOTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, tails, full, empty, SLOTS):
        self.tiles = tiles
        self.tails = tails
        self.full = full
        self.empty = empty
        self.SLOTS = gl.constexpr(SLOTS)

    @gluon.jit
    def acquire_empty(self, i, BYTES: gl.constexpr):
        """Wait until slot `i` may be overwritten, and announce BYTES to come; its barrier."""
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
        """The rest of its columns."""
        return self.tails.index(i % self.SLOTS)

    @gluon.jit
    def release(self, i):
        """The threads of this consumer have read slot `i`; they wait for each other first."""
        mbarrier.arrive(self.empty.index(i % self.SLOTS), count=1)

    @gluon.jit
    def release_operand(self, i):
        """The products of this consumer that read slot `i` are complete.

        One thread has waited for them, and a product is complete for the warpgroup or not at all:
        it needs operands of all four warps. So no warp waits for another here.
        """
        arrive_alone(self.empty.index(i % self.SLOTS))


@gluon.jit
def make_channel(tiles, tails, SLOTS: gl.constexpr, RELEASES: gl.constexpr):
    """The ring over `tiles` and `tails`; a slot is empty once RELEASES consumers released it."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=RELEASES)
    return Channel(tiles, tails, full, empty, SLOTS)


@gluon.jit
def put(queue, i, numbers):
    """The producer's one warp hands the consumers a tuple of numbers, use `i` of the ring."""
    COUNT: gl.constexpr = len(numbers)
    slot = i % queue.SLOTS
    mbarrier.wait(queue.empty.index(slot), ((i // queue.SLOTS) & 1) ^ 1)
    for n in gl.static_range(COUNT):
        queue.tiles.index(slot * COUNT + n).store(gl.full([1], numbers[n], gl.int32, one_value(1)))
    mbarrier.arrive(queue.full.index(slot), count=1)


@gluon.jit
def number_of(queue, i, N: gl.constexpr, WARPS: gl.constexpr):
    """Number N of use `i` of the ring, once that is full."""
    COUNT: gl.constexpr = queue.tiles.shape[0] // queue.SLOTS
    return gl.max(queue.tiles.index(i % queue.SLOTS * COUNT + N).load(one_value(WARPS)), 0)


@gluon.jit
def make_queue(SLOTS: gl.constexpr, COUNT: gl.constexpr, RELEASES: gl.constexpr):
    """A ring of COUNT numbers each."""
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS * COUNT, 1], shared_value())
    return make_channel(numbers, numbers, SLOTS, RELEASES)


# Consumers take turns at the tensor cores (ping-pong, FlashAttention-3, section 3.1).
#
# One issues its two products, then the next one does, while the first takes its exponentials. The
# order is a ring of hardware barriers, one for each consumer: it waits at its own and comes to that
# of the next. Every consumer has one turn for each block of a tile but the first, whether it sees
# the block or lets it pass, so the rings stay in step.
#


# Threads of two consumers: the one that waits, and the one before it.
PAIR = gl.constexpr(256)


@gluon.jit
def open_ping_pong(ME: gl.constexpr, cfg: gl.constexpr):
    """The first consumer starts: the last one gives it the turn."""
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
    """Take the turn that is left over, so that no barrier is left half full."""
    if cfg.HAS_PING_PONG and ME == 0:
        wait_at_barrier(FIRST_BARRIER, PAIR)
