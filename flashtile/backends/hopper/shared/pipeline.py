"""Layouts, instructions and ring buffers: what the roles of a program are built from.

The layouts are those that Hopper's instructions require, and the instructions those that Gluon
lacks or names differently between Triton versions.

A consumer is one warpgroup (four warps) with 64 rows of the tile of queries. wgmma determines which
elements a thread holds: of an accumulator, a thread has two rows and, of every eight columns, two
neighbours; four threads share a row. An accumulator of scores, rounded to 16 bits, has the layout
of the left operand of the next product, so P stays in registers.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language._semantic import GluonCallerContext
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate

# Triton 3.9 has all three under new names.
aggregate = getattr(gluon, "aggregate", _aggregate)
copy_to_shared = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_to_global = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# Triton uses the hardware barriers below this number.
FIRST_BARRIER = gl.constexpr(8)


# Layouts


CONSUMER_ROWS = gl.constexpr(64)
CONSUMER_WARPS = gl.constexpr(4)


@gluon.constexpr_function
def accumulator(columns, bits=16):
    """A float32 tile (64, columns) of one warpgroup, for products of operands with `bits` bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits])


@gluon.constexpr_function
def left_operand(columns, bits=16):
    """A left operand of a product that accumulates (64, columns)."""
    return gl.DotOperandLayout(0, accumulator(columns, bits), 32 // bits)


@gluon.constexpr_function
def row_values(columns):
    """One value for each row of an `accumulator`, (64,)."""
    return gl.SliceLayout(1, accumulator(columns))


@gluon.constexpr_function
def rows_of_heads(columns, warps):
    """Coalesced 16-bit rows: each thread has 16 bytes, and neighbouring threads are adjacent."""
    across = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def one_value(warps):
    """A tensor of one element, held by every thread."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def shared_rows(columns, bits=16, rank=4):
    """A tile (1, rows, 1, columns), or one of another rank, that TMA writes and wgmma reads."""
    return gl.NVMMASharedLayout(min(128, columns * bits // 8), element_bitwidth=bits, rank=rank)


@gluon.constexpr_function
def shared_value():
    """A tensor of one element in shared memory."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.jit
def empty_accumulator(COLUMNS: gl.constexpr, BITS: gl.constexpr = 16):
    """Zeros (64, COLUMNS), for a product to add to."""
    return gl.zeros([64, COLUMNS], gl.float32, layout=accumulator(COLUMNS, BITS))


# Instructions


@gluon.constexpr_function
def _barrier_assembly(instruction, threads):
    return f"barrier.cta.{instruction} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def wait_at_barrier(number, THREADS: gl.constexpr):
    """Wait until THREADS threads, these included, have arrived at a hardware barrier."""
    ASSEMBLY: gl.constexpr = _barrier_assembly("sync", THREADS)
    gl.inline_asm_elementwise(ASSEMBLY, "=r,n", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_at_barrier(number, THREADS: gl.constexpr):
    """Arrive at a hardware barrier without waiting."""
    ASSEMBLY: gl.constexpr = _barrier_assembly("arrive", THREADS)
    gl.inline_asm_elementwise(ASSEMBLY, "=r,n", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def show_written(number):
    """Make the stores of a consumer's four warps visible to its products and copies.

    Triton inserts no barrier between the stores of threads and a product that reads them.
    """
    fence_async_shared()
    wait_at_barrier(number, 128)


@gluon.jit
def arrive_alone(barrier):
    """Arrive at an mbarrier with one thread, without synchronising the other threads of its role.

    `mbarrier.arrive` would synchronise them first. Expecting zero bytes also arrives.
    """
    mbarrier.expect(barrier, 0)


@gluon.jit
def pin(x):
    """Keep the computation of `x` (64,) above this line, and waits for products below it.

    The assembler would otherwise move the waits up, so that nothing overlaps with the product. A
    branch on the value, which is always taken, prevents this.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .f32 t; add.f32 t, $2, $3; setp.neu.f32 p, t, 0f7F800000;"
        " @p bra GO_ON; nanosleep.u32 20; GO_ON: mov.b32 $0, 0; mov.b32 $1, 0; }",
        "=r,=r,f,f",
        [x],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def after_products(x, i):
    """The float32 number `x`, which the assembler knows only after it has issued the products
    above; `i` is not negative.

    The assembler would otherwise move exponentials between two products, and the second would start
    after them. As in `pin`, a branch is always taken; `x` is known only where its two paths meet.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.s32 p, $2, 0; mov.b32 $0, $1; @p bra GO_ON; nanosleep.u32 20;"
        " mov.b32 $0, 0; GO_ON: }",
        "=f,f,r",
        [x, i],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_cycles(i, COUNT: gl.constexpr):
    """Wait for COUNT cycles of the multiprocessor; `i` is any number, and is not read."""
    ASSEMBLY: gl.constexpr = _wait_assembly(COUNT)
    gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _wait_assembly(count):
    return (
        "{ .reg .pred p; .reg .u32 start, now; mov.u32 start, %clock; AGAIN: mov.u32 now, %clock;"
        f" sub.u32 now, now, start; setp.lt.u32 p, now, {count}; @p bra AGAIN; mov.b32 $0, 0; }}"
    )


@gluon.jit
def log2(x):
    """The hardware's base-2 logarithm, with an error of 2**-22; Triton's takes 30 instructions."""
    return gl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _multiply_assembly(count):
    # A thread holds two rows: of every four neighbouring registers, two belong to each row.
    first, second = f"${2 * count}", f"${2 * count + 2}"
    products = "".join(
        f"mul.f32 ${n}, ${n}, {first if n % 4 < 2 else second}; " for n in range(count)
    )
    return (
        "{ .reg .pred own, any; "
        f"setp.neu.f32 own, {first}, 0f3F800000; setp.neu.or.f32 own, {second}, 0f3F800000, own; "
        f"vote.sync.any.pred any, own, 0xffffffff; @!any bra SKIPPED; {products} SKIPPED: }}"
    )


@gluon.constexpr_function
def _multiply_constraints(count):
    return ",".join(["=f"] * count + [str(n) for n in range(count)] + ["f"] * count)


@gluon.jit
def multiply_unless_one(x, factor):
    """`x` times `factor`, one factor for each row of an accumulator. A warp whose factors are all
    one skips the multiplications.
    """
    COUNT: gl.constexpr = x.shape[1] // 2  # elements per thread
    ASSEMBLY: gl.constexpr = _multiply_assembly(COUNT)
    CONSTRAINTS: gl.constexpr = _multiply_constraints(COUNT)
    return gl.inline_asm_elementwise(
        ASSEMBLY, CONSTRAINTS, [x, factor], dtype=gl.float32, is_pure=False, pack=COUNT
    )


@gluon.constexpr_function
def _pair_assembly(dtype):
    kind = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return f"cvt.rn.{kind}.f32 $0, $2, $1;"


@gluon.jit
def round_to_pair(low, high, dtype: gl.constexpr):
    """Two float32 numbers in the halves of an int32, rounded to `dtype`."""
    ASSEMBLY: gl.constexpr = _pair_assembly(dtype)
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def halves(pairs, dtype: gl.constexpr):
    """The two numbers of `round_to_pair`."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [pairs],
        dtype=(gl.int16, gl.int16),
        is_pure=True,
        pack=1,
    )
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)


@builtin
def recast(tile, dtype, shape, layout, _semantic=None):
    """The same shared memory with another type, shape and layout; Gluon's name for it differs
    between Triton versions.
    """
    dtype, shape, layout = (_unwrap_if_constexpr(x) for x in (dtype, shape, layout))
    shape = [_unwrap_if_constexpr(size) for size in shape]
    return _semantic.memdesc_reinterpret(tile, dtype, shape, layout)


@builtin
def _reduce_add(tensor_desc, coord, src, _semantic=None):
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


# Triton 3.6 has the operation, but no function for it.
add_to_global = getattr(tma, "async_atomic_add", None) or _reduce_add


# Registers per thread of a consumer, by their number and the registers of the other roles. The
# first consumer gets what the others leave.
CONSUMER_REGISTERS = {(2, 24): 240, (2, 32): 240, (2, 40): 232, (3, 24): 160, (3, 32): 160}


@builtin
def run_roles(consumers, others, REGISTERS=24, _semantic=None, _generator=None):
    """Run roles, functions with their arguments: consumers, and others that have one warp and
    REGISTERS a thread.

    Triton parses a function anew for each number of warps, and gives the first role none; with one,
    what all consumers call is parsed once.
    """
    more, warps = len(consumers) - 1, _unwrap_if_constexpr(CONSUMER_WARPS)
    of_other = _unwrap_if_constexpr(REGISTERS)
    of_consumer = CONSUMER_REGISTERS[len(consumers), of_other]
    _generator.caller_context = GluonCallerContext(warps)
    gl.warp_specialize(
        [*consumers, *others],
        [warps] * more + [1] * len(others),
        [of_consumer] * more + [of_other] * len(others),
        _semantic=_semantic,
        _generator=_generator,
    )
    _generator.caller_context = None


# Make all warps of a role wait for each other; the compiler knows this barrier.
sync_warps = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def opaque_zero(i):
    """A zero whose value the compiler does not know, so that it does not hoist addresses that are
    computed with it out of a loop, where they would occupy 48 registers.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def opaque_zeros(COLUMNS: gl.constexpr):
    """An accumulator (64, COLUMNS) of zeros whose value the compiler does not know; it would
    otherwise peel the first product off the loop.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;",
        "=f,f",
        [empty_accumulator(COLUMNS)],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


# Results that are parts of sums


@gluon.jit
def store_float32(
    x, ptr, row, COLUMN: gl.constexpr, DIM: gl.constexpr, start, count, head, heads
):  # fmt: skip
    """Store `x` (64, columns), an accumulator, at `row` and COLUMN of a sequence of contiguous
    float32 (rows, heads, DIM), which has `count` rows from `start` on.

    It does not go through the tiles in shared memory, whose elements have 16 bits. Four threads
    write eight neighbours of a row, the 32 bytes of a sector.
    """
    LAYOUT: gl.constexpr = x.type.layout
    rows = row + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    dims = COLUMN + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    first = ((start + rows).to(gl.int64) * heads + head) * DIM
    if DIM % 8 == 0:
        first = gl.multiple_of(first, [1, 8])
    gl.store(ptr + first + dims, x, mask=(rows < count) & (dims < DIM))


# Ring buffers in shared memory, between the roles of a program.
#
# A slot holds a tile and, if the head dim is not a power of two, a second tile with its tail, the
# remaining columns. Each slot has two mbarriers: full and empty. Use `i` of a ring is in slot
# `i % SLOTS` and round `i // SLOTS`, and a wait passes the parity of its round. Producer and
# consumers count their uses themselves.


# TMA clips a box at the end of a dimension, and a packed sequence may end anywhere. So descriptors
# of packed rows (`launch.descriptor_of_sequences`) have two more dimensions, and row `row` of a
# sequence of `count` rows has the index ROWS_END - count + row, which is outside from row `count`
# on. The other two indices make up for it: addresses are sums of indices times strides modulo 2^64
# (`triton.tools.ragged_tma`).
ROWS_END = gl.constexpr(2**30)


class BoxRows(NamedTuple):
    """The rows of a box of one head: those of sequence `b` from `row` on."""

    b: Any
    start: Any  # first row of the sequence, if packed
    count: Any  # number of rows of the sequence
    row: Any
    head: Any


@gluon.jit
def box_at(rows, column, IS_PACKED: gl.constexpr):
    """The indices of the box of `BoxRows` from `column` on."""
    if IS_PACKED:
        stop = rows.start + rows.count
        indices = [ROWS_END, stop, ROWS_END - rows.count + rows.row, rows.head, column]
    else:
        indices = [rows.b, rows.row, rows.head, column]
    return indices


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
def open_ping_pong(me, cfg: gl.constexpr):
    """Let the first consumer start: the last one arrives at its barrier."""
    if cfg.HAS_PING_PONG:  # noqa: SIM102 -- known while compiling
        if me == cfg.CONSUMERS - 1:
            arrive_at_barrier(FIRST_BARRIER, PAIR)


@gluon.jit
def await_ping_pong(me, cfg: gl.constexpr):
    """Wait until the consumer before this one has issued its products."""
    if cfg.HAS_PING_PONG:
        wait_at_barrier(FIRST_BARRIER + me, PAIR)


@gluon.jit
def pass_ping_pong(me, cfg: gl.constexpr):
    """Let the next consumer issue."""
    if cfg.HAS_PING_PONG:
        arrive_at_barrier(FIRST_BARRIER + (me + 1) % cfg.CONSUMERS, PAIR)


@gluon.jit
def close_ping_pong(me, cfg: gl.constexpr):
    """Wait for the last arrival, so that no barrier is left half full."""
    if cfg.HAS_PING_PONG:  # noqa: SIM102 -- known while compiling
        if me == 0:
            wait_at_barrier(FIRST_BARRIER, PAIR)
