"""Which problems the Hopper backend supports, and with which tiles.

Pure Python: nothing here imports Triton, so that `explain` works where Triton is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import gcd, inf
from typing import Any, NamedTuple

import torch

from ....dropout import random_bits
from ....gpu.score_source import DIFFERENCE, Writer
from ....lru import memoised
from ....problem import AttentionProblem
from ....score_mod.program import INTEGERS, VALUES, fact, parsed
from ...reasons import (
    dotted,
    dtype_reasons,
    head_dim_reasons,
    head_dim_step_reasons,
    score_mod_reasons,
)

CAPABILITY = (9, 0)
DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
OLDEST_TRITON = (3, 6)

# TMA needs rows that start at multiples of 16 bytes.
HEAD_DIM_STEP = 8

# Runs of positions in a sequence. A tile reads them one after the other.
MAX_RUNS = 16

# Intervals of a mask of spans. Each one needs registers in every thread.
MOST_SPANS = 2

# Rows of a page that a copy loads, at least: a block has several copies of the largest power of two
# that divides both.
LEAST_BOX = 16

# Tiles of queries, half as many as multiprocessors; rows of a key head in packed sequences over a
# cache.
FEWEST_TILES, FEWEST_PACKED_ROWS = 64, 2048

# Triton's kernels split the KV loop of up to so many queries. On an H200, 70 queries of 32 heads on
# 32,768 keys took them 160 us, the kernel here 412. Merging takes as long as about 1,000 keys here.
MOST_SPLIT_QUERIES, FEWEST_SPLIT_KEYS = 128, 4096

# With fewer queries, most of a tile would be empty.
FEWEST_QUERIES = 65

READS = VALUES, INTEGERS

# Of a number in a score function: see `may_be_large`.
LARGE_NUMBER = 2.0**16

CONSUMER_ROWS = 64

# Bytes of keys and values of the heads that run at the same time; they should fit the L2 cache.
CACHED_BYTES = 32 * 2**20
WIDEST_SWIZZLE = 16


def _triton_version() -> tuple[int, int] | None:
    """(major, minor) of the installed Triton; read once at import, because a tracer cannot."""
    try:
        major, minor, *_ = version("triton").split(".")
    except PackageNotFoundError:
        return None
    return int(major), int(minor)


TRITON_VERSION = _triton_version()


class Tile(NamedTuple):
    """The tile for a pair of head dims, key's and value's."""

    consumers: int  # warpgroups, each with 64 rows of the tile
    BLOCK_N: int  # keys of a block
    stages: int  # blocks of K and of V in flight
    ping_pong: bool  # consumers alternate at the tensor cores
    q: str  # location of a consumer's queries: `Q_LOCATIONS`
    waits: str = "freely"  # when a consumer waits for the output of a block: `WAITS`
    ascends: bool = False  # the KV loop visits the first block of keys first, not the last one


# The location of the queries while their tile runs.
# registers: in registers of the consumer; the next tile's queries are copied meanwhile.
# twice: in two slots of shared memory, for this tile and the next one.
# once: in one slot of shared memory, which the output reuses.
# held: in registers, loaded from such a slot, so that shared memory has room for more blocks.
# apart: like once, but the output has its own shared memory.
Q_LOCATIONS = ("registers", "twice", "once", "held", "apart")

# When a consumer waits for O += P V of the last block.
# early: before the exponentials of this block, while other consumers keep the tensor cores busy.
# late: after these exponentials.
# freely: where the assembler puts the wait, which is among these exponentials.
WAITS = ("early", "late", "freely")

# Native head dims: columns of a tile, a power of two, and of its tail.
HEAD_DIMS = {
    64: (64, 0),
    80: (64, 16),
    96: (64, 32),
    128: (128, 0),
    144: (128, 16),
    160: (128, 32),
    192: (128, 64),
    256: (256, 0),
}

# (key's, value's) head dim, rounded up to one of `HEAD_DIMS`. Shared memory: 227 KiB in all.
TILES = {
    (64, 64): Tile(3, 128, 4, True, "twice", "early"),
    (80, 80): Tile(2, 128, 2, True, "registers"),
    (96, 96): Tile(2, 128, 2, True, "registers"),
    (128, 128): Tile(2, 128, 2, False, "registers"),
    (144, 144): Tile(2, 128, 2, False, "registers"),
    (160, 160): Tile(2, 128, 2, True, "once"),
    (192, 128): Tile(2, 128, 2, False, "once"),
    (192, 192): Tile(2, 64, 3, True, "held", "late"),
    (256, 256): Tile(2, 64, 2, False, "once"),
}
# All other pairs, rounded up to one of these: even the largest fits.
UNLIKE = Tile(2, 64, 2, True, "apart")
UNLIKE_HEAD_DIMS = (64, 96, 128, 192, 256)

# If every row sees all keys, the consumers stay in step. With masks Triton 3.9 spills registers.
UNMASKED_TILES = {(128, 128): Tile(2, 128, 2, True, "registers", "late")}

# If most KV loops end after a few blocks, tiles of fewer rows compute fewer masked scores.
SHORT_CAUSAL = 1024  # keys
SHORT_CAUSAL_TILES = {(64, 64): Tile(2, 128, 4, False, "registers")}

# Time of a block of so many rows with these tiles, over that with `TILES`: 10 % by the log, 5 % for
# what was not measured.
TWO_CONSUMERS_COST = 1.15

# If tiles see few keys, blocks of 64 keys have fewer masked scores. Their loops also have less
# code, which a short call may have to read from memory.
FEW_KEYS = 512
NARROW_TILES = dict.fromkeys(
    [(64, 64), (80, 80), (96, 96), (128, 128)], Tile(2, 64, 4, False, "registers")
)

# Three consumers lack the registers for random numbers. Integer instructions, not products, limit
# these kernels.
DROPOUT_TILES = SHORT_CAUSAL_TILES | {(128, 128): Tile(2, 64, 3, False, "registers")}

# Tiles of a long causal problem end at different keys. If they begin with the same key, more of
# them read the same blocks at the same time. In short KV loops this gains less than it costs to end
# with a masked block.
LONG_CAUSAL = 8192  # keys
LONG_CAUSAL_TILES = {(128, 128): Tile(2, 128, 2, False, "registers", ascends=True)}

# The keys of the last block's step, in one tile of scores or, of 80 keys, in one of 64 and one of
# 16, and the part of a KV loop that it must save. With 128 columns, Triton 3.9 spills registers for
# more than 32 keys.
LAST_WIDTHS = (16, 32, 64, 80)
WIDEST_OF_128_COLUMNS = 32
LEAST_SAVING = 0.03

# Tiles of 128 rows and above head dim 128 of 64 keys, of which the usual tiles of block masks are
# multiples.
BLOCK_MASK_TILES = SHORT_CAUSAL_TILES | dict.fromkeys([(144, 144), (160, 160), (192, 128)], UNLIKE)


@fact
def reads_each(program: str) -> bool:
    """Whether a score function reads a number for each score, query or key of a tile, for whose
    addresses three consumers lack the registers.
    """
    if not program:
        return False
    facts = Writer(parsed(program)).facts
    return any(facts.axes(line.name) for line in parsed(program).lines if line.op in READS)


def has_tile(problem: AttentionProblem) -> bool:
    """Whether there are tiles for the problem's head dims."""
    return max(problem.D, problem.Dv) <= MAX_HEAD_DIM


def tile_of(problem: AttentionProblem) -> Tile:
    """The tile for a problem."""
    options, head_dims = problem.options, padded_pair(problem)
    of_mask: dict[tuple[int, int], Tile] = {}
    if problem.block_tile is not None:
        of_mask = BLOCK_MASK_TILES
    elif problem.options.dropout_p > 0:
        of_mask = DROPOUT_TILES
    elif reads_each(problem.options.score_mod):
        of_mask = SHORT_CAUSAL_TILES
    elif problem.spans > 0:
        # Three consumers lack the registers for two intervals.
        fits_long = problem.spans == 1 and problem.N > SHORT_CAUSAL
        of_mask = {} if fits_long else SHORT_CAUSAL_TILES
    elif _sees_few_keys(problem):
        of_mask = NARROW_TILES
    elif not problem.facts:
        of_mask = UNMASKED_TILES | (SHORT_CAUSAL_TILES if _fits_two_consumers(problem) else {})
    elif options.window_right == 0 and problem.N <= SHORT_CAUSAL:
        of_mask = SHORT_CAUSAL_TILES
    elif _is_plain_causal(problem) and problem.N > LONG_CAUSAL:
        of_mask = LONG_CAUSAL_TILES
    return of_mask.get(head_dims) or TILES.get(head_dims, UNLIKE)


def _sees_few_keys(problem: AttentionProblem) -> bool:
    """Whether tiles of queries see few keys: through a narrow window, or under a causal mask.

    A causal batch has up to `FEW_KEYS` keys, or twice as many if it is packed, because then most
    sequences are shorter than the longest one, or has 128 columns, where it measured faster. Parts
    of sequences belong to long ones.
    """
    if problem.runs > 0:
        return False
    left, right = problem.options.window_left, problem.options.window_right
    if left is not None and right is not None and left + right < FEW_KEYS:
        return True
    may_be_longer = problem.layout == "packed" or padded_pair(problem) == (128, 128)
    longest = SHORT_CAUSAL if may_be_longer else FEW_KEYS
    return right == 0 and longest >= problem.N


def _fits_two_consumers(problem: AttentionProblem) -> bool:
    """Whether tiles of two consumers have so many fewer rows beyond the last query of a dense batch
    than those of three that they are faster, though each block is slower.
    """
    two, three = (-(-problem.M // rows) * rows for rows in (2 * CONSUMER_ROWS, 3 * CONSUMER_ROWS))
    return problem.layout == "dense" and TWO_CONSUMERS_COST * two < three


def _is_plain_causal(problem: AttentionProblem) -> bool:
    """Whether the causal mask is all that changes scores, and all sequences are as long as the
    tensors.

    Softcap, ALiBi and score functions need more registers than the tile of long problems leaves. A
    sequence that ends inside a block needs its last block first, where it is cleared.
    """
    options = problem.options
    causal = options.window_right == 0 and options.window_left is None
    whole = problem.layout == "dense" and not problem.has_lengths
    linear = options.softcap == 0 and not problem.has_alibi and not options.score_mod
    return causal and options.attention_chunk == 0 and whole and linear


@dataclass(frozen=True)
class KernelConfig:
    """The compile-time constants of the kernel, with reasons in docs/compilation.md. Lengths and
    strides are not among them and recompile nothing, except that short and long causal problems,
    narrow windows and few queries may have another tile, and a last block of few keys its own step.
    """

    BITS: int  # bits of an element of Q, K, V and P
    CONSUMERS: int
    BLOCK_M: int
    BLOCK_N: int
    LAST_KEYS: int  # keys of the last block that are multiplied, see `last_keys`
    BLOCK_D: int  # columns of a tile of keys; a second tile has the tail
    TAIL_D: int
    BLOCK_DV: int
    TAIL_DV: int
    DV: int
    STAGES: int
    Q_SLOTS: int
    HAS_Q_IN_REGISTERS: bool
    IS_Q_REUSED: bool  # the output reuses the shared memory of the queries
    HAS_PING_PONG: bool
    WAITS: str  # when to wait for the output of a block: `WAITS`
    IS_LINEAR: bool  # a score is a product times a positive scale, nothing else
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_CHUNK: bool
    HAS_BLOCK_MASK: bool
    HAS_SPAN: bool  # one interval of keys of each row, without lists, see `schedule.py`
    SPANS: int  # intervals of each row, with lists; 0 without spans
    HAS_LISTS: bool  # tiles visit the blocks of lists: those of a block mask, or of spans
    HAS_SOFTCAP: bool
    HAS_ALIBI: bool
    SCORE_MOD: Any  # the score function, which `launch.config_of` writes
    HAS_DROPOUT: bool
    DROPOUT_BITS: int  # of a score's random number
    IS_PACKED: bool
    IS_RAGGED: bool  # sequences can be shorter than the tensors
    IS_ASCENDING: bool  # the KV loop visits the first block of keys first, not the last one
    RUNS: int  # of positions of a sequence, see `positions_of`; 0: tensors hold whole sequences
    IS_PARTIAL: bool  # the output is a part of a sum and stays float32
    HAS_HIDDEN_KEYS: bool  # a key that no query sees may hold anything, see `schedule.Kept`
    HAS_STATISTICS: bool  # also the largest score of each row
    HAS_ENTROPY: bool  # and its entropy
    PAGE_SIZE: int  # 0: not paged
    PAGE_BOX: int  # rows of K or V that one copy loads from a page; 0 if not paged


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Why the Hopper backend cannot run `problem`; empty when it can."""
    reasons = device_reasons(problem)
    reasons += dtype_reasons(problem, DTYPES)
    reasons += head_dim_reasons(problem, MAX_HEAD_DIM)
    reasons += head_dim_step_reasons(problem, HEAD_DIM_STEP)
    reasons += _page_reasons(problem)
    reasons += _part_reasons(problem)
    reasons += _dropout_reasons(problem)
    reasons += _span_reasons(problem)
    reasons += _score_mod_reasons(problem)
    if problem.M < FEWEST_QUERIES:
        reasons.append(f"{problem.M} queries (at least {FEWEST_QUERIES})")
    if problem.N == 0:
        reasons.append("no keys (at least 1)")
    return reasons + _option_reasons(problem) + _block_mask_reasons(problem)


def device_reasons(problem: AttentionProblem) -> list[str]:
    reasons = []
    if problem.device_type != "cuda":
        reasons.append(f"tensors are on {problem.device_type} (this backend: cuda)")
    elif torch.version.hip is not None:
        reasons.append("ROCm (this backend: NVIDIA Hopper)")
    elif problem.capability != CAPABILITY:
        reasons.append(f"compute capability {dotted(problem.capability)} (this backend: 9.0)")
    if TRITON_VERSION is None:
        reasons.append("the package triton is not installed (pip install triton)")
    elif TRITON_VERSION < OLDEST_TRITON:
        reasons.append(f"Triton {dotted(TRITON_VERSION)} (at least {dotted(OLDEST_TRITON)})")
    return reasons


def _option_reasons(problem: AttentionProblem) -> list[str]:
    not_here = {
        "bias": problem.has_bias,
        "lists of keys": problem.has_key_index,
        "probabilities": problem.wants_probabilities,
        "float8 keys and values": problem.has_float8_keys,
        "a negative window side": _has_negative_side(problem),
        "gradients of a cache": is_cached(problem) and problem.needs_grad,
        "a mask of spans over a cache": is_cached(problem) and problem.spans > 0,
        "left pads of pages": problem.page_size > 0 and problem.has_cache_rows,
        "gradients of alibi_slopes on parts of sequences": (problem.runs > 0 or problem.is_partial)
        and problem.options.alibi_needs_grad,
        "gradients of a dense batch with lengths": problem.layout == "dense"
        and problem.has_lengths
        and problem.needs_grad,
    }
    reasons = [f"{name} (not on this backend)" for name, asked in not_here.items() if asked]
    if problem.has_statistics and (problem.has_alibi or problem.options.score_mod):
        reasons.append("statistics with ALiBi, relative_bias or score_mod (not on this backend)")
    return reasons


def is_cached(problem: AttentionProblem) -> bool:
    """Whether the keys of a sequence are in pages, in any row of a cache or after a left pad, or
    queries are packed and keys are not.
    """
    has_other_rows = problem.page_size > 0 or problem.has_cache_rows
    return has_other_rows or problem.layout == "packed_queries"


def few_tiles(problem: AttentionProblem) -> str:
    """Why Triton's kernels are faster, if they are: they split keys where tiles of queries would
    leave most multiprocessors idle, or most of packed sequences over a cache may have few rows.
    """
    if problem.layout == "packed_queries":
        has_few_rows = problem.M * problem.group < FEWEST_PACKED_ROWS
        return f"fewer than {FEWEST_PACKED_ROWS} rows of a key head" if has_few_rows else ""
    if not _is_split_by_triton(problem):
        return ""
    BLOCK_M = tile_of(problem).consumers * CONSUMER_ROWS
    has_few = problem.B * problem.Hq * -(-problem.M // BLOCK_M) < FEWEST_TILES
    return f"fewer than {FEWEST_TILES} tiles of queries" if has_few else ""


def _is_split_by_triton(problem: AttentionProblem) -> bool:
    """Whether Triton's kernels split the KV loop of a forward, and it is so long that this pays."""
    if problem.M > MOST_SPLIT_QUERIES or problem.dtype not in DTYPES:
        return False
    options = problem.options
    is_whole = not (problem.needs_grad or problem.has_statistics or problem.is_partial)
    is_bounded = options.window_left is not None or options.attention_chunk > 0
    is_long = problem.N >= FEWEST_SPLIT_KEYS and not is_bounded and not problem.has_own_mask
    return is_whole and problem.runs == 0 and is_long and options.num_splits != 1


def _page_reasons(problem: AttentionProblem) -> list[str]:
    """Why the kernel cannot read pages."""
    if problem.page_size % LEAST_BOX == 0:
        return []
    return [f"pages of {problem.page_size} tokens (on this backend: multiples of {LEAST_BOX})"]


def _part_reasons(problem: AttentionProblem) -> list[str]:
    """Why the kernels cannot run a call on parts of sequences, or on a part of the keys."""
    if not problem.runs and not problem.is_partial:
        return []
    reasons = []
    if problem.runs > MAX_RUNS:
        reasons.append(f"parts of sequences in {problem.runs} runs (at most {MAX_RUNS})")
    if problem.runs and problem.has_alibi:
        reasons.append("ALiBi on parts of sequences (not on this backend)")
    is_plain = not problem.runs and not problem.has_lengths
    is_one_sequence = problem.layout == "dense" and problem.B == 1 and is_plain
    if problem.layout != "packed" and not is_one_sequence:
        reasons.append("parts of sequences in a dense batch (on this backend: packed)")
    return reasons


def _dropout_reasons(problem: AttentionProblem) -> list[str]:
    """Why the kernels cannot draw the random numbers of dropout."""
    if problem.options.dropout_p == 0:
        return []
    if problem.runs or problem.has_sequences or problem.is_partial:
        return ["dropout on parts of sequences (on this backend: whole sequences)"]
    return []


def _score_mod_reasons(problem: AttentionProblem) -> list[str]:
    """Why the kernels cannot call a score function or its derivative."""
    options, reasons = problem.options, score_mod_reasons(problem)
    if not options.score_mod:
        return []
    if options.dropout_p > 0:
        reasons.append("dropout with a score_mod or relative_bias (not on this backend)")
    is_part = problem.runs or problem.has_sequences or problem.is_partial or options.first_head
    if is_part and options.has_indexed_scores:
        reasons.append("a score_mod or relative_bias on parts of sequences (not on this backend)")
    if may_be_large(options.score_mod):
        reasons.append("a score_mod that may add huge numbers, as masks do (not on this backend)")
    return reasons


@fact
def may_be_large(program: str) -> bool:
    """Whether a score function may make all scores of a row huge, but finite: it has a large
    number, or reads one for each query or key, as a mask of numbers does.

    The kernels have exponents of 2, and the log-sum-exp, in float32. Both lose the differences of
    scores that are so large, which Triton's kernels keep.
    """
    lines = parsed(program).lines
    facts = Writer(parsed(program)).facts
    if any(line.op == VALUES and not facts.axes(line.name) <= {DIFFERENCE} for line in lines):
        return True
    numbers = (
        x
        for line in lines
        if line.op != VALUES
        for x in line.arguments
        if isinstance(x, (int, float))
    )
    return any(LARGE_NUMBER <= abs(x) < inf for x in numbers)


def _block_mask_reasons(problem: AttentionProblem) -> list[str]:
    """Why the kernel cannot loop over the lists of a block mask."""
    if problem.block_tile is None:
        return []
    reasons = []
    if has_tile(problem):
        tile = tile_of(problem)
        wanted = tile.consumers * CONSUMER_ROWS, tile.BLOCK_N
        if any(size % step for size, step in zip(problem.block_tile, wanted, strict=True)):
            found, step = ("{} x {}".format(*pair) for pair in (problem.block_tile, wanted))
            reasons.append(f"block_mask tiles of {found} (on this backend: multiples of {step})")
    if problem.layout != "dense" or problem.has_lengths:
        reasons.append("block_mask with sequences of different lengths (not on this backend)")
    return reasons


def _span_reasons(problem: AttentionProblem) -> list[str]:
    """Why the kernel cannot mask by spans."""
    if problem.spans == 0:
        return []
    reasons = []
    if problem.spans > MOST_SPANS:
        reasons.append(
            f"a mask of {problem.spans} intervals (on this backend: at most {MOST_SPANS})"
        )
    if problem.block_tile is not None:
        reasons.append("a mask of spans together with block_mask (not on this backend)")
    if problem.runs:
        reasons.append("a mask of spans over parts of sequences (not on this backend)")
    return reasons


def _has_negative_side(problem: AttentionProblem) -> bool:
    """Whether a window may exclude the query's own position, so that the query may see no key."""
    sides = (problem.options.window_left, problem.options.window_right)
    return any(side is not None and side < 0 for side in sides)


@memoised(4096)
def plan(problem: AttentionProblem) -> KernelConfig:
    """The compile-time constants for a problem."""
    options = problem.options
    (BLOCK_D, TAIL_D), (BLOCK_DV, TAIL_DV) = (HEAD_DIMS[size] for size in padded_pair(problem))
    tile = tile_of(problem)
    has_softcap, packed = options.softcap > 0, problem.layout != "dense"
    return KernelConfig(
        BITS=16,
        CONSUMERS=tile.consumers,
        BLOCK_M=tile.consumers * CONSUMER_ROWS,
        BLOCK_N=tile.BLOCK_N,
        LAST_KEYS=last_keys(problem, tile),
        BLOCK_D=BLOCK_D,
        TAIL_D=TAIL_D,
        BLOCK_DV=BLOCK_DV,
        TAIL_DV=TAIL_DV,
        DV=problem.Dv,
        STAGES=tile.stages,
        Q_SLOTS=tile.consumers * (2 if tile.q == "twice" else 1),
        HAS_Q_IN_REGISTERS=tile.q in ("registers", "held"),
        IS_Q_REUSED=tile.q in ("once", "held"),
        HAS_PING_PONG=tile.ping_pong,
        WAITS=tile.waits,
        IS_LINEAR=not (has_softcap or problem.has_alibi or options.score_mod)
        and options.softmax_scale > 0,
        HAS_LEFT=options.window_left is not None,
        HAS_RIGHT=options.window_right is not None,
        HAS_CHUNK=options.attention_chunk > 0,
        HAS_BLOCK_MASK=problem.block_tile is not None,
        HAS_SPAN=problem.spans > 0 and not lists_spans(problem),
        SPANS=problem.spans if lists_spans(problem) else 0,
        HAS_LISTS=problem.block_tile is not None or lists_spans(problem),
        HAS_SOFTCAP=has_softcap,
        HAS_ALIBI=problem.has_alibi,
        SCORE_MOD=None,
        HAS_DROPOUT=options.dropout_p > 0,
        DROPOUT_BITS=random_bits(options.dropout_p),
        IS_PACKED=packed,
        IS_RAGGED=packed or problem.has_lengths,
        IS_ASCENDING=tile.ascends,
        RUNS=problem.runs,
        IS_PARTIAL=problem.is_partial,
        HAS_HIDDEN_KEYS=problem.has_hidden_keys,
        HAS_STATISTICS=problem.has_statistics,
        HAS_ENTROPY=problem.has_statistics and problem.has_entropy,
        PAGE_SIZE=problem.page_size,
        PAGE_BOX=gcd(problem.page_size, tile.BLOCK_N) if problem.page_size else 0,
    )


def last_keys(problem: AttentionProblem, tile: Tile) -> int:
    """The number of keys that the KV loop's step of the last block multiplies: those of a block, or
    one of `LAST_WIDTHS`. Each width is one more variant of the kernel to compile, so it must save
    `LEAST_SAVING` of the loop.
    """
    BLOCK_N = tile.BLOCK_N
    whole, rest = divmod(problem.N, BLOCK_N)
    if whole == 0 or rest == 0 or not _sees_whole_tensors(problem):
        return BLOCK_N
    width = next(width for width in (*LAST_WIDTHS, BLOCK_N) if width >= rest)
    spills = max(padded_pair(problem)) >= 128 and width > WIDEST_OF_128_COLUMNS
    saving = (1 - width / BLOCK_N) / (whole + 1)
    return BLOCK_N if spills or saving < LEAST_SAVING else width


def _sees_whole_tensors(problem: AttentionProblem) -> bool:
    """Whether every query of a dense batch sees all keys of the tensor, and nothing in the scores
    counts by whole blocks, as dropout, ALiBi and score functions do.
    """
    whole = problem.layout == "dense" and not problem.has_lengths and problem.runs == 0
    unmasked = not problem.facts and problem.block_tile is None and problem.spans == 0
    counts = problem.options.dropout_p > 0 or problem.has_alibi or problem.options.score_mod != ""
    return whole and unmasked and not counts


def lists_spans(problem: AttentionProblem) -> bool:
    """Whether a kernel lists the blocks of a mask of spans. With one interval for each row, the
    forward needs no lists, but for lengths it lacks the registers, and beyond 64 columns lists are
    faster: fewer consumers share one, and the loop lacks instructions for the bounds of rows.
    """
    is_whole = problem.layout == "dense" and not problem.has_lengths
    reads_rows = problem.spans == 1 and is_whole and max(problem.D, problem.Dv) <= 64
    return problem.spans > 0 and not reads_rows


def swizzle_of(problem: AttentionProblem) -> int:
    """The number of heads whose tiles run at the same time (the head swizzle).

    If tiles differ in length, equal tiles of several heads run together: as many heads as fit the
    L2 cache, rounded up to whole groups. Query heads of a group read the same keys and values, and
    equal tiles of them read the same blocks at about the same time.
    """
    options = problem.options
    is_even = options.window_right is None and options.attention_chunk == 0
    if is_even and problem.block_tile is None and problem.spans == 0:
        return 1
    of_a_head = problem.N * (problem.D + problem.Dv) * 2
    fitting = min(max(CACHED_BYTES // of_a_head, 1), WIDEST_SWIZZLE)
    return -(-fitting // problem.group) * problem.group


def padded(head_dim: int, sizes: Iterable[int] = HEAD_DIMS) -> int:
    """The smallest native head dim, of `sizes`, that is at least `head_dim`."""
    return next(size for size in sizes if head_dim <= size)


def padded_pair(problem: AttentionProblem) -> tuple[int, int]:
    """The number of columns of the tiles of keys and of those of values."""
    pair = padded(problem.D), padded(problem.Dv)
    if pair in TILES:
        return pair
    return padded(problem.D, UNLIKE_HEAD_DIMS), padded(problem.Dv, UNLIKE_HEAD_DIMS)


def describe_forward(problem: AttentionProblem) -> str:
    """The plan of the forward as text, for `explain`."""
    config = plan(problem)
    tiles = f"{config.BLOCK_M} x {config.BLOCK_N}"
    if config.LAST_KEYS < config.BLOCK_N:
        tiles += f", {config.LAST_KEYS} keys of the last block"
    return (
        f"forward: tiles of {tiles}, head dim padded to "
        f"{config.BLOCK_D + config.TAIL_D}, {config.CONSUMERS} consumer warpgroups and a producer "
        f"warp, {config.STAGES} stages"
    )
