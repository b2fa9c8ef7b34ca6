"""Lesson 8: the forward pass for Hopper, with three kinds of overlap that can be switched off.

Q, K and V have the shape (heads, tokens, 128) and 16 bits; there is no mask. The production kernels
lend the few instructions that Gluon lacks or that Triton's releases name differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashtile.backends.hopper.shared.pipeline import (
    FIRST_BARRIER,
    arrive_at_barrier,
    copy_to_global,
    copy_to_shared,
    pin,
    wait_at_barrier,
)
from flashtile.gpu.launch import Launch

SIZE = gl.constexpr(128)  # queries of a program, keys of a block, and the head dim
STAGES = gl.constexpr(2)  # blocks of K and of V in shared memory
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, element_bitwidth=16, rank=2))

# What a role writes down for each block, if the kernel is traced: the clock, after each of these.
PRODUCER_EVENTS = ("begin", "K slot empty", "K copy issued", "V slot empty", "V copy issued")
CONSUMER_EVENTS = ("begin", "K full", "turn", "products issued", "S", "softmax", "O")
ROLES = gl.constexpr(3)
EVENTS = gl.constexpr(len(CONSUMER_EVENTS))


@dataclass(frozen=True)
class Schedule:
    """What overlaps with what: constants of the compiler."""

    HAS_ROLES: bool = True  # one warp copies, two warpgroups compute (warp specialisation)
    HAS_PING_PONG: bool = True  # the two warpgroups take turns at the tensor cores
    HAS_OVERLAP: bool = True  # a warpgroup computes exponentials during its own product
    IS_TRACED: bool = False

    def __post_init__(self) -> None:
        if self.HAS_PING_PONG and not self.HAS_ROLES:
            raise ValueError("HAS_PING_PONG: got True, want False without HAS_ROLES")


class Work(NamedTuple):
    """The tensors, and what a program does with them."""

    q: Any  # tensor descriptors
    k: Any
    v: Any
    o: Any
    trace_ptr: Any  # int32 (ROLES, blocks, EVENTS), or None
    row: Any  # of the first query
    key: Any  # the row of the first key
    blocks: Any
    scale_log2: Any


class Ring(NamedTuple):
    """Slots for tiles in shared memory: tile `i` is in slot `i % SLOTS`."""

    tiles: Any  # (SLOTS, rows, SIZE)
    full: Any  # (SLOTS, 1) mbarriers: the copy has arrived
    empty: Any  # (SLOTS, 1) mbarriers: all readers have released the slot; or full, see `make_ring`


@gluon.jit
def make_ring(dtype: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr, READERS: gl.constexpr):
    """A ring of empty slots. With READERS = 0 each slot gets one tile, and nobody releases it."""
    tiles = gl.allocate_shared_memory(dtype, [SLOTS, ROWS, SIZE], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
    empty = full
    if READERS > 0:
        empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(SLOTS):
            mbarrier.init(empty.index(slot), count=READERS)
    return Ring(tiles, full, empty)


@gluon.jit
def await_empty(ring, i):
    """Wait until the slot of tile `i` is empty."""
    mbarrier.wait(ring.empty.index(i % STAGES), ((i // STAGES) & 1) ^ 1)


@gluon.jit
def issue_copy(x, row, ring, i):
    """Let TMA copy the rows of `x` from `row` into the slot of tile `i`."""
    full = ring.full.index(i % STAGES)
    mbarrier.expect(full, x.block_type.nbytes)
    copy_to_shared(x, [row, 0], full, ring.tiles.index(i % STAGES))


@gluon.jit
def await_full(ring, i):
    """Wait until tile `i` has arrived."""
    mbarrier.wait(ring.full.index(i % STAGES), (i // STAGES) & 1)


@gluon.jit
def release(x, work, ring, i, cfg: gl.constexpr):
    """This reader no longer needs tile `i` of `x`. Without roles, it loads the next tile itself."""
    mbarrier.arrive(ring.empty.index(i % STAGES), count=1)
    if not cfg.HAS_ROLES:
        load_if_any(x, work, ring, i + STAGES)


@gluon.jit
def load_if_any(x, work, ring, i):
    """Load tile `i` of `x`, unless the keys end before it."""
    if i < work.blocks:
        await_empty(ring, i)
        issue_copy(x, work.key + i * SIZE, ring, i)


@gluon.jit
def producer(work, rings, cfg: gl.constexpr):
    """One warp: start all copies, each as soon as its slot is empty."""
    q, k, v = rings
    issue_copy(work.q, work.row, q, 0)
    issue_copy(work.q, work.row + SIZE // 2, q, 1)
    for i in range(work.blocks):
        record(work, 0, i, 0, cfg)
        await_empty(k, i)
        record(work, 0, i, 1, cfg)
        issue_copy(work.k, work.key + i * SIZE, k, i)
        record(work, 0, i, 2, cfg)
        await_empty(v, i)
        record(work, 0, i, 3, cfg)
        issue_copy(work.v, work.key + i * SIZE, v, i)
        record(work, 0, i, 4, cfg)


@gluon.jit
def consumer(ME: gl.constexpr, work, rings, WARPS: gl.constexpr, cfg: gl.constexpr):
    """One warpgroup (or two, if there are no roles): attention of 16 * WARPS queries."""
    q_ring, k, v = rings
    LAYOUT: gl.constexpr = accumulator(WARPS)
    q = q_ring.tiles.index(ME)
    row_max = gl.full([16 * WARPS], -float("inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    row_sum = gl.zeros([16 * WARPS], gl.float32, gl.SliceLayout(1, LAYOUT))
    o = gl.zeros([16 * WARPS, SIZE], gl.float32, LAYOUT)
    # The first scores.
    await_full(q_ring, ME)
    await_full(k, 0)
    s = warpgroup_mma_wait(0, deps=[issue_scores(q, k, 0, WARPS)])
    release(work.k, work, k, 0, cfg)
    p, row_max, row_sum, rescale = softmax(s, row_max, row_sum, work.scale_log2)
    if cfg.HAS_PING_PONG and ME == 1:
        arrive_at_barrier(FIRST_BARRIER, 256)  # the first turn is consumer 0's
    # The scores of block i, and the output of block i - 1.
    for i in range(1, work.blocks):
        record(work, 1 + ME, i, 0, cfg)
        await_full(k, i)
        record(work, 1 + ME, i, 1, cfg)
        if cfg.HAS_PING_PONG:
            wait_at_barrier(FIRST_BARRIER + ME, 256)
        record(work, 1 + ME, i, 2, cfg)
        s = issue_scores(q, k, i, WARPS)
        await_full(v, i - 1)
        o = issue_output(p, v, i - 1, o * rescale[:, None], WARPS)
        if cfg.HAS_PING_PONG:
            arrive_at_barrier(FIRST_BARRIER + 1 - ME, 256)  # the other consumer's turn
        record(work, 1 + ME, i, 3, cfg)
        if cfg.HAS_OVERLAP:
            s = warpgroup_mma_wait(1, deps=[s])  # the younger product may go on
        else:
            s, o = warpgroup_mma_wait(0, deps=[s, o])
        release(work.k, work, k, i, cfg)
        record(work, 1 + ME, i, 4, cfg)
        p, row_max, row_sum, rescale = softmax(s, row_max, row_sum, work.scale_log2)
        pin(row_sum)  # or the assembler moves the next wait up
        record(work, 1 + ME, i, 5, cfg)
        if cfg.HAS_OVERLAP:
            o = warpgroup_mma_wait(0, deps=[o])
        release(work.v, work, v, i - 1, cfg)
        record(work, 1 + ME, i, 6, cfg)
    if cfg.HAS_PING_PONG and ME == 0:
        wait_at_barrier(FIRST_BARRIER, 256)  # no arrival is left over
    # The output of the last block.
    await_full(v, work.blocks - 1)
    o = issue_output(p, v, work.blocks - 1, o * rescale[:, None], WARPS)
    o = warpgroup_mma_wait(0, deps=[o])
    q.store((o / row_sum[:, None]).to(q.dtype))  # where the queries were
    fence_async_shared()
    copy_to_global(work.o, [work.row + 64 * ME, 0], q)
    tma.store_wait(0)


@gluon.constexpr_function
def accumulator(warps):
    """The registers in which wgmma leaves a float32 tile (16 * warps, SIZE)."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, SIZE, 16])


@gluon.jit
def issue_scores(q, k, i, WARPS: gl.constexpr):
    """Start S = Q K^T of block `i`: both are read from shared memory."""
    zeros = gl.zeros([16 * WARPS, SIZE], gl.float32, accumulator(WARPS))
    k_tile = k.tiles.index(i % STAGES)
    return warpgroup_mma(q, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def issue_output(p, v, i, o, WARPS: gl.constexpr):
    """Start O += P V of block `i`: P is read from the registers that hold it."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, accumulator(WARPS), 2)
    p = gl.convert_layout(p.to(v.tiles.dtype), LEFT, assert_trivial=True)
    return warpgroup_mma(p, v.tiles.index(i % STAGES), o, is_async=True)


@gluon.jit
def softmax(s, row_max, row_sum, scale_log2):
    """A step of lesson 2: the weights, the new maximum and sum, and the factor of the output."""
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - new_max[:, None])
    rescale = gl.exp2(row_max - new_max)
    return p, new_max, row_sum * rescale + gl.sum(p, 1), rescale


@gluon.jit
def record(work, ROLE: gl.constexpr, i, EVENT: gl.constexpr, cfg: gl.constexpr):
    """Write down the clock of the multiprocessor, which all its warps share."""
    if cfg.IS_TRACED:
        cycles = gl.inline_asm_elementwise(
            "mov.u32 $0, %clock;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.store(work.trace_ptr + (ROLE * work.blocks + i) * EVENTS + EVENT, cycles)


@gluon.jit
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, trace_ptr, blocks, scale_log2, cfg: gl.constexpr
):
    """Attention of SIZE queries of a head."""
    program = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    row, key = program * SIZE, gl.program_id(1) * blocks * SIZE
    if cfg.IS_TRACED:
        trace_ptr += program * ROLES * blocks * EVENTS
    work = Work(q_desc, k_desc, v_desc, o_desc, trace_ptr, row, key, blocks, scale_log2)
    CONSUMERS: gl.constexpr = 2 if cfg.HAS_ROLES else 1
    dtype: gl.constexpr = q_desc.dtype
    rings = (
        make_ring(dtype, CONSUMERS, SIZE // CONSUMERS, 0),
        make_ring(dtype, STAGES, SIZE, CONSUMERS),
        make_ring(dtype, STAGES, SIZE, CONSUMERS),
    )
    fence_async_shared()
    if cfg.HAS_ROLES:
        gl.warp_specialize(
            [
                (consumer, (0, work, rings, 4, cfg)),
                (consumer, (1, work, rings, 4, cfg)),
                (producer, (work, rings, cfg)),
            ],
            [4, 1],  # warps of the second and the third role; the launch has those of the first
            [240, 24],  # their registers per thread
        )
    else:
        q, k, v = rings
        issue_copy(q_desc, row, q, 0)
        for i in gl.static_range(STAGES):
            load_if_any(k_desc, work, k, i)
            load_if_any(v_desc, work, v, i)
        consumer(0, work, rings, 8, cfg)


def attention(
    Q: Tensor, K: Tensor, V: Tensor, schedule: Schedule | None = None, trace: Tensor | None = None
) -> Tensor:
    """O of the shape and dtype of Q, on a Hopper GPU.

    Args:
        Q, K, V: (heads, tokens, 128), float16 or bfloat16; tokens in multiples of 128.
        schedule: all overlaps by default.
        trace: int32 (programs, ROLES, blocks, EVENTS), filled if the schedule is traced.

    Raises:
        ValueError: another shape or dtype.
    """
    O = torch.empty_like(Q, memory_format=torch.contiguous_format)
    describe(Q, K, V, O, schedule or Schedule(), trace).run()
    return O


def describe(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, schedule: Schedule, trace: Tensor | None
) -> Launch:
    """The launch of `attention`."""
    heads, size = Q.shape[0], SIZE.value
    for name, x, tokens in (("Q", Q, Q.shape[1]), ("K", K, K.shape[1]), ("V", V, K.shape[1])):
        if x.shape != (heads, tokens, size) or tokens % size or tokens == 0:
            wanted = f"({heads}, a multiple of {size}, {size}), and K as V"
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want {wanted}")
        if x.dtype not in (torch.float16, torch.bfloat16) or x.dtype != Q.dtype:
            raise ValueError(f"{name}: got {x.dtype}, want float16 or bfloat16, as Q")
    rows, warps = (size // 2, 4) if schedule.HAS_ROLES else (size, 8)
    arguments = {
        "q_desc": descriptor(Q, rows),
        "k_desc": descriptor(K, size),
        "v_desc": descriptor(V, size),
        "o_desc": descriptor(O, rows),
        "trace_ptr": trace,
        "blocks": K.shape[1] // size,
        "scale_log2": log2(e) / sqrt(size),
        "cfg": schedule,
    }
    return Launch(forward_kernel, (Q.shape[1] // size, heads), arguments, warps)


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """What TMA knows of `x`, (heads * tokens, 128), which it copies in boxes of `rows` rows."""
    x = x.contiguous().view(-1, x.shape[-1])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, x.shape[1]], SHARED.value)
