"""The layouts that Hopper's instructions require, and the instructions that Gluon lacks or names
differently between Triton versions.

A consumer is one warpgroup (four warps) with 64 rows of the tile of queries. wgmma determines which
elements a thread holds: of an accumulator, a thread has two rows and, of every eight columns, two
neighbours; four threads share a row. An accumulator of scores, rounded to 16 bits, has the layout
of the left operand of the next product, so P stays in registers.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
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
def _barrier_assembly(instruction, number, threads):
    return f"barrier.cta.{instruction} {number}, {threads}; mov.u32 $0, 0;"


@gluon.jit
def wait_at_barrier(NUMBER: gl.constexpr, THREADS: gl.constexpr):
    """Wait until THREADS threads, these included, have arrived at a hardware barrier."""
    ASSEMBLY: gl.constexpr = _barrier_assembly("sync", NUMBER, THREADS)
    gl.inline_asm_elementwise(ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_at_barrier(NUMBER: gl.constexpr, THREADS: gl.constexpr):
    """Arrive at a hardware barrier without waiting."""
    ASSEMBLY: gl.constexpr = _barrier_assembly("arrive", NUMBER, THREADS)
    gl.inline_asm_elementwise(ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def show_written(NUMBER: gl.constexpr):
    """Make the stores of a consumer's four warps visible to its products and copies.

    Triton inserts no barrier between the stores of threads and a product that reads them.
    """
    fence_async_shared()
    wait_at_barrier(NUMBER, 128)


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
def _multiply_assembly(count, used):
    # A thread holds two rows: of every four neighbouring registers, two belong to each row.
    first, second = f"${2 * count}", f"${2 * count + 2}"
    products = "".join(
        f"mul.f32 ${n}, ${n}, {first if n % 4 < 2 else second}; " for n in range(used)
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
def multiply_unless_one(x, factor, COLUMNS: gl.constexpr):
    """The first COLUMNS of `x` times `factor`, one factor for each row of an accumulator. A warp
    whose factors are all one skips the multiplications.
    """
    COUNT: gl.constexpr = x.shape[1] // 2  # elements per thread
    ASSEMBLY: gl.constexpr = _multiply_assembly(COUNT, COLUMNS // 2)
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


# Products of a number of columns that is no power of two, which Gluon's tensors cannot have.
#
# A wgmma multiplies any multiple of 8 columns, but with a left operand in registers it seems to
# take no less than 32 cycles, the time of 64 columns. Products of 64 and of 32 columns then take as
# long as one of 128; one of 96 takes three quarters of that. Here a product changes only the first
# columns of an accumulator. The assembler gives no registers to the others.

# Tiles in shared memory that wgmma reads start at multiples of this.
ALIGNMENT = gl.constexpr(1024)


@gluon.constexpr_function
def _address_assembly(step, threads):
    return (
        "{ .reg .pred p; .reg .b32 at, end, place;"
        f" mov.u32 at, %tid.x; mul.lo.u32 at, at, {step}; mov.u32 end, %dynamic_smem_size;"
        " GO_ON: setp.lt.u32 p, at, end; mov.u32 place, global_smem; add.u32 place, place, at;"
        f" @p st.shared.b32 [place], place; add.u32 at, at, {step * threads};"
        " @p bra GO_ON; mov.b32 $0, 0; }"
    )


@gluon.constexpr_function
def _words(shape):
    return math.prod(shape) // 2


@gluon.jit
def address_of(tiles):
    """The address of 16-bit `tiles` in shared memory, for which Gluon has no function.

    The four warps of a program that begins write to each place where a tile can start which place
    it is, and then read what `tiles` start with. Nothing in shared memory may be in use yet.
    """
    ASSEMBLY: gl.constexpr = _address_assembly(ALIGNMENT, 32 * CONSUMER_WARPS)
    nothing = gl.full([1], 0, gl.int32, one_value(CONSUMER_WARPS))
    gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [nothing], dtype=gl.int32, is_pure=False, pack=1)
    sync_warps()
    WORDS: gl.constexpr = _words(tiles.shape)
    words = recast(tiles, gl.int32, [WORDS, 1], shared_value())
    address = gl.max(words.index(0).load(one_value(CONSUMER_WARPS)), 0)
    sync_warps()
    return address


@gluon.constexpr_function
def _descriptor(rows):
    """Of a tile of 128 columns that is read transposed: the distances of its halves and of groups
    of eight rows, in units of 16 bytes, and its swizzle of 128 bytes.
    """
    return (rows * 128 >> 4) << 16 | (8 * 128 >> 4) << 32 | 1 << 62


@gluon.constexpr_function
def _product_assembly(columns, held, rows, dtype):
    # Operands: the accumulator's registers, twice as they change, those of p, the address.
    kind = "bf16" if dtype == gl.bfloat16 else "f16"
    acc = ", ".join(f"${n}" for n in range(columns // 2))
    code = (
        "{ .reg .pred add; .reg .b32 low; .reg .b64 v; setp.eq.b32 add, 0, 0;"
        # All threads have the same address, which the assembler would not know otherwise.
        f" shfl.sync.idx.b32 low, ${2 * held + rows // 4}, 0, 31, 0xffffffff;"
        f" shr.u32 low, low, 4; cvt.u64.u32 v, low; or.b64 v, v, {_descriptor(rows)};"
        " wgmma.fence.sync.aligned;"
    )
    for first in range(2 * held, 2 * held + rows // 4, 4):
        left = ", ".join(f"${n}" for n in range(first, first + 4))
        code += (
            f" wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
            f" {{{acc}}}, {{{left}}}, v, add, 1, 1, 1; add.s64 v, v, {16 * 128 >> 4};"
        )
    return code + " wgmma.commit_group.sync.aligned; }"


@gluon.constexpr_function
def _product_constraints(held, rows):
    return ",".join(["=f"] * held + [str(n) for n in range(held)] + ["r"] * (rows // 4 + held))


@gluon.jit
def product_of_columns(p, address, acc, COLUMNS: gl.constexpr):
    """Start `acc` += `p` v for the first COLUMNS columns: (64, 128) += (64, 128) (128, 128).

    `p` has the layout of `acc`. The 16-bit tile v is at an address in shared memory, which is the
    same in all threads; its rows are 128 bytes apart in each half of 64 columns.
    """
    HELD: gl.constexpr = acc.shape[1] // 2  # elements per thread, of `acc` and of `p`
    ASSEMBLY: gl.constexpr = _product_assembly(COLUMNS, HELD, p.shape[1], p.dtype)
    CONSTRAINTS: gl.constexpr = _product_constraints(HELD, p.shape[1])
    address = gl.full(acc.shape, address, gl.int32, acc.type.layout)
    return gl.inline_asm_elementwise(
        ASSEMBLY, CONSTRAINTS, [acc, p, address], dtype=gl.float32, is_pure=False, pack=HELD
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
