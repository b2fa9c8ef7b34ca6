"""The float8 forward kernel. Its roles and barriers are those of `forward/kernel.py`, but Q, K, V
and P are e4m3 (FlashAttention-3, Shah et al. 2024, section 3.3). The scales of Q and K multiply S.
The output so far is kept in units of the scale of the last block of V that was added.

The layouts of an accumulator and of a float8 left operand differ: of 16 columns, thread t holds 2t,
2t + 1, 2t + 8 and 2t + 9 of an accumulator, but 4t to 4t + 3 of an operand. The keys are therefore
permuted in shared memory, so that these columns of S belong to those keys. TMA does this: it reads
16 rows of K as (a, t, b), row 2a + 4t + b. Then the weights that a thread has computed are its part
of P, and the keys of V keep their order.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..forward.kernel import (
    Channels,
    Output,
    attend_tiles,
    issue_scores,
    kept_values,
    load_tiles,
    normalisation,
    scheduler,
)
from ..shared.pipeline import (
    CONSUMER_ROWS,
    CONSUMER_WARPS,
    FIRST_BARRIER,
    Described,
    aggregate,
    await_ping_pong,
    copy_to_shared,
    empty_accumulator,
    left_operand,
    make_channel,
    make_queue,
    pass_ping_pong,
    pin,
    row_values,
    run_roles,
    shared_rows,
    show_written,
)
from ..shared.schedule import (
    NUMBERS,
    WORK_NUMBERS,
    Mask,
    Sizes,
    batch_of,
    has_cleared,
    is_kept,
    kind_of_keys,
)
from ..shared.softmax import (
    Place,
    Score,
    lazy_max,
    linear_scale,
    partial_row_sum,
    pivot_of,
    rescaled,
    rescaled_where_needed,
    scores_log2,
)

# Rows of K that are stored together, as groups of (2, 4, 2).
KEY_GROUP = gl.constexpr(16)

# Weights are multiplied by 2**8 before they are rounded to e4m3: they stay below its largest
# number, 448, and most of them are far from its subnormal numbers.
WEIGHT_LOG2 = gl.constexpr(8.0)

# Lazy row max, in base 2: 2**8.75 is 431. Nine in ten new maxima of random scores stay below it.
SLACK_LOG2 = gl.constexpr(0.75)


@gluon.jit
def masked(s, start, stop, n0, cfg: gl.constexpr):
    """-inf where a key of the block that starts at n0 is outside its row's [start, stop), both
    (64,).

    Column 16 c + 8 a + 2 t + b holds key 16 c + 2 a + 4 t + b. As in `softmax.masked`, c and a are
    constants of a register, and t and b are subtracted from the row's bound.
    """
    # (64, BLOCK_N / 8, 8)
    by_eights = s.reshape([64, cfg.BLOCK_N // 8, 8])
    LAYOUT: gl.constexpr = by_eights.type.layout
    COUNT: gl.constexpr = cfg.BLOCK_N // 8
    eight = gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    key = (eight // 2 * 16 + eight % 2 * 2)[None, :, None]
    visible = key < bounds(stop - n0, LAYOUT)
    if cfg.HAS_LEFT:
        visible = visible & (key >= bounds(start - n0, LAYOUT))
    by_eights = gl.where(visible, by_eights, -float("inf"))
    return gl.convert_layout(by_eights.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def bounds(bound, LAYOUT: gl.constexpr):
    """Convert a bound on keys (64,) to a bound on `key` in `masked`: (64, 1, 8)."""
    bound = gl.convert_layout(bound, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    return bound[:, None, None] - (column // 2 * 4 + column % 2)[None, None, :]


@gluon.jit
def exponentials(x, HAS_HIDDEN: gl.constexpr, cfg: gl.constexpr):
    """2**x. If cfg.HAS_POLYNOMIAL, a polynomial computes one in eight, unless x may be -inf."""
    if cfg.HAS_POLYNOMIAL and not HAS_HIDDEN:
        p = some_by_polynomial(x)
    else:
        p = gl.exp2(x)
    return p


@gluon.jit
def packed_weights(p, COLUMNS: gl.constexpr):
    """P (64, keys) in e4m3, four numbers in an int32, in the registers of the operand of a product
    that accumulates (64, COLUMNS). Of four neighbours in the result, the first holds all four.

    The compiler would use one register for each float8 loop variable.
    """
    KEYS: gl.constexpr = p.shape[1]
    # (64, KEYS), the keys of 16 in the order of the operand
    in_order = p.reshape([64, KEYS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, KEYS])
    in_order = gl.convert_layout(in_order, left_operand(COLUMNS, 8), assert_trivial=True)
    return four_to_float8(in_order)


@gluon.jit
def weights_operand(packed):
    """`packed_weights` as the operand of a product."""
    return same_float8(packed)


# Inline assembly on the registers of a thread


@gluon.jit
def four_to_float8(x):
    """Round four float32 neighbours to e4m3 in the first int32; the other three are zero.
    Saturates; NaN stays NaN.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high;"
        " cvt.rn.satfinite.e4m3x2.f32 low, $5, $4; cvt.rn.satfinite.e4m3x2.f32 high, $7, $6;"
        " mov.b32 $0, {low, high}; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }",
        "=r,=r,=r,=r,r,r,r,r",
        [x],
        dtype=gl.int32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def same_float8(packed):
    """The four numbers of `four_to_float8`, as float8."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [packed], dtype=gl.float8e4nv, is_pure=True, pack=4
    )


@gluon.constexpr_function
def _exponential_assembly():
    """2**x of eight numbers, the first by a parabola in the fraction of x in [-1/2, 1/2], with an
    error of 2**-9: the last bits of x + 1.5 * 2**23 hold the integer part, which becomes the
    exponent.
    """
    units = " ".join(f"ex2.approx.ftz.f32 ${i}, ${i + 8};" for i in range(1, 8))
    return (
        "{ .reg .f32 x, whole, fraction, y; .reg .b32 exponent;"
        " max.f32 x, $8, 0fC2F00000; add.rn.f32 whole, x, 0f4B400000;"
        " sub.rn.f32 fraction, whole, 0f4B400000; sub.rn.f32 fraction, x, fraction;"
        " fma.rn.f32 y, fraction, 0f3E7424E8, 0f3F341459; fma.rn.f32 y, y, fraction, 0f3F800E81;"
        " mov.b32 exponent, whole; shl.b32 exponent, exponent, 23;"
        " { .reg .b32 bits; mov.b32 bits, y; add.s32 bits, bits, exponent; mov.b32 $0, bits; }"
        f" {units} }}"
    )


@gluon.jit
def some_by_polynomial(x):
    """2**x; a polynomial computes one in eight of a thread's numbers, whose results are at least
    2**-120.
    """
    return gl.inline_asm_elementwise(
        _exponential_assembly(),
        "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=8,
    )


@gluon.jit
def ratio(x, y):
    """x / y, exact for powers of two."""
    return gl.inline_asm_elementwise(
        "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1
    )


# A consumer: one warpgroup with 64 rows of the tile of queries


class Scales(NamedTuple):
    """Scales of float8 inputs: per-head (B, Hk), or per-block (B, heads, blocks); None is 1."""

    q: Any
    k: Any
    v: Any


@aggregate
class Progress:
    """The state of the KV loop."""

    i: gl.tensor  # use of the rings by the last block whose scores are known
    block: gl.tensor  # index of that block
    p: gl.tensor  # its weights, `packed_weights`
    o: gl.tensor  # (64, BLOCK_DV) output of the previous blocks, in units of `v_unit`
    row_max: gl.tensor  # (64,) lazy, see `lazy_max`
    row_sum: gl.tensor  # (64, 4)
    v_unit: gl.tensor  # scale of the block's values

    @gluon.constexpr_function
    def __init__(self, i, block, p, o, row_max, row_sum, v_unit):
        self.i = i
        self.block = block
        self.p = p
        self.o = o
        self.row_max = row_max
        self.row_sum = row_sum
        self.v_unit = v_unit


@gluon.jit
def consumer(
    ME: gl.constexpr, output, channels, scales, sizes, mask, score, cfg: gl.constexpr
):  # fmt: skip
    """The consumer of float8 tiles."""
    attend_tiles(float8_math, gl.to_tensor(ME), output, channels, scales, sizes, mask, score, cfg)


@aggregate
class Float8Math:
    """The arithmetic of a float8 tile, with its scales: see `forward.consumer.Math16`."""

    score: gl.tensor  # softmax scale times the scale of Q, and times that of K if it is per-head
    k: gl.tensor  # pointer to the per-block scales of K
    v: gl.tensor  # pointer to the per-block scales of V, or its per-head scale

    @gluon.constexpr_function
    def __init__(self, score, k, v):
        self.score = score
        self.k = k
        self.v = v

    @gluon.jit
    def first_block(self, me, q, q_tail, i, block, channels, rows, work, score, cfg: gl.constexpr):
        """The first step of the loop, on the block with the last keys that the rows see."""
        n0 = block * cfg.BLOCK_N
        k_unit, v_unit = self.scales_of(block, cfg)
        channels.k.acquire(i)
        # (64, BLOCK_N)
        s = issue_scores(q, q_tail, i, channels, 0, cfg.BLOCK_N, cfg)
        values = kept_values(n0, work.N - n0, rows, cfg)
        if cfg.IS_RAGGED or cfg.HAS_HIDDEN_KEYS:
            channels.v.acquire(i)
            clear_values(me, values, i, channels, cfg)
        s = warpgroup_mma_wait(0, deps=[s])
        channels.k.release_operand(i)
        s, factor = self.scores(s, rows, k_unit, score, cfg)
        if cfg.HAS_LEFT or cfg.HAS_RIGHT:  # noqa: SIM114 -- known while compiling
            s = masked(s, rows.start, rows.stop, n0, cfg)
        elif n0 + cfg.BLOCK_N > work.N:
            s = masked(s, rows.start, rows.stop, n0, cfg)
        # (64,), and (64, BLOCK_N)
        row_max = gl.max(s, 1) * factor
        p = exponentials(s * factor - (pivot_of(row_max, True) - WEIGHT_LOG2)[:, None], True, cfg)
        return Progress(
            i,
            block,
            packed_weights(p, cfg.BLOCK_DV),
            empty_accumulator(cfg.BLOCK_DV, 8),
            row_max,
            partial_row_sum(p),
            v_unit,
        )

    @gluon.jit
    def next_block(
        self, me, now, q, q_tail, channels, rows, score, IS_MASKED: gl.constexpr,
        cfg: gl.constexpr,
    ):  # fmt: skip
        """One step: scores of the block before `now.block`, and the output of `now.block`."""
        i, block = now.i + 1, now.block - 1
        # Loaded before the waits and the products, which hide the latency.
        k_unit, v_unit = self.scales_of(block, cfg)
        channels.k.acquire(i)
        await_ping_pong(me, cfg)
        # (64, BLOCK_N), (64, BLOCK_DV)
        s = issue_scores(q, q_tail, i, channels, 0, cfg.BLOCK_N, cfg)
        o, _ = self.issue_output(now, channels, cfg)
        pass_ping_pong(me, cfg)
        s = warpgroup_mma_wait(1, deps=[s])
        channels.k.release_operand(i)
        s, factor = self.scores(s, rows, k_unit, score, cfg)
        if IS_MASKED:
            s = masked(s, rows.start, rows.stop, block * cfg.BLOCK_N, cfg)
        # (64,)
        row_max = lazy_max(now.row_max, gl.max(s, 1) * factor, SLACK_LOG2)
        if cfg.WAITS == "early":
            pin(row_max)
            o = warpgroup_mma_wait(0, deps=[o])
            channels.v.release_operand(now.i)
        HAS_HIDDEN: gl.constexpr = IS_MASKED or cfg.SCORE_MOD is not None
        pivot = pivot_of(row_max, HAS_HIDDEN)
        rescale = gl.exp2(now.row_max - pivot)
        # (64, BLOCK_N)
        p = exponentials(s * factor - (pivot - WEIGHT_LOG2)[:, None], HAS_HIDDEN, cfg)
        # (64, 4)
        row_sum = rescaled(now.row_sum, rescale) + partial_row_sum(p)
        if cfg.WAITS != "early":
            if cfg.WAITS == "late":
                pin(row_sum)
            o = warpgroup_mma_wait(0, deps=[o])
            channels.v.release_operand(now.i)
        if cfg.HAS_BLOCK_SCALES:
            rescale = rescale * ratio(now.v_unit, v_unit)
        p = packed_weights(p, cfg.BLOCK_DV)
        if IS_MASKED and cfg.HAS_HIDDEN_KEYS:
            n0 = block * cfg.BLOCK_N
            clear_values(me, kept_values(n0, n0 * 0 + cfg.BLOCK_N, rows, cfg), i, channels, cfg)
        o = rescaled_where_needed(o, rescale)
        return Progress(i, block, p, o, row_max, row_sum, v_unit)

    @gluon.jit
    def issue_output(self, now, channels, cfg: gl.constexpr):
        """Start O += P V of the last block."""
        channels.v.acquire(now.i)
        # (64, BLOCK_N) @ (BLOCK_N, BLOCK_DV) -> (64, BLOCK_DV)
        v = channels.v.tile(now.i).reshape([cfg.BLOCK_DV, cfg.BLOCK_N]).permute((1, 0))
        o = warpgroup_mma(weights_operand(now.p), v, now.o, is_async=True)
        return o, o

    @gluon.jit
    def scales_of(self, block, cfg: gl.constexpr):
        """The scales of K and V of a block."""
        k, v = self.score, self.score
        if cfg.HAS_BLOCK_SCALES:
            k, v = gl.load(self.k + block), gl.load(self.v + block)
        return k, v

    @gluon.jit
    def scores(self, s, rows, k_unit, score, cfg: gl.constexpr):
        """Scores in base 2 from products, and the factor that is not yet applied."""
        unit = self.score
        if cfg.HAS_BLOCK_SCALES:
            unit = unit * k_unit
        scaled = Score(
            unit, score.softcap, score.alibi_ptr, score.alibi_batch, score.sink_ptr, None
        )
        place = Place(0, 0, 0, 0)  # a score function reads only the score
        return scores_log2(s, place, 0, rows.slope, scaled, cfg), linear_scale(scaled, cfg)

    @gluon.jit
    def normalisation(self, me, done, work, sink_ptr, cfg: gl.constexpr):
        """`forward.kernel.normalisation` for weights that were multiplied by 2**8."""
        row_max = gl.convert_layout(done.row_max, row_values(cfg.BLOCK_N), assert_trivial=True)
        return normalisation(me, row_max - WEIGHT_LOG2, done.row_sum, work, sink_ptr, cfg)

    @gluon.jit
    def output_scale(self, scale, done, cfg: gl.constexpr):
        """`scale` times the scale of V."""
        if cfg.HAS_BLOCK_SCALES:
            scale = scale * done.v_unit
        else:
            scale = scale * self.v
        return scale


@gluon.jit
def float8_math(me, scales, sizes, work, score, cfg: gl.constexpr):
    """The arithmetic of a tile, with its scales."""
    unit = score.scale
    key_heads = sizes.heads // sizes.group
    key_head = (work.b * key_heads + work.h // sizes.group).to(gl.int64)
    if cfg.HAS_BLOCK_SCALES:
        query_head = (work.b * sizes.heads + work.h).to(gl.int64)
        query_blocks = gl.cdiv(sizes.M, CONSUMER_ROWS)
        # A consumer past the last row reads the last scale, and does not use it.
        query_block = gl.minimum(work.m0 // CONSUMER_ROWS + me, query_blocks - 1)
        unit = unit * gl.load(scales.q + query_head * query_blocks + query_block)
        key_blocks = gl.cdiv(sizes.N, cfg.BLOCK_N)
        k, v = scales.k + key_head * key_blocks, scales.v + key_head * key_blocks
    else:
        if scales.q is not None:
            unit = unit * gl.load(scales.q + key_head)
        if scales.k is not None:
            unit = unit * gl.load(scales.k + key_head)
        v = gl.to_tensor(1.0)
        if scales.v is not None:
            v = gl.load(scales.v + key_head)
        k = unit
    return Float8Math(unit, k, v)


@gluon.constexpr_function
def bytes_of_values(warps):
    """Coalesced float8 rows of 128 keys: 16 bytes for each thread."""
    return gl.BlockedLayout([1, 16], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def clear_values(me, kept, i, channels, cfg: gl.constexpr):
    """Zero the keys of block `i` of V that are not `kept` (`schedule.Kept`), if there are any."""
    STEP: gl.constexpr = 32
    DIMS: gl.constexpr = cfg.BLOCK_DV
    LAYOUT: gl.constexpr = bytes_of_values(CONSUMER_WARPS)
    KIND: gl.constexpr = kind_of_keys(cfg)
    if has_cleared(kept, KIND, cfg.BLOCK_N):
        channels.v.acquire(i)
        v = channels.v.tile(i).reshape([DIMS, cfg.BLOCK_N])
        keep = is_kept(0, kept, KIND, cfg.BLOCK_N, gl.SliceLayout(0, LAYOUT))
        for first in gl.static_range(0, DIMS, STEP):
            part = v.slice(first, STEP)
            # (STEP, BLOCK_N)
            x = part.load(LAYOUT).to(gl.int8, bitcast=True)
            x = gl.where(keep[None, :], x, gl.zeros_like(x))
            part.store(x.to(v.dtype, bitcast=True))
        show_written(FIRST_BARRIER + cfg.CONSUMERS + me)


# Shared memory, and the producer, which copies K with its rows in the order above, and V with
# adjacent keys


@gluon.jit
def make_channels(dtype: gl.constexpr, out_dtype: gl.constexpr, cfg: gl.constexpr):
    """Allocate the rings and set up their barriers."""
    C: gl.constexpr = cfg.CONSUMERS
    D: gl.constexpr = cfg.BLOCK_D
    DV: gl.constexpr = cfg.BLOCK_DV
    BLOCK: gl.constexpr = cfg.BLOCK_N
    rows: gl.constexpr = [cfg.Q_SLOTS, 1, CONSUMER_ROWS, 1, D]
    q = gl.allocate_shared_memory(dtype, rows, shared_rows(D, 8))
    o = gl.allocate_shared_memory(out_dtype, [C, 1, CONSUMER_ROWS, 1, DV], shared_rows(DV))
    groups: gl.constexpr = [cfg.STAGES, BLOCK // KEY_GROUP, 2, 4, 2, D]
    k = gl.allocate_shared_memory(dtype, groups, shared_rows(D, 8, 5))
    v = gl.allocate_shared_memory(dtype, [cfg.STAGES, 1, 1, DV, BLOCK], shared_rows(BLOCK, 8))
    channels = Channels(
        make_channel(q, q, cfg.Q_SLOTS, 1),
        make_channel(k, k, cfg.STAGES, C),
        make_channel(v, v, cfg.STAGES, C),
        o,
        o,
        make_queue(2, WORK_NUMBERS, C + 1 if cfg.IS_RAGGED else C),
    )
    fence_async_shared()
    return channels


# The producer


class Keys(NamedTuple):
    """K as TMA reads it: groups of rows (group, 2, 4, 2, adjacent heads)."""

    groups: Any
    batch_groups: Any  # stride of a batch in groups; packed sequences ignore it
    head_step: Any  # stride of a head in elements


@gluon.jit
def producer(q, keys, v_desc, counter_ptr, channels, sizes, at, mask, cfg: gl.constexpr):
    """Load all tiles of this program."""
    load_tiles(load_blocks, q, keys, v_desc, counter_ptr, channels, sizes, at, mask, cfg)


@gluon.jit
def load_blocks(keys, v_desc, i, channels, work, sizes, at, mask, cfg: gl.constexpr):
    """Load K and V of the tile; return the number of blocks so far."""
    batch = batch_of(work.b, at.cu_seqlens_k)
    head = work.h // sizes.group
    first_group, first_key = work.b * keys.batch_groups, work.start_k
    if at.cu_seqlens_k is not None:  # see `launch.grouped`
        first_group = work.start_k // KEY_GROUP + work.b
        first_key = first_group * KEY_GROUP
    for j in range(work.end - work.begin):
        row = (work.end - 1 - j) * cfg.BLOCK_N
        full = channels.k.acquire_empty(i, keys.groups.block_type.nbytes)
        coord = [first_group + row // KEY_GROUP, 0, 0, 0, head * keys.head_step]
        copy_to_shared(keys.groups, coord, full, channels.k.tile(i))
        full = channels.v.acquire_empty(i, v_desc.block_type.nbytes)
        copy_to_shared(v_desc, [batch, head, 0, first_key + row], full, channels.v.tile(i))
        i += 1
    return i


@gluon.jit(do_not_specialize=(*NUMBERS, "batch_groups", "head_step"))
def float8_kernel(
    q_desc, k_desc, v_desc, o_desc, out_ptr, lse_ptr, counter_ptr, at, scales, batch_groups,
    head_step, B, M, N, total_q, total_k, heads, group, swizzle, tiles, left, right, scale,
    softcap, cfg: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of every tile."""
    sizes = Sizes(B, M, N, total_q, total_k, heads, group, swizzle, tiles)
    mask = Mask(left, right, 0)
    score = Score(scale, softcap, None, 0, None, None)
    q, keys = Described(q_desc, None), Keys(k_desc, batch_groups, head_step)
    scales = Scales(scales.q, scales.k, scales.v)
    output = Output(Described(o_desc, None), out_ptr, lse_ptr)
    channels = make_channels(q_desc.dtype, o_desc.dtype, cfg)
    run_roles(
        [
            (consumer, (0, output, channels, scales, sizes, mask, score, cfg)),
            (consumer, (1, output, channels, scales, sizes, mask, score, cfg)),
            (consumer, (2, output, channels, scales, sizes, mask, score, cfg)),
        ][: cfg.CONSUMERS],
        [
            (producer, (q, keys, v_desc, counter_ptr, channels, sizes, at, mask, cfg)),
            (scheduler, (counter_ptr, channels, sizes, at, mask, cfg)),
        ],
    )
