"""The backward kernel: shared memory, roles and the producer.

FlashAttention-2's algorithm 2 (Dao 2023) with the roles of FlashAttention-3: a program owns a tile
of keys, or a part of its steps, so that dK and dV stay in registers, summed over the query heads of
a group; dQ is added to memory. The producer is in this file, the consumers are in `consumer.py`,
and the writers in `dq.py`.

With cfg.IS_PERSISTENT a program processes one tile after the other. The producer takes the next
tile and sends it to the other roles while the consumers process this one, and its Q, dO, V and K
are loaded as slots become free; dK and dV leave through the ring of dS, which only consumers use.

The barriers. Use `i` of a ring is in slot `i % SLOTS` and has the parity of its round,
`i // SLOTS`: a wait for full passes it, a wait for empty the other one. "Step" counts the steps of
all tiles of a program, and "step + 1" one more for each tile: the first use of a tile belongs to no
step.

| barrier | who arrives | who waits | use |
|---|---|---|---|
| work full | producer, if persistent | consumers, writer | tiles so far |
| work empty | these, when they are done with the tile | producer | as above |
| k, v full | TMA | both consumers | tiles so far |
| k, v empty | both, after the last dQ and dP, if persistent | producer | as above |
| q full | TMA: Q and its log-sum-exp | both consumers | step |
| q empty | both, after S^T and dK | producer | step |
| dout full | TMA: dO and its delta | both consumers | step |
| dout empty | both, after dP^T and dV | producer | step |
| FIRST_BARRIER + 1 + c | all warps of consumer c | the same: rows are cleared | |
| up to 128 columns: | | | |
| ds full | both consumers: each stores dS^T of its keys | both, before dQ | step + 1 |
| ds empty | both, after dQ; after a last step, when dK and dV left | both, before dS^T | step + 1 |
| staging full | both: each stores its piece of dQ | the writer of the step | step + 1 |
| staging empty | the writer, after the addition has read it | both consumers | step + 1 |
| FIRST_BARRIER | both, after the last dQ: dK and dV take slots of dS, or Q and dO | both | tile |
| above: | | | |
| p full | value consumer; dS^T of the last step was read | key consumer | step |
| ds full | key consumer; P of the step was read | value consumer | step |
| staging full, one for a writer | a consumer: one of its parts of dQ | this writer | its parts |
| staging empty | the writer of the step | the consumer | parts so far |
| above, 128 keys: | | | |
| p full, one for each half | value consumer; dS^T of the last step was read | key consumer | step |
| ds full | key consumer; P of the step was read | value consumer | step |
| FIRST_BARRIER | both, after the last products: dK and dV take slots of Q and dO | both | once |

The kernels before and after this one are in `dq.py`. The first and the last, which adds parts, are
ordinary launches: each starts after everything before it. This kernel and the one that rounds dQ
start while the previous kernel ends (programmatic dependent launch) and wait before they use what
it writes:

- This kernel loads only K and V before the wait. The producer waits before it loads the statistics,
  and without them there is no dQ, so the consumers and the writers add nothing to the workspace
  before it is clear. Ordered programs and those of packed batches also wait before they take a
  number from the counter or a tile from the list, and a persistent program's producer at once.
- The lists of a block mask are older than the first kernel, so they need no wait.
- The kernel that rounds dQ waits before anything else.

A wait ends after all programs of the previous kernel, but it does not cover the kernels before that
one. Therefore every program waits, even without work: the end of a kernel then implies the end of
all earlier kernels, for the next kernel and for all later launches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ....gpu.intrinsics import let_next_kernel_start, wait_for_earlier_kernels
from ..shared.pipeline import (
    BoxRows,
    Channel,
    Described,
    box_at,
    copy_to_shared,
    make_channel,
    make_queue,
    run_roles,
    shared_rows,
)
from ..shared.schedule import NUMBERS, Mask, next_number
from ..shared.softmax import Dropout, Score
from .consumer import (
    consumer,
    is_wide,
    key_consumer,
    make_halves,
    make_pieces,
    value_consumer,
    wide_key_consumer,
    wide_value_consumer,
)
from .dq import make_split_staging, make_staging, writer
from .schedule import (
    KEY_WORK_NUMBERS,
    block_at,
    key_work,
    listed_blocks,
    listed_tile,
    own_heads,
    own_steps,
    put_key_work,
    put_no_work,
    visited_block,
)


class Channels(NamedTuple):
    """Everything in shared memory."""

    q: Any
    dout: Any
    lse: Any  # of the rows in the slots of q: (slots, 1, BLOCK_M)
    delta: Any  # -delta of the rows in the slots of dout
    k: Any  # one tile
    v: Any  # one tile
    p: Any  # P^T, if it goes through shared memory
    ds: Any  # dS^T (slots, BLOCK_N, BLOCK_M)
    staging: Any  # dQ on its way to memory: see `make_staging` and `make_split_staging`
    work: Any  # the tiles of a persistent program


class Inputs(NamedTuple):
    """Descriptors of the tensors that TMA reads."""

    q: Any  # Described, as are k, v and dout
    k: Any
    v: Any
    dout: Any
    lse: Any
    delta: Any


class Outputs(NamedTuple):
    """The destinations of the results, which TMA or the threads write."""

    dk: Any  # Described
    dv: Any  # Described
    workspace: Any  # a pointer if the consumers add from their registers, else a descriptor
    workspace_tail: Any  # a descriptor in boxes of the columns beyond whole pieces, or None
    plain: Any  # KeyGradients
    semaphores: Any


class KeyGradients(NamedTuple):
    """Pointers to dk and dv, for sums in float32; with cfg.IS_PARTED, to the sums of the parts, see
    `dq.store_part`.
    """

    dk: Any
    dv: Any


class KeySizes(NamedTuple):
    """Bounds of all sequences, and the order of the tiles of keys."""

    B: Any
    M: Any
    N: Any
    total_q: Any
    total_k: Any
    heads: Any  # number of key heads
    group: Any
    swizzle: Any
    reciprocals: Any  # OrderReciprocals, or PhaseReciprocals with cfg.HAS_PHASES
    blocks: Any  # number of blocks of the workspace per head
    parts: Any  # programs that share a tile; None without cfg.IS_PARTED
    tiles: Any  # number of tiles of all heads, for persistent programs


@gluon.jit
def make_tiles(
    dtype: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr, RELEASES: gl.constexpr,
    COLUMNS: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """A ring of ROWS rows of Q or dO, or of K or V."""
    shape: gl.constexpr = [SLOTS, 1, ROWS, 1, COLUMNS]
    tiles = gl.allocate_shared_memory(dtype, shape, shared_rows(COLUMNS))
    tails = tiles
    if TAIL > 0:
        tail_shape: gl.constexpr = [SLOTS, 1, ROWS, 1, TAIL]
        tails = gl.allocate_shared_memory(dtype, tail_shape, shared_rows(TAIL))
    return make_channel(tiles, tails, SLOTS, RELEASES)


@gluon.jit
def make_statistics(desc, SLOTS: gl.constexpr, cfg: gl.constexpr):
    """One number for each row in a slot."""
    return gl.allocate_shared_memory(gl.float32, [SLOTS, 1, cfg.BLOCK_M], desc.layout)


@gluon.jit
def make_exchange(tiles, SLOTS: gl.constexpr):
    """A ring of tiles; each consumer writes one half of a tile and reads both."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=2)
        mbarrier.init(empty.index(slot), count=2)
    return Channel(tiles, tiles, full, empty, SLOTS)


@gluon.jit
def make_handover(tiles):
    """One tile that a consumer passes to the other, which `ds` and `p` answer for each other: dS of
    a step says that P of the step was read, and P of the next step that dS was.

    So nothing waits for an empty tile, and there is no barrier for that: Triton would give the
    memory of a barrier that no role uses to other tensors, and when the GPU switched to another
    process, these tensors changed there (`docs/log/hopper.md`). PTX requires `mbarrier.inval`.
    """
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    return Channel(tiles, tiles, full, full, 1)


@gluon.jit
def make_channels(inputs, workspace, cfg: gl.constexpr):
    """Allocate the rings and set up their barriers."""
    dtype: gl.constexpr = inputs.q.tiles.dtype
    SLOTS: gl.constexpr = 1 if cfg.IS_SPLIT else 2
    SCORES: gl.constexpr = [SLOTS, cfg.BLOCK_N, cfg.BLOCK_M]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, element_bitwidth=16, rank=2)
    OF_KEYS: gl.constexpr = 2 if cfg.IS_PERSISTENT else 1  # otherwise they are never released
    ds = gl.allocate_shared_memory(dtype, SCORES, LAYOUT)
    if is_wide(cfg):
        p = make_halves(gl.allocate_shared_memory(dtype, SCORES, LAYOUT))
        ds = make_handover(ds)
        staging = make_pieces(workspace)
    elif cfg.IS_SPLIT:
        p = gl.allocate_shared_memory(dtype, SCORES, LAYOUT)
        p, ds = make_handover(p), make_handover(ds)
        staging = make_split_staging(workspace, cfg)
    else:
        ds = make_exchange(ds, 2)
        p = ds
        staging = make_staging(workspace, cfg)
    channels = Channels(
        make_tiles(dtype, cfg.Q_STAGES, cfg.BLOCK_M, 2, cfg.BLOCK_D, cfg.TAIL_D),
        make_tiles(dtype, cfg.DO_STAGES, cfg.BLOCK_M, 2, cfg.BLOCK_DV, cfg.TAIL_DV),
        make_statistics(inputs.lse, cfg.Q_STAGES, cfg),
        make_statistics(inputs.delta, cfg.DO_STAGES, cfg),
        make_tiles(dtype, 1, cfg.BLOCK_N, OF_KEYS, cfg.BLOCK_D, cfg.TAIL_D),
        make_tiles(dtype, 1, cfg.BLOCK_N, OF_KEYS, cfg.BLOCK_DV, cfg.TAIL_DV),
        p,
        ds,
        staging,
        make_queue(2, KEY_WORK_NUMBERS, 3) if cfg.IS_PERSISTENT else ds,
    )
    fence_async_shared()
    return channels


# The producer


@gluon.jit
def producer(inputs, channels, tile, order, sizes, at, mask, cfg: gl.constexpr):
    """Load the keys and values of every tile once, and every block of queries that sees them and is
    this program's, one head of the group after the other.

    Only K and V may be loaded before the wait for the earlier kernels.
    """
    if cfg.IS_PERSISTENT:
        wait_for_earlier_kernels()
        load_all(inputs, channels, order, sizes, at, mask, cfg)
    else:
        work = key_work(tile, sizes, at, mask, cfg)
        if work.end > work.begin:
            load_keys(inputs.k, channels.k, 0, work, cfg)
            load_keys(inputs.v, channels.v, 0, work, cfg)
        wait_for_earlier_kernels()
        if work.end > work.begin:
            load_queries(inputs, channels, 0, work.n * 0, work, sizes, mask, cfg)


@gluon.jit
def load_all(inputs, channels, order, sizes, at, mask, cfg: gl.constexpr):
    """The tiles of a persistent program, each of which it takes while the consumers process the
    previous one. Tiles that no query sees are left out.
    """
    count = 0  # tiles so far
    i = 0  # blocks so far
    number = gl.program_id(0)
    while number < sizes.tiles:
        work = key_work(listed_tile(number, order, sizes, cfg), sizes, at, mask, cfg)
        if work.end > work.begin:
            put_key_work(channels.work, count, work)
            i = load_queries(inputs, channels, count, i, work, sizes, mask, cfg)
            count += 1
        number = next_number(order.counter)
    put_no_work(channels.work, count)


@gluon.jit
def load_keys(x, channel, count, work, cfg: gl.constexpr):
    """Load K or V of tile `count`."""
    rows = BoxRows(work.b, work.start_k, work.N, work.n0, work.kv_head)
    load_tile(x, channel, count, rows, 0, cfg)


@gluon.jit
def load_queries(inputs, channels, count, i, work, sizes, mask, cfg: gl.constexpr):
    """Load all blocks of queries of tile `count`, after `i` blocks; return the number of blocks so
    far. A persistent program loads the first block before the keys, whose slots are free later.
    """
    begin = i
    first_head, stop_head = own_heads(work, sizes, cfg)
    for g in range(first_head, stop_head):
        h = work.kv_head * sizes.group + g
        listed = listed_blocks(g, work.end - work.begin, work, sizes, mask, cfg)
        first, stop = own_steps(g, listed.count, work, cfg)
        for j in range(first, stop):
            block = block_at(visited_block(j, listed, work, cfg), listed.entries, cfg)
            rows = BoxRows(work.b, work.start_q, work.M, block * cfg.BLOCK_M, h)
            index = h * sizes.blocks + work.first_block + block
            BYTES: gl.constexpr = inputs.lse.block_type.nbytes
            full = load_tile(inputs.q, channels.q, i, rows, BYTES, cfg)
            slot = i % cfg.Q_STAGES
            copy_to_shared(inputs.lse, [index, 0], full, channels.lse.index(slot))
            full = load_tile(inputs.dout, channels.dout, i, rows, BYTES, cfg)
            slot = i % cfg.DO_STAGES
            copy_to_shared(inputs.delta, [index, 0], full, channels.delta.index(slot))
            if cfg.IS_PERSISTENT:  # noqa: SIM102 -- known while compiling
                if i == begin:  # V is released before K
                    load_keys(inputs.v, channels.v, count, work, cfg)
                    load_keys(inputs.k, channels.k, count, work, cfg)
            i += 1
    return i


@gluon.jit
def load_tile(x, channel, i, rows, MORE: gl.constexpr, cfg: gl.constexpr):
    """Start the copy of `BoxRows` into slot `i`; those past the end of the sequence are zero.
    Return the slot's full barrier, which also waits for MORE bytes.
    """
    COLUMNS: gl.constexpr = channel.tiles.shape[4]
    BYTES: gl.constexpr = x.tiles.block_type.nbytes * (COLUMNS + channel.TAIL) // COLUMNS
    full = channel.acquire_empty(i, BYTES + MORE)
    tile = channel.tile(i).reshape(x.tiles.block_shape)
    copy_to_shared(x.tiles, box_at(rows, 0, cfg.IS_PACKED), full, tile)
    if channel.TAIL > 0:
        tail = channel.tail(i).reshape(x.tails.block_shape)
        copy_to_shared(x.tails, box_at(rows, COLUMNS, cfg.IS_PACKED), full, tail)
    return full


@gluon.jit(do_not_specialize=[*NUMBERS, "blocks", "parts"])
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, q_tail_desc, k_tail_desc, v_tail_desc,
    dout_tail_desc, dk_tail_desc, dv_tail_desc, lse_desc, delta_desc, workspace,
    workspace_tail_desc, plain, semaphores_ptr, order, at, pointers, B, M, N, total_q, total_k,
    heads, group, swizzle, reciprocals, blocks, parts, tiles, left, right, chunk, lists,
    alibi_batch, scale, softcap, first_kept,
    cfg: gl.constexpr,
):  # fmt: skip
    """dK, dV and the sum for dQ. Each program has one tile of keys, a part of its steps, or several
    tiles.
    """
    sizes = KeySizes(
        B, M, N, total_q, total_k, heads, group, swizzle, reciprocals, blocks, parts, tiles
    )  # fmt: skip
    mask = Mask(left, right, chunk, lists, at.q_runs, at.k_runs)
    dropout = Dropout(pointers.rng_state, first_kept)
    score = Score(
        scale, softcap, pointers.alibi_slopes, alibi_batch, pointers.sink, dropout,
        pointers.captured, pointers.captured_integers,
    )  # fmt: skip
    q, k = Described(q_desc, q_tail_desc), Described(k_desc, k_tail_desc)
    v, dout = Described(v_desc, v_tail_desc), Described(dout_desc, dout_tail_desc)
    dk, dv = Described(dk_desc, dk_tail_desc), Described(dv_desc, dv_tail_desc)
    inputs = Inputs(q, k, v, dout, lse_desc, delta_desc)
    outputs = Outputs(dk, dv, workspace, workspace_tail_desc, plain, semaphores_ptr)
    let_next_kernel_start()
    if cfg.IS_ORDERED or (cfg.IS_PACKED and not cfg.IS_PERSISTENT):
        # The earlier kernel writes the counter and the list.
        wait_for_earlier_kernels()
    if cfg.IS_ORDERED:  # see `dq.acquire_semaphore`
        tile = gl.atomic_add(order.counter, 1, sem="relaxed")  # it orders no other memory access
    else:
        tile = gl.program_id(0)
    if not cfg.IS_PERSISTENT:
        tile = listed_tile(tile, order, sizes, cfg)
    channels = make_channels(inputs, workspace, cfg)
    WRITERS: gl.constexpr = 0 if cfg.IS_SPLIT and not cfg.IS_ORDERED else cfg.WRITERS
    run_roles(
        [
            (wide_value_consumer, (outputs, channels, tile, sizes, at, mask, score, cfg)),
            (wide_key_consumer, (outputs, channels, tile, sizes, at, mask, score, cfg)),
        ]
        if is_wide(cfg)
        else [
            (value_consumer, (outputs, channels, tile, sizes, at, mask, score, cfg)),
            (key_consumer, (outputs, channels, tile, sizes, at, mask, score, cfg)),
        ]
        if cfg.IS_SPLIT
        else [
            (consumer, (0, outputs, channels, tile, sizes, at, mask, score, cfg)),
            (consumer, (1, outputs, channels, tile, sizes, at, mask, score, cfg)),
        ],
        [
            (producer, (inputs, channels, tile, order, sizes, at, mask, cfg)),
            (writer, (0, outputs, channels, tile, sizes, at, mask, cfg)),
            (writer, (1, outputs, channels, tile, sizes, at, mask, cfg)),
        ][: 1 + WRITERS],
    )
