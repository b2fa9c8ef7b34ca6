"""How many programs share the keys of one tile of queries (split-KV, flash-decoding).

Pure Python, from sizes alone: lengths on the GPU are not read, so one choice serves a captured
graph whose caches grow.
"""

from __future__ import annotations

from ...gpu.workspace import MAX_SPLITS, MOST_PART_ROWS
from ...lru import memoised
from ...problem import AttentionProblem
from .plan import KernelConfig

# Programs that one multiprocessor runs side by side: what the tiles of few rows leave room for.
RESIDENT = 2
# One program to a multiprocessor does not quite fill the memory's bandwidth: this much longer.
ALONE = 1.08
# In steps of a walk: starting a program; the launch that joins the parts, and reading 32 of them.
START_STEPS = 1.5
COMBINE_STEPS, COMBINE_STEPS_OF_32 = 3, 1
# Queries, each of every head that shares a key head, up to which a call is decoding: latent keys
# (DeepSeek's MLA) are shared by 128 heads.
FEW_QUERIES = 128


def splits_of(problem: AttentionProblem, config: KernelConfig, processors: int, tokens: int) -> int:
    """How many parts the walk of every program of `config` is cut into; `tokens`: of the queries,
    packed ones that belong to no sequence too, for parts have rows for them.

    The caller's number where there is one. By default calls of few queries are split, which is
    decoding; elsewhere the tiles of queries are enough programs.
    """
    asked = problem.options.num_splits
    if asked > 0 or 0 in (problem.B, problem.M, problem.N, tokens):
        return max(asked, 1)
    rows = problem.M * (config.GROUP if config.IS_PACKED_GROUP else 1)
    if rows > max(FEW_QUERIES, config.BLOCK_M) or config.MASK_TILE_M > 0:
        return 1
    heads = problem.Hk if config.IS_PACKED_GROUP else problem.Hq
    programs = problem.B * heads * -(-rows // config.BLOCK_M)
    steps = -(-_longest_walk(problem) // config.BLOCK_N)
    most = MOST_PART_ROWS * processors // (tokens * problem.Hq)
    return fastest_splits(programs, steps, processors, min(most, MAX_SPLITS))


@memoised(4096)
def fastest_splits(programs: int, steps: int, processors: int, most: int = MAX_SPLITS) -> int:
    """The cheapest number of parts, up to `most`, for `programs` walks of `steps` steps.

    Programs that run side by side share the memory, so a round of them takes as many steps as the
    fullest multiprocessor has programs. Of equally cheap numbers the smallest.
    """

    def cost(splits: int) -> float:
        rounds, rest = divmod(programs * splits, processors * RESIDENT)
        last = -(-rest // processors)
        shares = rounds * RESIDENT + (ALONE if last == 1 else last)
        combine = COMBINE_STEPS + COMBINE_STEPS_OF_32 * splits / 32 if splits > 1 else 0
        return shares * (-(-steps // splits) + START_STEPS) + combine

    return min(range(1, min(steps, most) + 1), key=cost, default=1)


def _longest_walk(problem: AttentionProblem) -> int:
    """Keys that the tile of queries may see at most."""
    longest, options = problem.N, problem.options
    if options.window_left is not None and options.window_right is not None:
        longest = min(longest, options.window_left + options.window_right + problem.M)
    if options.attention_chunk > 0:
        longest = min(longest, options.attention_chunk + problem.M)
    return longest
