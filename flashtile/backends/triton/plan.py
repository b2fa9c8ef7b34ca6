"""How the Triton backend runs a problem: tiles, warps and stages for each architecture, head dim
and dtype.

Pure Python: nothing here imports Triton, so that `explain` works where Triton is missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...dropout import random_bits
from ...gpu import hardware
from ...gpu.memory import MAX_SPLITS, MOST_PART_ROWS
from ...gpu.rows import ALIGNMENT, ROW_STEP
from ...lru import clear_caches, memoised
from ...problem import Appending, AttentionProblem
from ...score_mod.rows import bytes_per_row, elements_per_word

MAX_HEAD_DIM = 512
# Largest head dim of queries and keys without gradients: the latent keys of DeepSeek's MLA, whose
# first 512 columns are the values. The other columns (the tail) are a separate narrow tile.
MAX_KEY_HEAD_DIM = 576

# Above this head dim dK and dV have separate passes, because both would not fit the registers.
UNSPLIT_HEAD_DIM = 128

# Smallest number of scores of a call in which descriptors pay off.
DESCRIPTOR_WORK = 2**24

# Number of heads whose programs run at the same time and share the L2 cache.
HEAD_SWIZZLE = 8

# Up to so many queries and keys, one program has all those of a head: see `short_sequences.py`.
SHORT = 64


# "keys": dK and dV, above UNSPLIT_HEAD_DIM only dK; "queries": dQ; "values": dV if it has a
# separate pass.
PASSES = ("forward", "keys", "queries", "values")


class Tile(NamedTuple):
    """Rows and keys of a tile, and the compiler's numbers of warps and stages."""

    BLOCK_M: int
    BLOCK_N: int
    warps: int
    stages: int


# One row per head dim (rounded up to a power of two), one tile for each of PASSES.
# Shared memory per program limits every row: sm_80 163 KiB; sm_86, sm_89, sm_120 99 KiB;
# sm_90, sm_100 227 KiB; AMD CDNA 64 KiB.
HALF: dict[str, dict[int, tuple[Tile, ...]]] = {
    "sm_80": {
        64: (Tile(128, 64, 4, 3), Tile(32, 128, 8, 2), Tile(128, 64, 8, 2)),
        128: (Tile(128, 64, 8, 3), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
        256: (Tile(64, 32, 8, 2), Tile(32, 64, 8, 1), Tile(64, 32, 8, 2), Tile(32, 64, 8, 1)),
        512: (Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
    },
    "sm_86": {
        64: (Tile(128, 64, 4, 2), Tile(32, 128, 8, 2), Tile(64, 32, 8, 2)),
        128: (Tile(128, 32, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
        256: (Tile(64, 32, 8, 2), Tile(16, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
        512: (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    },
    "sm_90": {
        64: (Tile(64, 64, 4, 3), Tile(128, 64, 4, 2), Tile(128, 64, 8, 3)),
        128: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 3)),
        256: (Tile(128, 64, 8, 2), Tile(32, 128, 8, 2), Tile(64, 64, 4, 2), Tile(64, 128, 8, 2)),
        512: (Tile(32, 32, 8, 2), Tile(16, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
    },
    "sm_100": {
        64: (Tile(128, 128, 8, 3), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
        128: (Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
        256: (Tile(128, 64, 8, 1), Tile(64, 64, 8, 1), Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)),
        512: (Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
    },
    "pointers": {  # for sm_90 and sm_100, in calls too small for descriptors
        64: (Tile(64, 64, 4, 3), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
        128: (Tile(64, 64, 4, 3), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
        256: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 1), Tile(32, 32, 8, 2), Tile(64, 32, 8, 1)),
        512: (Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
    },
    "gfx": {
        64: (Tile(128, 64, 4, 1), Tile(64, 32, 4, 1), Tile(64, 64, 4, 1)),
        128: (Tile(128, 64, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
        256: (Tile(64, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),
        512: (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    },
}

# With a block mask every step reads a list of tiles, so larger steps pay off in the forward: if the
# mask's tiles consist of them. Other tiles are those of forward and dQ.
BLOCK_MASK_FORWARD: dict[str, dict[int, Tile]] = {
    "sm_90": {64: Tile(128, 128, 8, 3), 128: Tile(128, 128, 8, 2)},
}
SMALL_BLOCK_MASK: dict[str, Tile] = {"sm_90": Tile(64, 64, 4, 2)}  # head dims to 128

# Score functions and a relative bias take registers in the backward: (dK and dV, dQ).
SCORED_BACKWARD: dict[str, dict[int, tuple[Tile, Tile]]] = {
    "sm_90": {
        64: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
        128: (Tile(32, 64, 4, 3), Tile(128, 64, 8, 3)),
    },
}

# A tile of bias takes registers and shared memory: (forward, dK and dV, dQ).
BIASED: dict[str, dict[int, tuple[Tile, Tile, Tile]]] = {
    "sm_90": {
        64: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
        128: (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(128, 64, 8, 3)),
    },
}

# The gradients of a bias, and in bands of square tiles those of numbers by distance and of captured
# numbers: with two tiles in flight, and 8 warps, which need half of the registers.
BANDS: dict[str, dict[int, Tile]] = {
    "sm_90": dict.fromkeys((64, 128), Tile(64, 64, 8, 2)),
}

# Keys above MAX_HEAD_DIM are loaded through pointers, with two tiles in flight; not measured.
WIDE_KEY_FORWARD = dict.fromkeys(("sm_80", "sm_90", "sm_100"), Tile(32, 32, 8, 2))

# The same where a tile of keys is that of values, too. Two of 64 keys fit the shared memory beside
# 64 rows of queries, whose output fills the registers of two warpgroups.
LATENT_FORWARD = {"sm_90": Tile(64, 64, 8, 2)}
# For up to FEW_ROWS rows (keys, warps, stages): measured.
LATENT_FEW_ROWS = {"sm_90": (32, 4, 3)}

# Tiles (keys, warps, stages) for up to FEW_ROWS rows of queries, as in decoding. Reading keys and
# values takes most of the time, so two programs share a multiprocessor and each has tiles in
# flight, or one has more (sm_90, head dim 128). GPUs whose matrix instructions need no 64 rows (all
# but sm_90) use them for up to 32 rows.
FEW_ROWS = 16
FEW_ROWS_FORWARD: dict[str, dict[int, tuple[int, int, int]]] = {
    "sm_80": {64: (128, 4, 2), 128: (64, 4, 2), 256: (32, 4, 2), 512: (16, 4, 2)},
    "sm_86": {64: (64, 4, 2), 128: (32, 4, 2), 256: (16, 4, 2), 512: (16, 4, 1)},
    "sm_90": {64: (128, 4, 3), 128: (128, 4, 3), 256: (32, 4, 3), 512: (16, 4, 3)},
    "sm_100": {64: (64, 4, 4), 128: (64, 4, 3), 256: (32, 4, 3), 512: (16, 4, 3)},
    "gfx": {64: (64, 4, 1), 128: (64, 4, 1), 256: (32, 4, 1), 512: (16, 4, 1)},
}
# The same where it differs: for pages, and for split KV loops, as fewer programs run at a time.
PAGES_FORWARD: dict[str, dict[int, tuple[int, int, int]]] = {"sm_90": {128: (128, 4, 2)}}
SPLIT_FORWARD: dict[str, dict[int, tuple[int, int, int]]] = {"sm_90": {128: (64, 4, 3)}}
# The same for a float8 cache on all GPUs, and for a paged one whose KV loop is not split: measured.
FLOAT8_FORWARD = {64: (128, 4, 3), 128: (128, 4, 3), 256: (32, 4, 4), 512: (16, 4, 3)}
FLOAT8_PAGES_FORWARD = {("sm_90", 128): (128, 4, 4)}
# Tiles for more rows, up to ROWS, over contiguous keys in 16 bits.
ROWS, ROWS_FORWARD = 64, {("sm_90", 128): Tile(64, 128, 4, 3)}
# Over packed rows: keys where a word holds four elements, and else; registers of a thread, which
# leave room for so many programs on a multiprocessor. Where rows share lines of memory with those
# of other heads, short parts of the KV loop keep the programs of the heads together.
PACKED_KEYS = {("sm_90", 128): (128, 64)}
PACKED_WARPS_AND_STAGES, PACKED_REGISTERS, PACKED_PER_SM = (4, 3), 128, 4
LINE, PACKED_PART_KEYS = 128, 2048

# Keys of a part of the KV loop of calls that are `batch_invariant`, each of which is summed from
# zero: a multiple of every tile. Programs of few queries have a part each.
PART_KEYS = 1024

# float32 without tensor cores: the tiles are the same on all GPUs.
SINGLE: dict[int, tuple[Tile, ...]] = {
    64: (Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 4, 1)),
    128: (Tile(32, 32, 8, 1), Tile(16, 16, 8, 1), Tile(32, 16, 8, 1)),
    256: (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    512: (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
# float32 on tensor cores, by `precision`. Six products have tiles where they are faster and exact
# enough (log/float32.md); in TF32, other GPUs and head dims use those of `SINGLE`.
SINGLE_ON_TENSOR_CORES: dict[tuple[str, str], dict[int, tuple[Tile, ...]]] = {
    ("bf16x6", "sm_90"): {
        64: (Tile(128, 64, 8, 1), Tile(64, 64, 4, 1), Tile(128, 64, 8, 1)),
        128: (Tile(128, 64, 8, 1), Tile(32, 128, 8, 1), Tile(128, 32, 8, 1), Tile(64, 128, 8, 1)),
    },
    ("tf32", "sm_90"): {
        64: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(128, 64, 8, 2)),
        128: (Tile(128, 32, 8, 2), Tile(32, 64, 8, 2), Tile(128, 32, 8, 2)),
    },
}
# The same with a bias, whose tile takes shared memory, too: (forward, dK or both, dQ).
BF16X6_BIASED: dict[int, tuple[Tile, Tile, Tile]] = {
    64: (Tile(64, 64, 4, 1), Tile(64, 64, 4, 1), Tile(128, 64, 8, 1)),
    128: (Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
}
# The same for up to FEW_ROWS rows of queries (keys, warps, stages).
BF16X6_FEW_ROWS: dict[int, tuple[int, int, int]] = {64: (64, 4, 2), 128: (32, 4, 2)}
# What `explain` says of each `precision`.
PRODUCTS = {
    "ieee": "without tensor cores",
    "tf32": "one product in TF32, as PyTorch's switch for its own products allows",
    "bf16x6": "six products of bfloat16 parts on tensor cores, about as exact as float32",
}
_forced: dict[str, Tile] = {}  # set by `forced_tile`, for all threads

# The rows of `HALF` that an architecture uses; a newer architecture uses the last ones.
ARCHITECTURES: dict[tuple[int, int], str] = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_80",
    (8, 9): "sm_86",
    (9, 0): "sm_90",
    (10, 0): "sm_100",
    (10, 3): "sm_100",
    (12, 0): "sm_86",
    (12, 1): "sm_86",
}
# Rows of `HALF` whose tiles are loaded through descriptors. (sm_120 has TMA too, but less shared
# memory: it uses the rows of sm_86, which leave room for pointers.)
FOR_DESCRIPTORS = ("sm_90", "sm_100")
# Architectures on which the kernels have run and been measured; for others they only compile.
MEASURED = ((9, 0),)


@dataclass(frozen=True)
class KernelConfig:
    """Compile-time parameters of a kernel, but no lengths or strides: see docs/compilation.md."""

    BLOCK_M: int
    BLOCK_N: int
    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    TAIL_D: int  # columns of queries and keys after D, which form a separate tile
    BLOCK_TAIL: int
    GROUP: int  # query heads that share a key head
    IS_PACKED_GROUP: bool  # a tile holds rows of all heads of a group
    PRECISION: str  # how float32 is multiplied: `products.py`
    IS_LINEAR: bool  # a score is a product times a positive scale, nothing else
    HAS_LARGE_SCORES: bool  # scores from the caller's tensors or functions: `tiles.exponentials`
    HAS_HIDDEN_KEYS: bool  # a key that no query sees may hold anything
    HAS_DEAD_ROWS: bool  # as may, in a backward, the gradient of a query that sees no key
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_CHUNK: bool
    HAS_SOFTCAP: bool
    HAS_DROPOUT: bool
    DROPOUT_BITS: int  # of a score's random number
    PAGE_SIZE: int  # 0: not paged
    MASK_TILE_M: int  # 0: no block mask
    MASK_TILE_N: int
    MASK_COVER_M: int  # tiles of the block mask that one of ours may touch
    MASK_COVER_N: int
    HEAD_SWIZZLE: int
    HAS_FLOAT8_KEYS: bool  # float8 keys and values with 16-bit queries
    PAIR: int  # numbers of K and V per loaded word: 2 for float8 (`tiles.unpack_pairs`), else 1
    ALIGNMENT: int  # bytes, 16 or 1: every row of q, k and v starts at a multiple of it
    OUT_ALIGNMENT: int  # the same of dO and of all that kernels write, whose rows follow each other
    HAS_DESCRIPTORS: bool  # tiles are loaded by TMA
    HAS_WGMMA: bool  # on Hopper, and tiles are loaded by TMA: wgmma multiplies them
    IS_SPLIT: bool  # several programs share the KV loop
    IS_CHAINED: bool  # launched early after an append, and the merge early after this kernel
    APPENDING: Appending | None  # new tokens that the kernel appends
    IS_INVARIANT: bool = False  # a row's bits do not depend on the layout
    PART_KEYS: int = 0  # of such a call, keys of a part of the KV loop; 0: it has one part
    SPANS: int = 0  # intervals of keys of each query; 0 without such a mask
    RUNS: int = 0  # of positions, of each sequence; 0: the tensors hold whole sequences
    HAS_LONE_KEYS: bool = False  # dropout: blocks of keys need not be whole
    SCORE_MOD: Any = None  # the score function and its derivative: `plan_with_functions`
    SCORE_GRADIENT: Any = None
    CAPTURED_GRADIENT: Any = None  # see `captured_source`
    CAPTURED_SUMS: Any = None
    CAPTURED_KEPT: int = 0  # tiles of sums that a program keeps for its band
    HAS_STATISTICS: bool = False  # the forward also has those of rows
    HAS_VALUES_IN_KEYS: bool = False  # those before the tail: `has_latents`
    # Of a cache of packed rows: keys, their columns after D, and values (`plan_with_functions`).
    ROW_ALIGNMENT: int = 1  # bytes, at whose multiples rows start
    UNPACK_KEYS: Any = None
    UNPACK_TAIL: Any = None
    UNPACK_VALUES: Any = None


class KernelPlan(NamedTuple):
    """One kernel of a pass."""

    config: KernelConfig
    warps: int
    stages: int
    registers: int | None = None  # the most that a thread may use


class Plan(NamedTuple):
    """The kernels of a call; `scores` has small tiles for row sums and the probabilities."""

    forward: KernelPlan
    split: KernelPlan  # the forward whose KV loop is split
    keys: KernelPlan
    queries: KernelPlan
    values: KernelPlan | None  # None: `keys` also computes dV
    scores: KernelPlan
    bands: KernelPlan  # see `score_gradients.py`
    short: KernelPlan | None = None  # the forward and the backward of `is_short`, instead of others


class ListedPlan(NamedTuple):
    """The kernels of `listed_keys.py`, instead of those of `Plan`."""

    forward: KernelPlan
    queries: KernelPlan  # dQ
    keys: KernelPlan | None  # dK and dV; None: `queries` also adds to them (`adds_to_listed_keys`)


def adds_to_listed_keys(problem: AttentionProblem) -> bool:
    """Whether a query adds its part to dK and dV of what it lists, in any order.

    In a fixed order, a tile of adjacent keys gathers all heads of the queries that list a run in
    it. That takes longer if a run has fewer keys than a group has heads: measured.
    """
    run = problem.options.key_run
    return not problem.options.deterministic and (run == 1 or run < problem.group)


@memoised(4096)
def listed_plan(problem: AttentionProblem, aligned: bool) -> ListedPlan:
    """Tiles for lists of keys: the heads of a query by gathered keys, and adjacent keys by pairs of
    a query and a head.
    """
    head_dim = max(problem.D, problem.Dv)
    is_single, wide = problem.dtype == torch.float32, head_dim > 128
    group = max(16, 1 << (problem.group - 1).bit_length())
    heads = min(group, 32 if wide or is_single else 64)
    most = (16 if wide else 32) if is_single else 32 if wide else 64
    adjacent = max(16, min(1 << (problem.options.key_run.bit_length() - 1), most))
    forward = queries = Tile(heads, most, 4, 1 if is_single else 2)
    is_added = adds_to_listed_keys(problem)
    if is_added:
        # Each part of a group adds to all keys, so few parts are better. Not 32 keys by 64 heads or
        # more: ptxas 12.8 then computes wrong addresses of P, whose rows have 64 bytes.
        is_large = architecture(problem.capability) in FOR_DESCRIPTORS and group > heads
        queries = Tile(heads, most, 4, 1) if not is_large else Tile(2 * heads, most, 8, 1)
        if wide or is_single:
            queries = Tile(16, most, 4, 1)
    warps = 8 if adjacent * head_dim > 32 * 128 else 4  # the sums take registers
    keys = Tile(most, adjacent, warps, 1 if is_single or wide else 2)
    dead = problem.has_dead_rows
    plans = [
        _kernel_plan(problem, tile, False, aligned, False, has_dead_rows=dead)
        for tile in (forward, queries, keys)
    ]
    return ListedPlan(plans[0], plans[1], None if is_added else plans[2])


@memoised(4096)
def plan(problem: AttentionProblem, aligned: bool) -> Plan:
    """Tiles and flags of every kernel that a call may need.

    `aligned`: every row of q, k and v starts at a multiple of 16 bytes.
    """
    invariant = problem.options.batch_invariant
    described = aligned and _pays_descriptors(problem)
    head_dim = max(problem.D, problem.Dv)
    table = architecture(problem.capability)
    # The tiles of calls that are `batch_invariant` depend on no size but the head dim.
    if table in FOR_DESCRIPTORS and not described and not invariant:
        table = "pointers"  # smaller tiles, because pointers take registers
    kind = "bias" if problem.has_bias else "16-bit"
    if problem.dtype == torch.float32:
        table, kind = architecture(problem.capability), precision(problem)
    forward, keys, queries, *values = tiles_for(table, head_dim, kind)
    if problem.block_tile is not None and problem.dtype != torch.float32:
        forward, queries = _for_block_mask(problem, forward, queries)
    elif problem.D > MAX_HEAD_DIM and problem.dtype != torch.float32:
        wide = LATENT_FORWARD if has_latents(problem) else {}
        name = architecture(problem.capability)
        forward = wide.get(name) or WIDE_KEY_FORWARD.get(name, forward)
    if (problem.options.score_mod or problem.relative_distance is not None) and (
        problem.dtype != torch.float32
    ):
        keys, queries = SCORED_BACKWARD.get(table, {}).get(column_of(head_dim), (keys, queries))
    rows = problem.M
    packed = problem.group > 1 and problem.block_tile is None and rows <= forward.BLOCK_M // 2
    if packed:
        rows *= problem.group
    # A tile of bias takes registers, too.
    if problem.has_bias or problem.relative_distance is not None:
        forward = forward._replace(
            BLOCK_M=min(forward.BLOCK_M, 64), BLOCK_N=min(forward.BLOCK_N, 64)
        )
        if precision(problem) == "bf16x6":
            forward, keys, queries = BF16X6_BIASED[column_of(head_dim)]
    scores = Tile(min(queries.BLOCK_M, 64), min(queries.BLOCK_N, 64), queries.warps, 1)
    bands = scores
    if precision(problem) == "bf16x6":
        bands = scores._replace(warps=8)
    elif problem.dtype != torch.float32:
        bands = BANDS.get(architecture(problem.capability), {}).get(column_of(head_dim), scores)
    split = forward
    if not invariant:
        split = _for_few_rows(forward, rows, problem, is_split=True)
        forward = _for_few_rows(forward, rows, problem, is_split=False)
    if problem.page_size > 0:  # half of the stages load the page indices that other loads need
        forward, split = (tile._replace(stages=2 * tile.stages - 1) for tile in (forward, split))
    pair = _elements_per_word(problem, aligned)
    dead = problem.has_dead_rows
    return Plan(
        forward=_kernel_plan(problem, forward, packed, aligned, described, pair=pair),
        split=_kernel_plan(problem, split, packed, aligned, False, is_split=True, pair=pair),
        keys=_kernel_plan(problem, keys, False, aligned, described, has_dead_rows=dead),
        queries=_kernel_plan(problem, queries, False, aligned, described, has_dead_rows=dead),
        values=_kernel_plan(problem, values[0], False, aligned, described, has_dead_rows=dead)
        if values
        else None,
        scores=_kernel_plan(problem, scores, False, aligned, False),
        bands=_kernel_plan(problem, bands, False, aligned, False),
        short=_kernel_plan(problem, short_tile(problem), False, aligned, False, has_dead_rows=dead)
        if is_short(problem)
        else None,
    )


def has_latents(problem: AttentionProblem) -> bool:
    """Whether a tile of keys before the tail is the tile of values, too. Calls that are
    `batch_invariant` have the same tiles wherever their values lie, and bytes of packed rows may
    mean other values than keys.
    """
    options = problem.options
    is_view = problem.has_values_in_keys and not (options.batch_invariant or options.k_unpack)
    return is_view and problem.Dv == MAX_HEAD_DIM < problem.D


def _elements_per_word(problem: AttentionProblem, aligned: bool) -> int:
    """How many neighbouring elements a word of two bytes holds, of keys and of values."""
    options = problem.options
    if problem.has_float8_keys:
        return 2 if aligned and problem.D % 2 == problem.Dv % 2 == 0 else 1
    if not options.k_unpack or problem.dtype == torch.float32:
        return 1
    D = min(problem.D, MAX_HEAD_DIM)
    return min(
        elements_per_word(options.k_unpack, D), elements_per_word(options.v_unpack, problem.Dv)
    )


def _fitting_pair(pair: int, rows: int, head_dim: int) -> int:
    """The most elements of a word that have tiles of their own, which are 16 columns wide."""
    while pair > 1 and (rows > 32 or pair * 16 > head_dim):
        pair //= 2
    return pair


def is_short(problem: AttentionProblem) -> bool:
    """Whether the kernels of `short_sequences.py` run the call: one tile has all queries and keys
    of a head. One query is decoding, where the heads of a group share a tile, and keys grow.
    """
    fits = problem.dtype != torch.float32 and max(problem.D, problem.Dv) <= UNSPLIT_HEAD_DIM
    fits = fits and 1 < problem.M <= SHORT and 0 < problem.N <= SHORT
    cached = problem.page_size or problem.has_cache_rows or problem.has_float8_keys
    cached = cached or problem.appending is not None or bool(problem.options.k_unpack)
    is_part = problem.runs > 0 or problem.has_sequences or problem.is_partial
    masked = problem.has_own_mask
    other = problem.options.score_mod or problem.options.batch_invariant or problem.has_statistics
    return fits and not (cached or is_part or masked or other)


def short_tile(problem: AttentionProblem) -> Tile:
    """One tile for a head.

    Two warps multiply without wgmma, so narrow heads need no padding; larger tiles would spill
    their registers. A group of heads keeps dK and dV in registers, too.
    """
    rows, keys = (max(16, 1 << (size - 1).bit_length()) for size in (problem.M, problem.N))
    size = max(rows, keys) * max(problem.D, problem.Dv)
    if size <= 64 * 32:
        return Tile(rows, keys, 2, 1)
    return Tile(rows, keys, 8 if size > 64 * 64 and problem.group > 1 else 4, 1)


def tiles_for(
    name: str, head_dim: int, kind: str = "16-bit", is_paged: bool = False
) -> tuple[Tile, ...]:
    """Tiles of `PASSES` for a name in `HALF`: measured tiles if there are any, else the table's.

    `kind` is "16-bit", "bias" (in 16 bits), a float32 call's `precision`, or, for the forward of
    few rows in 16 bits, "decoding" or "split-decoding". Only the table's tiles for decoding depend
    on whether the keys are in pages.
    """
    column = column_of(head_dim)
    if kind in PRODUCTS:
        tiles = SINGLE_ON_TENSOR_CORES.get((kind, name), {}).get(column, SINGLE[column])
    elif kind.endswith("decoding"):
        few = FEW_ROWS_FORWARD[name][column]
        if kind == "split-decoding":
            few = SPLIT_FORWARD.get(name, {}).get(column, few)
        elif is_paged:
            few = PAGES_FORWARD.get(name, {}).get(column, few)
        tiles = (Tile(FEW_ROWS, *few),)
    elif kind == "bias":
        tiles = BIASED.get(name, {}).get(column) or tiles_for(name, head_dim)
    else:
        tiles = HALF[name][column]
    measured = measured_tiles(name)
    return tuple(
        _forced.get(kernel) or Tile(*measured.get(f"{kind} {column} {kernel}", tile))
        for kernel, tile in zip(PASSES, tiles, strict=False)
    )


def precision(problem: AttentionProblem) -> str:
    """How tiles are multiplied: `products.py`. Tensor cores of sm_80 lose too much in sums for six
    products, those of sm_86, sm_89 and sm_120 are too slow, and Triton 3.6 cannot compile them for
    sm_100.
    """
    if problem.dtype != torch.float32 or hardware.is_rocm() or problem.capability is None:
        return "ieee"
    if problem.allows_tf32 and problem.capability >= (8, 0):
        return "tf32"
    return exact_precision(architecture(problem.capability), max(problem.D, problem.Dv))


def exact_precision(name: str, head_dim: int) -> str:
    """`precision` where TF32 is not allowed, for a name in `HALF`."""
    columns = SINGLE_ON_TENSOR_CORES.get(("bf16x6", name), {})
    return "bf16x6" if column_of(head_dim) in columns else "ieee"


@contextmanager
def forced_tile(kernel: str, tile: Tile) -> Iterator[None]:
    """Force one pass to use one tile, to measure it: for all threads, within the block."""
    global _forced
    before, _forced = _forced, _forced | {kernel: tile}
    clear_caches()  # plans, and everything derived from them
    try:
        yield
    finally:
        _forced = before
        clear_caches()


def column_of(head_dim: int) -> int:
    """The head dim of the table's row."""
    return next(size for size in (64, 128, 256, 512) if head_dim <= size or size == MAX_HEAD_DIM)


# The files of tiles that `flashtile tune` has measured: one for each name of a GPU.
#
# A file is used only on GPUs of its name, because those of one architecture differ in the numbers
# that decide which tile is fastest: multiprocessors, memory and clocks of an H100 and an H200, of
# an A10 and an RTX 3090. Machines of a cluster that share a folder each find their own.


class Tuned(NamedTuple):
    """What a file says."""

    path: Path
    device: str  # PyTorch's name of the GPU that it was measured on
    capability: tuple[int, int]
    tiles: dict[str, list[int]]  # {kind, head dim and pass: tile}


def tuned_folder() -> Path:
    """The folder that `flashtile tune` writes to: FLASHTILE_CACHE, or the user's cache folder."""
    chosen = os.environ.get("FLASHTILE_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flashtile"


@memoised(1)
def tuned_files() -> tuple[Tuned, ...]:
    """All files in `tuned_folder`."""
    return tuple(read_tuned(path) for path in sorted(tuned_folder().glob("*.json")))


def read_tuned(path: Path) -> Tuned:
    """One file.

    Raises:
        ValueError: it is damaged, or of a version that did not tell GPUs of an architecture apart.
    """
    try:
        found = json.loads(path.read_text())
        major, minor = found["capability"]
        tiles = {name: [*map(int, tile)] for name, tile in found["tiles"].items()}
        if any(len(tile) != 4 or min(tile) < 1 for tile in tiles.values()):
            raise ValueError("a tile is not four positive numbers")
        return Tuned(path, found["device"], (major, minor), tiles)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is no file of this version's `flashtile tune` ({error!r}): delete it"
        ) from error


@memoised(8)
def measured_tiles(name: str) -> dict[str, list[int]]:
    """The tiles that `flashtile tune` found, {kind, head dim and pass: tile}, for a name in `HALF`:
    of the GPUs here that use it, if all of them have the device name of one file.
    """
    here = {device for device, known in hardware.gpus() if architecture(known) == name}
    return next((file.tiles for file in tuned_files() if {file.device} == here), {})


def architecture(capability: tuple[int, int] | None) -> str:
    """The table's name for a device."""
    if hardware.is_rocm():
        return "gfx"
    if capability is None:
        return "sm_80"
    known = [c for c in ARCHITECTURES if c <= capability]
    return ARCHITECTURES[max(known)] if known else "sm_80"


def _pays_descriptors(problem: AttentionProblem) -> bool:
    """Whether tiles are loaded through descriptors.

    Descriptors cost a few microseconds per launch, which only larger calls regain. In float32,
    operands are read from registers, and descriptors only cause spills. TMA may miss new tokens.
    """
    work = problem.B * problem.Hq * problem.M * problem.N
    plain = not (problem.page_size or problem.has_float8_keys or problem.appending)
    plain = plain and not problem.options.k_unpack
    plain = plain and problem.dtype != torch.float32 and problem.D <= MAX_HEAD_DIM
    plain = plain and problem.D % ROW_STEP == problem.Dv % ROW_STEP == 0
    return plain and hardware.has_tma(problem.capability) and work >= DESCRIPTOR_WORK


def describe_plan(problem: AttentionProblem, splits: int) -> str:
    """The plan as text, for `explain`; `splits` programs share a KV loop."""
    planned = plan(problem, True)
    kernels = {"forward": planned.forward if splits == 1 else planned.split}
    if problem.has_key_index:
        forward, queries, keys = listed_plan(problem, True)
        kernels = {"forward of the listed keys of a query": forward}
        if keys is None:
            kernels["dQ, dK and dV in one kernel"] = queries
        else:
            kernels |= {"dQ": queries, "dK and dV": keys}
    elif problem.D <= MAX_HEAD_DIM:
        kernels |= {"dK and dV": planned.keys, "dQ": planned.queries}
    if planned.short is not None:
        kernels = {"forward": planned.short if splits == 1 else planned.split}
        kernels["dQ, dK and dV in one kernel"] = planned.short
    lines = [
        f"{name}: tiles of {kernel.config.BLOCK_M} x {kernel.config.BLOCK_N}, head dim padded to "
        f"{kernel.config.BLOCK_D + kernel.config.BLOCK_TAIL}, {kernel.warps} warps, "
        f"{kernel.stages} stages"
        for name, kernel in kernels.items()
    ]
    if next(iter(kernels.values())).config.IS_PACKED_GROUP:
        lines[0] += f", {problem.group} query heads in a tile"
    if splits > 1:
        lines[0] += f", keys split into {splits} parts"
    if problem.options.batch_invariant:
        lines.append(f"batch_invariant: one tile for all sizes, keys in parts of {PART_KEYS}")
    if problem.dtype == torch.float32:
        lines.append(f"float32: {PRODUCTS[precision(problem)]}")
    if problem.capability not in MEASURED:
        device = device_name(problem)
        lines.append(f"untested: the kernels compile for {device}, but have never run on it")
    name = architecture(problem.capability)
    for file in tuned_files():
        if architecture(file.capability) == name:
            is_used = file.tiles is measured_tiles(name)
            state = "used" if is_used else "ignored here, where `flashtile tune` can measure others"
            lines.append(f"tiles measured on {file.device}, {state}: {file.path}")
    return "\n".join(lines)


def _kernel_plan(
    problem: AttentionProblem, tile: Tile, packed: bool, aligned: bool, described: bool,
    is_split: bool = False, pair: int = 1, has_dead_rows: bool = False,
) -> KernelPlan:  # fmt: skip
    options = problem.options
    mask_m, mask_n = problem.block_tile or (0, 0)
    BLOCK_M, BLOCK_N = _fit(tile.BLOCK_M, mask_m), _fit(tile.BLOCK_N, mask_n)
    plain = options.softcap == 0 and not problem.has_alibi and not has_large_scores(problem)
    D = min(problem.D, MAX_HEAD_DIM)
    tail = problem.D - D
    BLOCK_D, BLOCK_DV = (padded(x, problem, tile.warps) for x in (D, problem.Dv))
    config = KernelConfig(
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        D=D,
        DV=problem.Dv,
        BLOCK_D=BLOCK_D,
        BLOCK_DV=BLOCK_DV,
        TAIL_D=tail,
        BLOCK_TAIL=padded(tail, problem, tile.warps) if tail else 0,
        GROUP=problem.group,
        IS_PACKED_GROUP=packed,
        PRECISION=precision(problem),
        IS_LINEAR=plain and options.softmax_scale > 0,
        HAS_LARGE_SCORES=has_large_scores(problem),
        HAS_HIDDEN_KEYS=problem.has_hidden_keys,
        HAS_DEAD_ROWS=has_dead_rows,
        HAS_LEFT=options.window_left is not None,
        HAS_RIGHT=options.window_right is not None,
        HAS_CHUNK=options.attention_chunk > 0,
        HAS_SOFTCAP=options.softcap > 0,
        HAS_DROPOUT=options.dropout_p > 0,
        DROPOUT_BITS=random_bits(options.dropout_p),
        PAGE_SIZE=problem.page_size,
        MASK_TILE_M=mask_m,
        MASK_TILE_N=mask_n,
        MASK_COVER_M=_cover(BLOCK_M, mask_m),
        MASK_COVER_N=_cover(BLOCK_N, mask_n),
        HEAD_SWIZZLE=HEAD_SWIZZLE,
        HAS_FLOAT8_KEYS=problem.has_float8_keys,
        PAIR=_fitting_pair(pair, BLOCK_M, min(BLOCK_D, BLOCK_DV)),
        ALIGNMENT=ALIGNMENT if aligned else 1,
        OUT_ALIGNMENT=1 if problem.D % ROW_STEP or problem.Dv % ROW_STEP else ALIGNMENT,
        HAS_DESCRIPTORS=described,
        HAS_WGMMA=described and problem.capability is not None and problem.capability[0] == 9,
        IS_SPLIT=is_split,
        IS_CHAINED=is_split and hardware.has_tma(problem.capability),
        APPENDING=problem.appending,
        RUNS=problem.runs,
        HAS_LONE_KEYS=options.dropout_p > 0 and problem.runs > 0 and not problem.has_key_blocks,
        SPANS=problem.spans,
        IS_INVARIANT=bool(options.batch_invariant),
        PART_KEYS=PART_KEYS if options.batch_invariant and problem.N > PART_KEYS else 0,
        HAS_STATISTICS=problem.has_statistics,
        HAS_VALUES_IN_KEYS=has_latents(problem),
    )
    registers = PACKED_REGISTERS if BLOCK_M == FEW_ROWS and _packed_keys(problem) else None
    return KernelPlan(config, tile.warps, tile.stages, registers)


def has_large_scores(problem: AttentionProblem) -> bool:
    """Whether scores come from the caller's tensors or functions, and may be as large as -1e30."""
    has_bias = problem.has_bias or problem.relative_distance is not None
    return has_bias or bool(problem.options.score_mod)


def _packed_keys(problem: AttentionProblem) -> int:
    """The measured keys of a tile of few queries over packed rows; 0 if none was measured."""
    where = architecture(problem.capability), column_of(max(problem.D, problem.Dv))
    if not problem.options.k_unpack or problem.dtype == torch.float32 or where not in PACKED_KEYS:
        return 0
    return PACKED_KEYS[where][_elements_per_word(problem, True) < 4]


def _for_few_rows(tile: Tile, rows: int, problem: AttentionProblem, is_split: bool) -> Tile:
    """A tile with fewer rows if `tile` would be mostly padding; else `tile`."""
    name, head_dim = architecture(problem.capability), column_of(max(problem.D, problem.Dv))
    if problem.dtype != torch.float32 and problem.block_tile is None:
        kind = "split-decoding" if is_split else "decoding"
        (few,) = tiles_for(name, head_dim, kind, problem.page_size > 0)
        if problem.has_float8_keys:
            pages = FLOAT8_PAGES_FORWARD if problem.page_size > 0 and not is_split else {}
            few = Tile(FEW_ROWS, *pages.get((name, head_dim), FLOAT8_FORWARD[head_dim]))
        if _packed_keys(problem):
            few = Tile(FEW_ROWS, _packed_keys(problem), *PACKED_WARPS_AND_STAGES)
        if has_latents(problem) and name in LATENT_FEW_ROWS:
            few = Tile(FEW_ROWS, *LATENT_FEW_ROWS[name])
        if rows <= FEW_ROWS:
            return few
        if rows <= 32 and name != "sm_90" and head_dim <= 256:
            return few._replace(BLOCK_M=32)
        options = problem.options
        # These spill hundreds of bytes of such a tile; a causal mask 24 to 40, and is faster.
        spills = options.window_left is not None or options.attention_chunk or options.dropout_p
        others = problem.page_size or problem.has_float8_keys or options.k_unpack
        if rows <= ROWS and not (spills or others or has_large_scores(problem)):
            tile = ROWS_FORWARD.get((name, head_dim), tile)
    if precision(problem) == "bf16x6" and rows <= FEW_ROWS:
        return Tile(FEW_ROWS, *BF16X6_FEW_ROWS[head_dim])
    for height in (16, 64):
        if rows <= height < tile.BLOCK_M:
            warps = tile.warps if height * head_dim > 64 * 128 else 4
            return tile._replace(BLOCK_M=height, warps=warps)
    return tile


def _for_block_mask(problem: AttentionProblem, forward: Tile, queries: Tile) -> tuple[Tile, Tile]:
    """The tiles of the forward and of dQ under a block mask, in 16 bits."""
    name, head_dim = architecture(problem.capability), column_of(max(problem.D, problem.Dv))
    large = BLOCK_MASK_FORWARD.get(name, {}).get(head_dim)
    if large is None or problem.block_tile is None:
        return forward, queries
    mask_m, mask_n = problem.block_tile
    if mask_m % large.BLOCK_M == mask_n % large.BLOCK_N == 0:
        return large, queries
    small = SMALL_BLOCK_MASK[name]
    return small, small


def _fit(block: int, mask_tile: int) -> int:
    """`block`, or a smaller power of two (at least 32) that divides a block mask's tile."""
    divisor = mask_tile & -mask_tile
    return divisor if 32 <= divisor < block else block


def _cover(block: int, mask_tile: int) -> int:
    return 1 if mask_tile % block == 0 else (block + mask_tile - 2) // mask_tile + 1


def padded(head_dim: int, problem: AttentionProblem, warps: int) -> int:
    """The next power of two, at least 16, the smallest size that matrix units multiply.

    At least 64 if tensor cores multiply tiles in shared memory (on Hopper and newer, by 4 warps or
    more): for narrower tiles, Triton 3.6 reads keys past the sixteenth at wrong addresses, even
    outside of the tile.
    """
    on_tensor_cores = problem.dtype != torch.float32 or precision(problem) != "ieee"
    reads_shared = hardware.has_tma(problem.capability) and on_tensor_cores and warps >= 4
    return max(64 if reads_shared else 16, 1 << (head_dim - 1).bit_length())


def device_name(problem: AttentionProblem) -> str:
    """What reasons and plans call the device."""
    if hardware.is_rocm() or problem.capability is None:
        return "ROCm" if hardware.is_rocm() else problem.device_type
    return f"sm_{problem.capability[0]}{problem.capability[1]}"


# How many programs share the KV loop of one tile of queries (split-KV, flash-decoding).
#
# The choice depends only on sizes, not on lengths on the GPU, so a captured graph stays valid while
# its caches grow.


# Programs that one multiprocessor (SM) runs at the same time: tiles of few rows leave room for two,
# large ones (rows times keys times columns of values) for one.
PROGRAMS_PER_SM, LARGE_TILE = 2, 64 * 128 * 128
# Slowdown of an SM that runs a single program, which does not saturate memory bandwidth.
SINGLE_PROGRAM_SLOWDOWN = 1.08
# Costs in steps of the KV loop: starting a program; launching the merge, and reading 32 parts.
START_STEPS = 1.5
COMBINE_STEPS, COMBINE_STEPS_OF_32 = 3, 1
# Largest number of rows, queries times the heads that share a key head, of a call that counts as
# decoding: 128 heads share the latent keys of DeepSeek's MLA, and programs of latents are few even
# with 4 queries.
FEW_QUERIES, FEW_QUERIES_OF_LATENTS = 128, 512


def splits_of(problem: AttentionProblem, config: KernelConfig, sm_count: int, tokens: int) -> int:
    """Number of parts into which the KV loop of every program of `config` is split.

    The caller's number, if given. By default only calls with few queries (decoding) are split; in
    other calls, the tiles of queries are enough programs.

    Args:
        tokens: rows of q, including packed rows of no sequence, for which parts have rows, too.
    """
    if problem.has_key_index:
        return 1
    asked = problem.options.num_splits
    if problem.has_statistics:  # whose parts are not merged
        return 1
    if asked > 0 or 0 in (problem.B, problem.M, problem.N, tokens):
        return max(asked, 1)
    rows = problem.M * (config.GROUP if config.IS_PACKED_GROUP else 1)
    few = FEW_QUERIES_OF_LATENTS if config.HAS_VALUES_IN_KEYS else FEW_QUERIES
    if rows > max(few, config.BLOCK_M) or config.MASK_TILE_M > 0:
        return 1
    heads = problem.Hk if config.IS_PACKED_GROUP else problem.Hq
    programs = problem.B * heads * -(-rows // config.BLOCK_M)
    most = MOST_PART_ROWS * sm_count // (tokens * problem.Hq)
    if config.IS_INVARIANT:  # a part for each program, or all parts for one
        parts = -(-problem.N // PART_KEYS)
        is_split = programs < PROGRAMS_PER_SM * sm_count and parts <= min(most, MAX_SPLITS)
        return parts if is_split else 1
    steps = -(-_longest_loop(problem) // config.BLOCK_N)
    is_alone = config.BLOCK_M * config.BLOCK_N * config.BLOCK_DV >= LARGE_TILE
    per_sm = 1 if is_alone else PROGRAMS_PER_SM
    most, least = min(most, MAX_SPLITS), 1
    if config.BLOCK_M == FEW_ROWS and _packed_keys(problem):
        least = min(steps * config.BLOCK_N // PACKED_PART_KEYS, most)
        if bytes_per_row(problem.options.k_unpack) % LINE == 0:
            least = min(least, PACKED_PER_SM * sm_count // programs)
    return max(least, fastest_splits(programs, steps, sm_count, most, per_sm))


@memoised(4096)
def fastest_splits(
    programs: int,
    steps: int,
    sm_count: int,
    most: int = MAX_SPLITS,
    per_sm: int = PROGRAMS_PER_SM,
) -> int:
    """The cheapest number of parts, up to `most`, for `programs` KV loops of `steps` steps, of
    which a multiprocessor runs `per_sm` at the same time.

    Programs that run at the same time share the memory bandwidth, so a round takes time in
    proportion to the number of programs on the fullest SM. Of equally cheap numbers, the smallest.
    """

    def cost(splits: int) -> float:
        rounds, remainder = divmod(programs * splits, sm_count * per_sm)
        last = -(-remainder // sm_count)
        shares = rounds * per_sm + (SINGLE_PROGRAM_SLOWDOWN if last == 1 < per_sm else last)
        combine = COMBINE_STEPS + COMBINE_STEPS_OF_32 * splits / 32 if splits > 1 else 0
        return shares * (-(-steps // splits) + START_STEPS) + combine

    return min(range(1, min(steps, most) + 1), key=cost, default=1)


def one_program_has_all_queries(problem: AttentionProblem, config: KernelConfig) -> bool:
    """Whether one tile holds all queries that share a key head, so that no other program reads the
    same keys.
    """
    if problem.group > 1 and not config.IS_PACKED_GROUP:
        return False
    return 0 < problem.M * problem.group <= config.BLOCK_M


def _longest_loop(problem: AttentionProblem) -> int:
    """Largest number of keys that the tile of queries may see."""
    longest, options = problem.N, problem.options
    if options.window_left is not None and options.window_right is not None:
        longest = min(longest, options.window_left + options.window_right + problem.M)
    if options.attention_chunk > 0:
        longest = min(longest, options.attention_chunk + problem.M)
    return longest
