"""A consumer of float8 tiles: one warpgroup with 64 rows of the tile of queries.

Like `forward/consumer.py`, but Q, K, V and P are e4m3 (FlashAttention-3, Shah et al. 2024, section
3.3). The scales of Q and K multiply S. The output so far is kept in units of the scale of the last
block of V that was added.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..forward.consumer import attend_tiles, issue_scores, kept_values
from ..forward.results import normalisation
from ..shared.channels import await_ping_pong, pass_ping_pong
from ..shared.intrinsics import (
    CONSUMER_ROWS,
    CONSUMER_WARPS,
    FIRST_BARRIER,
    aggregate,
    empty_accumulator,
    pin,
    row_values,
    show_written,
)
from ..shared.softmax import (
    Score,
    lazy_max,
    linear_scale,
    partial_row_sum,
    pivot_of,
    rescaled,
    rescaled_where_needed,
    scores_log2,
)
from ..shared.unseen import has_cleared, is_kept, kind_of_keys
from .softmax import (
    SLACK_LOG2,
    WEIGHT_LOG2,
    exponentials,
    masked,
    packed_weights,
    ratio,
    weights_operand,
)


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
    attend_tiles(float8_math, ME, output, channels, scales, sizes, mask, score, cfg)


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
    def first_block(
        self, ME: gl.constexpr, q, q_tail, i, block, channels, rows, work, score, cfg: gl.constexpr
    ):
        """The first step of the loop, on the block with the last keys that the rows see."""
        n0 = block * cfg.BLOCK_N
        k_unit, v_unit = self.scales_of(block, cfg)
        channels.k.acquire(i)
        s = issue_scores(q, q_tail, i, channels, cfg)
        values = kept_values(n0, work.N - n0, rows, cfg)
        if cfg.IS_RAGGED or cfg.HAS_HIDDEN_KEYS:
            channels.v.acquire(i)
            clear_values(ME, values, i, channels, cfg)
        s = warpgroup_mma_wait(0, deps=[s])
        channels.k.release_operand(i)
        s, factor = self.scores(s, rows, k_unit, score, cfg)
        if cfg.HAS_LEFT or cfg.HAS_RIGHT:  # noqa: SIM114 -- known while compiling
            s = masked(s, rows.start, rows.stop, n0, cfg)
        elif n0 + cfg.BLOCK_N > work.N:
            s = masked(s, rows.start, rows.stop, n0, cfg)
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
        self, ME: gl.constexpr, now, q, q_tail, channels, rows, score, IS_MASKED: gl.constexpr,
        cfg: gl.constexpr,
    ):  # fmt: skip
        """One step: scores of the block before `now.block`, and the output of `now.block`."""
        i, block = now.i + 1, now.block - 1
        # Loaded before the waits and the products, which hide the latency.
        k_unit, v_unit = self.scales_of(block, cfg)
        channels.k.acquire(i)
        await_ping_pong(ME, cfg)
        s = issue_scores(q, q_tail, i, channels, cfg)
        o, _ = self.issue_output(now, channels, cfg)
        pass_ping_pong(ME, cfg)
        s = warpgroup_mma_wait(1, deps=[s])
        channels.k.release_operand(i)
        s, factor = self.scores(s, rows, k_unit, score, cfg)
        if IS_MASKED:
            s = masked(s, rows.start, rows.stop, block * cfg.BLOCK_N, cfg)
        row_max = lazy_max(now.row_max, gl.max(s, 1) * factor, SLACK_LOG2)
        if cfg.WAITS == "early":
            pin(row_max)
            o = warpgroup_mma_wait(0, deps=[o])
            channels.v.release_operand(now.i)
        pivot = pivot_of(row_max, IS_MASKED)
        rescale = gl.exp2(now.row_max - pivot)
        p = exponentials(s * factor - (pivot - WEIGHT_LOG2)[:, None], IS_MASKED, cfg)
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
            clear_values(ME, kept_values(n0, n0 * 0 + cfg.BLOCK_N, rows, cfg), i, channels, cfg)
        o = rescaled_where_needed(o, rescale)
        return Progress(i, block, p, o, row_max, row_sum, v_unit)

    @gluon.jit
    def issue_output(self, now, channels, cfg: gl.constexpr):
        """Start O += P V of the last block."""
        channels.v.acquire(now.i)
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
        return scores_log2(s, 0, rows.slope, scaled, cfg), linear_scale(scaled, cfg)

    @gluon.jit
    def normalisation(self, ME: gl.constexpr, done, work, sink_ptr, cfg: gl.constexpr):
        """`consumer.normalisation` for weights that were multiplied by 2**8."""
        row_max = gl.convert_layout(done.row_max, row_values(cfg.BLOCK_N), assert_trivial=True)
        return normalisation(ME, row_max - WEIGHT_LOG2, done.row_sum, work, sink_ptr, cfg)

    @gluon.jit
    def output_scale(self, scale, done, cfg: gl.constexpr):
        """`scale` times the scale of V."""
        if cfg.HAS_BLOCK_SCALES:
            scale = scale * done.v_unit
        else:
            scale = scale * self.v
        return scale


@gluon.jit
def float8_math(ME: gl.constexpr, scales, sizes, work, score, cfg: gl.constexpr):
    """The arithmetic of a tile, with its scales."""
    unit = score.scale
    key_heads = sizes.heads // sizes.group
    key_head = (work.b * key_heads + work.h // sizes.group).to(gl.int64)
    if cfg.HAS_BLOCK_SCALES:
        query_head = (work.b * sizes.heads + work.h).to(gl.int64)
        query_blocks = gl.cdiv(sizes.M, CONSUMER_ROWS)
        # A consumer past the last row reads the last scale, and does not use it.
        query_block = gl.minimum(work.m0 // CONSUMER_ROWS + ME, query_blocks - 1)
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
def clear_values(ME: gl.constexpr, kept, i, channels, cfg: gl.constexpr):
    """Zero the keys of block `i` of V that are not `kept`, if there are any: see `unseen.py`."""
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
            x = part.load(LAYOUT).to(gl.int8, bitcast=True)
            x = gl.where(keep[None, :], x, gl.zeros_like(x))
            part.store(x.to(v.dtype, bitcast=True))
        show_written(FIRST_BARRIER + cfg.CONSUMERS + ME)
