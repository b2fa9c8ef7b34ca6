"""The plan of the backward: the tile for each head dim, the compile-time constants, and the order
of the programs.

Pure Python, like `forward/plan.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapreplace
from itertools import islice, repeat
from typing import Any, NamedTuple

from ....dropout import random_bits
from ....gpu.hardware import Gpu
from ....lru import memoised
from ....problem import AttentionProblem
from ....score_mod.derivative import UNCHANGED, by_score
from ..forward.plan import (
    CACHED_BYTES,
    HEAD_DIMS,
    WIDEST_SWIZZLE,
    has_tile,
    padded,
    reads_each,
)


class BackwardTile(NamedTuple):
    """The tile for a head dim; there are always two consumers."""

    BLOCK_M: int  # queries of a step
    BLOCK_N: int  # keys of a program
    q_stages: int  # blocks of Q in flight; at least 2, because the next S^T starts before dK ends
    do_stages: int  # blocks of dO in flight
    is_split: bool  # one consumer has dV and one dK of all keys; if False, each has half the keys

    @property
    def is_flat(self) -> bool:
        """Whether a consumer has more keys than queries."""
        return self.BLOCK_M < self.BLOCK_N and not self.is_split


# The tile by its number of columns, some of which may be a tail: see `HEAD_DIMS`. Two accumulators
# of (64, columns) fit the registers up to 128 columns; with more columns, one consumer keeps dV and
# the other dK.
TILES = {
    64: BackwardTile(128, 128, 2, 2, False),
    80: BackwardTile(64, 128, 2, 2, False),
    96: BackwardTile(64, 128, 2, 2, False),
    128: BackwardTile(64, 128, 2, 2, False),
    144: BackwardTile(64, 64, 2, 2, True),
    160: BackwardTile(64, 64, 2, 2, True),
    192: BackwardTile(64, 64, 2, 2, True),
    256: BackwardTile(64, 64, 2, 1, True),
}

# Instead of that of 192 columns, with values of 64 or 128 columns: see `is_wide`.
WIDE = BackwardTile(64, 128, 2, 2, True)

# Instead of that of 64 columns, which leaves no registers for the derivative of softcap, for a
# score function or for dropout.
FEWER_QUERIES = BackwardTile(64, 128, 2, 2, False)

# The most steps of a tile, on average, with which persistent programs are faster, by columns:
# estimated from calls with 4 to 64 steps on an H200.
MOST_STEPS = {64: 32, 128: 20}

# With fewer tiles of a head, too many of the programs of two phases would have no tile.
FEWEST_IN_PHASES = 8


@dataclass(frozen=True)
class BackwardConfig:
    """The compile-time constants of the backward kernels, with reasons in docs/compilation.md;
    without lengths and strides.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int  # columns of a tile of keys; a second tile has the tail
    TAIL_D: int
    BLOCK_DV: int
    TAIL_DV: int
    Q_STAGES: int
    DO_STAGES: int
    IS_SPLIT: bool  # one consumer has dV and one dK of all keys
    ADDERS: int  # number of roles that add to a block of dQ: 1 writer, or 2 consumers
    WRITERS: int  # number of writer warps, which alternate; idle if the consumers add
    HAS_DQ_IN_REGISTERS: bool  # consumers add dQ from their registers, not through shared memory
    HAS_CARRIED_LSE: bool  # a step loads the log-sum-exp of the next one, if registers allow
    IS_DQ_FIRST: bool  # issue the previous step's dQ before dS is stored, to overlap a barrier
    HAS_K_IN_REGISTERS: bool  # K of the value consumer; the left operand of S^T
    HAS_V_IN_REGISTERS: bool  # V of a consumer's keys; the left operand of dP^T
    IS_DP_FIRST: bool  # issue all of dP^T before the exponentials, not between them
    D: int
    DV: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_CHUNK: bool
    HAS_BLOCK_MASK: bool
    SPANS: int  # intervals of keys of each row; 0 without spans
    HAS_LISTS: bool  # tiles visit the blocks of lists: those of a block mask, or of spans
    HAS_SOFTCAP: bool
    HAS_ALIBI: bool
    SCORE_MOD: Any  # the score function and its derivative, which `launch.config_of` writes
    SCORE_GRADIENT: Any  # None if that is `UNCHANGED`
    HAS_DROPOUT: bool
    DROPOUT_BITS: int  # of a score's random number
    IS_PACKED: bool
    IS_ASCENDING: bool  # a tile visits the blocks of queries from the first one that sees it
    IS_ORDERED: bool  # tiles add to dQ in the order of their keys
    HAS_PHASES: bool  # the tiles of a head may run in two phases: see `phases_of`
    IS_PARTED: bool  # several programs share a tile of keys: see `Order`
    IS_PERSISTENT: bool  # a program takes tiles until there are no more
    STAGGER: int  # cycles by which the second consumer starts later than the first
    FULL_STAGGER: int  # the same before the full blocks of a list
    RUNS: int  # as in the forward
    IS_PARTIAL: bool  # dK and dV are parts of sums, in float32
    IS_DQ_ADDED: bool  # dQ is added to what is there
    DQ_COLUMNS: int  # of the workspace of dQ
    HAS_HIDDEN_KEYS: bool  # as in the forward
    HAS_DEAD_ROWS: bool  # the gradient of a query that sees no key may hold anything


@memoised(4096)
def backward_plan(problem: AttentionProblem, is_parted: bool = False) -> BackwardConfig:
    """The compile-time constants for a problem."""
    options = problem.options
    columns, tile = padded_columns(problem), tile_of(problem)
    BLOCK_D, TAIL_D = HEAD_DIMS[columns]
    of_values = value_columns(problem)
    BLOCK_DV, TAIL_DV = HEAD_DIMS[of_values]
    # Beside dV or dK of 64 keys, the registers of a split tile's consumer hold no more than this.
    fits_split = 128 < columns <= 160
    from_registers = adds_from_registers(problem)
    has_dropout = options.dropout_p > 0
    return BackwardConfig(
        BLOCK_M=tile.BLOCK_M,
        BLOCK_N=tile.BLOCK_N,
        BLOCK_D=BLOCK_D,
        TAIL_D=TAIL_D,
        BLOCK_DV=BLOCK_DV,
        TAIL_DV=TAIL_DV,
        Q_STAGES=tile.q_stages,
        DO_STAGES=tile.do_stages,
        IS_SPLIT=tile.is_split,
        ADDERS=1 if options.deterministic or not (tile.is_split or from_registers) else 2,
        WRITERS=2 if options.deterministic else 1,
        HAS_DQ_IN_REGISTERS=from_registers,
        HAS_CARRIED_LSE=tile.is_flat
        and (problem.layout == "dense" or from_registers)
        and not has_dropout,
        IS_DQ_FIRST=tile.is_flat,
        HAS_K_IN_REGISTERS=fits_split,
        HAS_V_IN_REGISTERS=(tile.is_flat and columns < 128 and not has_dropout) or fits_split,
        IS_DP_FIRST=tile.is_flat and columns < 128,
        D=problem.D,
        DV=problem.Dv,
        HAS_LEFT=options.window_left is not None,
        HAS_RIGHT=options.window_right is not None,
        HAS_CHUNK=options.attention_chunk > 0,
        HAS_BLOCK_MASK=problem.block_tile is not None,
        SPANS=problem.spans,
        HAS_LISTS=has_lists(problem),
        HAS_SOFTCAP=options.softcap > 0,
        HAS_ALIBI=problem.has_alibi,
        SCORE_MOD=None,
        SCORE_GRADIENT=None,
        HAS_DROPOUT=has_dropout,
        DROPOUT_BITS=random_bits(options.dropout_p),
        IS_PACKED=problem.layout != "dense",
        IS_ASCENDING=is_ascending(problem),
        IS_ORDERED=options.deterministic,
        HAS_PHASES=has_phases(problem),
        IS_PARTED=is_parted,
        IS_PERSISTENT=not is_parted and is_persistent(problem),
        STAGGER=stagger(problem, columns),
        FULL_STAGGER=full_stagger(problem, columns),
        RUNS=problem.runs,
        IS_PARTIAL=problem.is_partial,
        IS_DQ_ADDED=problem.is_partial and not problem.has_whole_queries,
        DQ_COLUMNS=dq_columns(problem, columns),
        HAS_HIDDEN_KEYS=problem.has_hidden_keys,
        HAS_DEAD_ROWS=problem.has_dead_rows,
    )


def adds_from_registers(problem: AttentionProblem) -> bool:
    """Whether consumers add dQ from their registers instead of through a writer.

    They do in packed batches, which lack registers for staging, and in short query loops, which
    then end sooner. They do not with 128 queries, where it made dense batches slower, not with
    ordered additions, where every thread would have to wait for its additions before the semaphore
    is released, and not under a block mask, where they would have to read the block of each step.
    """
    options = problem.options
    is_short = options.window_left is not None or options.attention_chunk > 0
    able = tile_of(problem).is_flat and not options.deterministic and not has_lists(problem)
    return able and (is_short or problem.layout != "dense")


def is_persistent(problem: AttentionProblem) -> bool:
    """Whether a program takes tiles until there are no more, so that the start of a tile overlaps
    with the end of the previous one. The loop has more instructions then, which costs more than
    that gains if a tile has many steps.

    Where consumers add dQ from their registers, it made calls 6 to 12 % slower. Score functions
    leave no registers for it. Ordered additions number the programs in the order in which they
    start. Tiles with tails were not tried, nor lists and parts of sequences, whose tiles that no
    query sees are written, too.
    """
    options = problem.options
    is_other = options.deterministic or bool(options.score_mod) or adds_from_registers(problem)
    is_other = is_other or has_lists(problem) or problem.runs > 0
    if is_other or padded_columns(problem) not in MOST_STEPS:
        return False
    lengths = tile_lengths(problem, problem.M, problem.N)
    most = MOST_STEPS[padded_columns(problem)] * len(lengths)
    return problem.group * sum(lengths) <= most


def dq_columns(problem: AttentionProblem, columns: int) -> int:
    """Columns of the workspace of dQ. Above 128 columns, additions to it are the largest part of
    the L2 cache's traffic. The columns after D are therefore left out as far as whole pieces of 64
    columns and at most one smaller box remain. The rows of a TMA box are a power of two, so the
    tail is rounded up to 8, 16, 32 or 64 columns. With several boxes, the kernel was slower than
    with the zeros.
    """
    if not TILES[columns].is_split:
        return columns
    pieces, tail = divmod(problem.D, 64)
    return 64 * pieces + next(size for size in (0, 8, 16, 32, 64) if tail <= size)


def stagger(problem: AttentionProblem, columns: int) -> int:
    """Cycles by which the second consumer starts later than the first.

    Consumers that start together stay together: both compute exponentials while the tensor cores
    are idle, and a step takes up to 15 % longer. With 128 columns under a causal mask, the masked
    first steps separate them, unless most tiles have none because there are many more keys than
    queries. Short query loops end before it matters; there a delay gained nothing.
    """
    options = problem.options
    is_short = options.window_left is not None or options.attention_chunk > 0
    if not tile_of(problem).is_flat or is_short or full_stagger(problem, columns) > 0:
        return 0
    if columns < 128:
        return 800
    has_masked = options.window_right is not None
    if has_masked and (problem.layout != "dense" or problem.N < 2 * problem.M):
        return 0
    return 400 if problem.layout == "dense" else 800


def full_stagger(problem: AttentionProblem, columns: int) -> int:
    """Cycles by which the second consumer starts the full blocks of a list later than the first.

    The partial blocks come first and bring the consumers together, however far apart they were:
    the one that is ahead waits for the intervals or bits of a block, which the other then finds in
    the L1 cache. A delay at the start is therefore lost. With ordered additions all blocks are
    treated as partial, and the delay stays at the start.
    """
    late = columns == 128 and has_lists(problem) and not problem.options.deterministic
    return 400 if late else 0


def padded_columns(problem: AttentionProblem) -> int:
    """Number of columns of the tiles of keys."""
    return next(size for size in TILES if max(problem.D, problem.Dv) <= size)


def tile_of(problem: AttentionProblem) -> BackwardTile:
    """The tile for a problem."""
    columns, options = padded_columns(problem), problem.options
    is_full = options.softcap > 0 or options.dropout_p > 0 or reads_each(options.score_mod)
    is_full = is_full or by_score(options.score_mod_gradient) not in ("", UNCHANGED)
    if is_wide(problem):
        return WIDE
    return FEWER_QUERIES if columns == 64 and is_full else TILES[columns]


def is_wide(problem: AttentionProblem) -> bool:
    """Whether tiles have 128 keys although one consumer has the values and one the keys: if their
    sums fit the registers, and in dense calls whose scores need no more than the mask. Tiles of
    values have no tail: the value consumer has no accumulator for it.
    """
    options, columns = problem.options, padded_columns(problem)
    is_other = bool(options.score_mod) or options.softcap > 0 or problem.has_alibi
    is_other = is_other or options.dropout_p > 0 or options.deterministic or has_lists(problem)
    is_other = is_other or problem.layout != "dense" or problem.runs > 0 or problem.is_partial
    if is_other or problem.has_hidden_keys or problem.has_dead_rows:
        return False
    return columns == 192 and value_columns(problem) in (64, 128)


def value_columns(problem: AttentionProblem) -> int:
    """Number of columns of the tiles of values: as many as those of keys or, if one consumer has dV
    and one dK, as few as the values need.
    """
    columns = padded_columns(problem)
    return padded(problem.Dv) if TILES[columns].is_split else columns


def is_ascending(problem: AttentionProblem) -> bool:
    """Whether a tile visits the blocks of queries upwards, from its diagonal.

    Tiles that start together are then at different blocks: they add to different parts of dQ, and
    neighbours reread the blocks that a tile has just read. With a left bound this is so in either
    direction. Ordered additions need the other direction, see `dq.py`. Above 128 columns the
    other direction was faster, as far as it was measured. The lists of block masks have the order
    that suits them.
    """
    options = problem.options
    has_left = options.window_left is not None or options.attention_chunk > 0
    able = not tile_of(problem).is_split and not options.deterministic
    able = able and not has_lists(problem)
    return able and options.window_right is not None and not has_left


def has_lists(problem: AttentionProblem) -> bool:
    """Whether tiles visit the blocks of lists."""
    return problem.block_tile is not None or problem.spans > 0


def is_uneven(problem: AttentionProblem) -> bool:
    """Whether different numbers of queries see the tiles of keys of a sequence."""
    options = problem.options
    ruled = options.window_right is not None or options.attention_chunk > 0
    return ruled or has_lists(problem)


def has_phases(problem: AttentionProblem) -> bool:
    """Whether the tiles of a head may run in two phases, see `phases_of`: those of ordered
    additions in a dense batch, if later tiles of keys have fewer queries.
    """
    options = problem.options
    has_left = options.window_left is not None or options.attention_chunk > 0
    able = options.deterministic and problem.layout == "dense" and not has_lists(problem)
    return able and options.window_right is not None and not has_left


def phases_of(tiles: int, heads: int, swizzle: int) -> tuple[int, int]:
    """(number of phases, heads whose tiles run together in each phase) of `heads` heads of a batch
    with `tiles` tiles each, if those of `swizzle` heads would run together.

    With ordered additions, a tile adds to a block only after the previous tile of its head. Under a
    causal mask the last tiles of a head are short; if they ran side by side, they would start
    faster than their additions can follow each other, and wait. Therefore the second half of the
    tiles of some heads runs beside the first half of those of the next heads, so that long and
    short tiles alternate. Each phase has half of the heads, because the cache holds no more. If all
    heads run together anyway, there are no next heads.
    """
    phases = 2 if heads > swizzle and tiles >= FEWEST_IN_PHASES else 1
    groups = -(-heads // -(-swizzle // phases))
    return phases, -(-heads // groups)


def leaves_keys_unseen(problem: AttentionProblem) -> bool:
    """Whether a sequence with queries may have a tile of keys that no query sees, so that no kernel
    writes its gradients.

    Queries are aligned with the last keys: if there are at most as many keys as queries, each key
    has a query at its own position, which sees it under every mask rule. Under a block mask,
    programs write zeros, and so they do for parts of sequences.
    """
    options = problem.options
    bounded = options.window_left is not None or options.attention_chunk > 0
    bounded = bounded and not has_lists(problem) and not problem.runs
    return bounded and (problem.layout != "dense" or problem.N > problem.M)


def backward_reasons(problem: AttentionProblem) -> list[str]:
    """Why the backward cannot run a problem whose forward can; empty if it can."""
    if problem.spans > 0 and problem.needs_grad:
        return _span_reasons(problem)
    if problem.block_tile is None or not problem.needs_grad or not has_tile(problem):
        return []
    tile = tile_of(problem)
    wanted = tile.BLOCK_M, tile.BLOCK_N
    if all(size % step == 0 for size, step in zip(problem.block_tile, wanted, strict=True)):
        return []
    found, step = ("{} x {}".format(*pair) for pair in (problem.block_tile, wanted))
    return [f"gradients with block_mask tiles of {found} (on this backend: multiples of {step})"]


def _span_reasons(problem: AttentionProblem) -> list[str]:
    """Why the backward cannot mask by spans."""
    reasons = []
    if problem.layout != "dense":
        reasons.append("gradients of a mask of spans in packed batches (not on this backend)")
    if problem.options.deterministic:
        reasons.append("deterministic gradients of a mask of spans (not on this backend)")
    return reasons


def describe_backward(problem: AttentionProblem) -> str:
    """The plan of the backward as text, for `explain`."""
    config = backward_plan(problem)
    order = "in the order of the keys" if config.IS_ORDERED else "in the order of arrival"
    others = "a producer warp"
    if config.ADDERS == 1:
        writers = ("a writer warp", "2 writer warps")[config.WRITERS - 1]
        others = f"{others} and {writers}"
    columns = config.BLOCK_D + config.TAIL_D
    return (
        f"backward: tiles of {config.BLOCK_M} x {config.BLOCK_N}, head dim padded to "
        f"{columns}, 2 consumer warpgroups, {others}, dQ added up in float32 {order}"
    )


# The order of the programs, and how many share a tile of keys, from a model of the time they take.
#
# A program with a whole tile loops over the queries of all heads of a group. A problem with few key
# heads has few, long tiles: multiprocessors idle if there are fewer tiles than multiprocessors, and
# while the last ones finish. Parts of tiles fill them, but their sums pass through memory.
#
# The heads whose tiles run at the same time share the L2 cache. If many do, the longest tiles start
# first and all end together. If their rows do not fit the cache, programs load them from memory
# again and again. A part loads only the rows of its own query heads.
#


# Of a step with so many columns, on an H200: measured at 64, 80, 128, 144 and 160, else from the
# predicted speed. With fewer queries than keys, 64 columns take at most the time of 80.
STEP_US = {64: 2.6, 80: 1.7, 96: 1.8, 128: 2.3, 144: 1.7, 160: 1.9, 192: 2.2, 256: 2.8}
WIDE_STEP_US = 3.1  # with 128 keys above 128 columns
PROGRAM_US = 5.0  # of a program, without its steps
KERNEL_US = 5.0  # of the kernel that adds the parts, without its memory traffic

# Multiprocessors are not equally fast: 5 % in either direction.
UNEQUAL = 0.05
# With ordered additions, programs of unlike lengths also wait for each other, and end apart by this
# share of the longest one.
UNEVEN_END = 0.3

# The share of the L2 cache that holds rows of Q, dO and dQ. With it, `lost_steps` is near the
# misses of a simulated LRU cache of 30 MB, which had the traffic that ncu counted on an H200.
CACHED_SHARE = 0.7
# The share of the time of memory traffic that products do not hide. It fits chunks of 1,024 queries
# on 16,384 keys, 32:8 heads, on an H100.
EXPOSED_TRAFFIC = 0.15

SWIZZLES = (1, 2, 4, 8, 16, 32)  # tried
# With ordered additions, tiles that add to the same rows start one after the other and wait less.
WIDEST_ORDERED = 64
PARTS = (2, 3, 4, 6, 8, 12, 16)  # tried, beside whole tiles
MOST_LENGTHS = 8  # of the sequences of a packed batch
MOST_WAVES = 8  # of programs that are simulated
MOST_PROGRAMS = 5000  # simulated in one search, over all orders: 1 to 3 ms
CLEARLY_FASTER = 0.995  # of the time of an order with fewer heads together
# Smaller gains of parts are within the error of the model, or do not pay for another launch on the
# host.
LEAST_GAIN = 0.05
LEAST_GAIN_US = 10.0


class Order(NamedTuple):
    """How many programs share a tile of keys, and the order in which programs start."""

    parts: int  # programs for each tile
    swizzle: int  # heads whose tiles run at the same time; each part of a key head counts as one


@memoised(4096)
def order_of(problem: AttentionProblem, keys: int, gpu: Gpu) -> Order:
    """The fastest order; `keys` is the number of rows of a packed k.

    Under a block mask and masks of spans, the lengths of the loops are not known here, and tiles
    stay whole.
    """
    whole = [Order(1, swizzle) for swizzle in swizzles(problem, 1, gpu)]
    if has_lists(problem):
        return whole[0]
    most = problem.group if problem.options.deterministic else PARTS[-1]
    parted = [
        Order(parts, swizzle)
        for parts in PARTS
        if parts <= most
        for swizzle in swizzles(problem, parts, gpu)
    ]
    model = Model(problem, keys, gpu)
    best, time = model.fastest(whole, float("inf"))
    found, _ = model.fastest(parted, time - max(LEAST_GAIN * time, LEAST_GAIN_US))
    return found or best or whole[0]


def swizzles(problem: AttentionProblem, parts: int, gpu: Gpu) -> list[int]:
    """The head swizzles to try for so many parts: as many heads as fit the cache where lists or the
    lengths of packed sequences, which are not known here, make the order; and with ordered
    additions, where tiles wait for each other.
    """
    is_ordered, is_dense = problem.options.deterministic, problem.layout == "dense"
    if not is_uneven(problem) and not is_ordered:
        return [1]
    if is_dense and not has_lists(problem) and not is_ordered:
        # If the tiles of some heads fill less than half of the multiprocessors, more heads run.
        tiles = -(-problem.N // tile_of(problem).BLOCK_N)
        heads = min(problem.B * problem.Hk * parts, SWIZZLES[-1])
        fewest = gpu.multiprocessors / (2 * tiles)
        return [size for size in SWIZZLES if fewest <= size < heads] + [heads]
    of_a_head = problem.M * (problem.D + problem.Dv) * 2 * problem.group
    is_full = not is_uneven(problem) and problem.options.window_left is None
    if is_full and is_dense:
        # Tiles of a head wait for each other until each is at another block, so that they
        # use the whole of the head's dQ, too.
        of_a_head += problem.M * dq_columns(problem, padded_columns(problem)) * 4 * problem.group
    if is_ordered:
        return [parts * min(max(CACHED_BYTES // of_a_head, 1), WIDEST_ORDERED)]
    return [min(max(parts * CACHED_BYTES // of_a_head, 1), WIDEST_SWIZZLE)]


class Loops(NamedTuple):
    """The tiles of some sequences of equal length."""

    heads: int  # key heads of all of them
    lengths: list[int]  # blocks of queries of one head that see each tile, the longest first


class Model:
    """The time that the programs of a problem take, in microseconds."""

    def __init__(self, problem: AttentionProblem, keys: int, gpu: Gpu) -> None:
        self.problem, self.gpu, self.columns = problem, gpu, padded_columns(problem)
        self.step_us = STEP_US[max(self.columns, 80) if tile_of(problem).is_flat else self.columns]
        if is_wide(problem):
            self.step_us = WIDE_STEP_US
        self.loops = [
            Loops(count * problem.Hk, tile_lengths(problem, -(-problem.M * N // problem.N), N))
            for N, count in sequences_of(problem, keys)
        ]
        count = gpu.multiprocessors  # their speeds are in no order
        self.pace = [
            1000 * (1 + UNEQUAL * (2 * (i * 37 % count) / count - 1)) for i in range(count)
        ]
        self.tiles = sum(heads * len(lengths) for heads, lengths in self.loops)
        self.steps = problem.group * sum(heads * sum(lengths) for heads, lengths in self.loops)

    def fastest(self, orders: list[Order], limit: float) -> tuple[Order | None, float]:
        """The order that takes the least time, and its time; None if all take at least `limit`.

        Only orders that may be faster than the best one so far are simulated, the most promising
        first.
        """
        best, programs = None, 0
        possible = [order for order in orders if self.least(order.parts) < limit]
        bounds = [(self.least(order.parts) + self.memory(order), order) for order in possible]
        for bound, order in sorted(bounds):
            if programs > MOST_PROGRAMS or (best and bound >= CLEARLY_FASTER * limit):
                break
            programs += min(self.tiles * order.parts, MOST_WAVES * self.gpu.multiprocessors)
            time = self.makespan(order) + self.memory(order)
            if time < (limit if best is None else CLEARLY_FASTER * limit):
                best, limit = order, time
        return best, limit

    def least(self, parts: int) -> float:
        """No order of so many parts takes less: the mean, or the longest program."""
        longest = (1 - UNEQUAL) * self.time(self.loops[0].lengths[0], parts)
        return max(self.mean(parts), longest)

    def mean(self, parts: int) -> float:
        """The time of all programs, divided by the number of multiprocessors."""
        time = self.steps * self.step_us + parts * self.tiles * PROGRAM_US
        return time / self.gpu.multiprocessors

    def time(self, length: int, parts: int) -> float:
        """The time of a program whose tile `length` blocks of each head see."""
        return length * self.problem.group / parts * self.step_us + PROGRAM_US

    def makespan(self, order: Order) -> float:
        """The time of all programs: each starts in its order, on the multiprocessor that is free
        first. Only the last programs are simulated, because no multiprocessor idles until the last
        program has started.
        """
        count = self.gpu.multiprocessors
        last = list(islice(self.backwards(order), MOST_WAVES * count))
        before = max(self.mean(order.parts) - sum(last) / count, 0.0)
        spread = min(2 * before, last[-1] / 2)
        # A heap of integers: multiprocessor i becomes free at a time, in nanoseconds and rounded,
        # times `count`, plus i.
        start = [before + spread * (i / count - 0.5) for i in range(count)]
        free = [int(1000 * start[i]) * count + i for i in range(count)]
        for time in reversed(last):
            at = free[0]
            heapreplace(free, at + int(time * self.pace[at % count]) * count)
        end = max(free) / count / 1000
        longest, shortest = self.loops[0].lengths[0], self.loops[-1].lengths[-1]
        if self.problem.options.deterministic and shortest < longest:
            end += UNEVEN_END * self.time(longest, order.parts)
        return end

    def backwards(self, order: Order) -> Iterator[float]:
        """The times of all programs, from the last one to the first: `schedule.swizzled_order`."""
        for heads, lengths in reversed(self.loops):
            times = [self.time(length, order.parts) for length in reversed(lengths)]
            left = heads * order.parts
            while left:
                width = min(left, order.swizzle)
                left -= width
                for time in times:
                    yield from repeat(time, width)

    def memory(self, order: Order) -> float:
        """The time that memory traffic adds: of rows that the cache has lost, and of the sums of
        parts.
        """
        problem, tile = self.problem, tile_of(self.problem)
        of_dq = 4 * tile.BLOCK_M * dq_columns(problem, self.columns)
        of_step = 2 * tile.BLOCK_M * (problem.D + problem.Dv) + of_dq
        lost = 0.0 if problem.options.deterministic else self.lost_steps(order, of_step)
        time = EXPOSED_TRAFFIC * lost * (of_step + of_dq)  # dQ is read and written
        if order.parts > 1:
            both = self.columns + value_columns(problem)
            time += 2 * order.parts * self.tiles * tile.BLOCK_N * both * 4  # written and read
            time += KERNEL_US * self.gpu.bytes_per_us
        return time / self.gpu.bytes_per_us

    def lost_steps(self, order: Order, of_step: int) -> float:
        """The number of steps whose rows the cache has lost since a program used them.

        Programs that run together pass over the same rows again and again. If these rows are n
        times what the cache holds, 1 / n of them are found.
        """
        problem = self.problem
        heads_of_part = problem.group / min(order.parts, self.parts_in_workspace())
        if problem.group % order.parts and order.parts % problem.group:
            heads_of_part += 1  # a part that begins and ends within heads shares both with others
        lost = 0.0
        for heads, lengths in self.loops:
            together = float(order.swizzle)
            # Equal loops keep in step, so that half of the rows are in use at a time.
            longer = 2.0
            if is_uneven(problem):
                # Also those of the next heads, which start while these end. Loops of unlike lengths
                # use fewer rows at a time than the longest one.
                together += self.gpu.multiprocessors / (2 * len(lengths))
                longer = lengths[0] * len(lengths) / max(sum(lengths), 1)
            together = min(together, heads * order.parts)
            held = CACHED_SHARE * self.gpu.cache_bytes / (together * of_step)
            if problem.options.window_left is not None or problem.options.attention_chunk > 0:
                # Later tiles need other rows, but no tile returns to those of an earlier head.
                found = held / -(-problem.M // tile_of(self.problem).BLOCK_M) * lengths[0]
            else:
                found = held / heads_of_part * longer
            if found < lengths[0]:
                lost += heads * sum(length - found for length in lengths if length > found)
        return problem.group * lost

    def parts_in_workspace(self) -> int:
        """How many parts have sums of dK and dV about as large as the workspace of dQ: for equally
        long queries and keys, half as many as a group has heads. More memory than that is not worth
        spending to fit a part in the cache.
        """
        problem = self.problem
        of_part = problem.N * (self.columns + value_columns(problem))
        of_dq = problem.M * problem.group * dq_columns(problem, self.columns)
        return max(-(-of_dq // of_part), 1)


def sequences_of(problem: AttentionProblem, keys: int) -> list[tuple[int, int]]:
    """(length, how many sequences have it).

    Only the device knows the lengths of a packed batch. The model has the rows, the number of
    sequences and the longest one; it assumes that the others fall geometrically from it.
    """
    if problem.layout == "dense":
        return [(problem.N, problem.B)]
    count = min(problem.B, MOST_LENGTHS)
    copies = [1]  # one sequence is the longest
    for n in range(1, count):
        copies.append((problem.B - sum(copies)) // (count - n))

    def lengths(ratio: float) -> list[int]:
        return [max(round(problem.N * ratio**n), 1) for n in range(count)]

    least, most = 0.0, 1.0
    for _ in range(12):
        ratio = (least + most) / 2
        rows = sum(length * copy for length, copy in zip(lengths(ratio), copies, strict=True))
        least, most = (ratio, most) if rows < keys else (least, ratio)
    return list(zip(lengths(most), copies, strict=True))


def tile_lengths(problem: AttentionProblem, M: int, N: int) -> list[int]:
    """Blocks of queries of one head that see each tile of keys of a sequence, the longest first."""
    tile, options = tile_of(problem), problem.options
    lengths = []
    for first in range(0, N, tile.BLOCK_N):
        # Rows [start, stop) see some key of [first, last]; shift is the position of row 0.
        last, shift = min(first + tile.BLOCK_N, N) - 1, N - M
        start, stop = 0, M
        if options.window_right is not None:
            start = max(start, first - options.window_right - shift)
        if options.window_left is not None:
            stop = min(stop, last + options.window_left + 1 - shift)
        if options.attention_chunk > 0:
            chunk = options.attention_chunk
            start = max(start, first // chunk * chunk - shift)
            stop = min(stop, (last // chunk + 1) * chunk - shift)
        lengths.append(max(-(-stop // tile.BLOCK_M) - start // tile.BLOCK_M, 0))
    return sorted(lengths, reverse=True)
