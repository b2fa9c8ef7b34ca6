"""How many programs share the keys of one tile of queries (split-KV, flash-decoding).

Pure Python, from sizes alone: lengths on the GPU are not read, so one choice serves a captured
graph whose caches grow.
"""

from __future__ import annotations

from functools import lru_cache

from ...problem import AttentionProblem
from .plan import KernelConfig

# Programs that one multiprocessor runs side by side: what the tiles of few rows leave room for.
RESIDENT = 2
# What starting a program, and joining the parts in a launch of its own, cost: in steps of a walk.
START_STEPS = 2
COMBINE_STEPS = 6
MAX_SPLITS = 128


def splits_of(problem: AttentionProblem, config: KernelConfig, processors: int) -> int:
    """How many parts the walk of every program of `config` is cut into.

    The caller's number where there is one. By default calls are split whose queries fit one tile,
    which is decoding; elsewhere the tiles of queries are enough programs.
    """
    asked = problem.options.num_splits
    if asked > 0 or 0 in (problem.B, problem.M, problem.N):
        return max(asked, 1)
    rows = problem.M * (config.GROUP if config.IS_PACKED_GROUP else 1)
    if rows > config.BLOCK_M or config.MASK_TILE_M > 0:
        return 1
    heads = problem.Hk if config.IS_PACKED_GROUP else problem.Hq
    steps = -(-_longest_walk(problem) // config.BLOCK_N)
    return fastest_splits(problem.B * heads, steps, processors * RESIDENT)


@lru_cache(maxsize=4096)
def fastest_splits(programs: int, steps: int, slots: int) -> int:
    """The cheapest number of parts for `programs` walks of `steps` steps, `slots` at a time.

    A call costs rounds of programs times steps of a program, and a little for every program and
    for joining. Of equally cheap numbers the smallest.
    """

    def cost(splits: int) -> int:
        rounds = -(-programs * splits // slots)
        combine = COMBINE_STEPS if splits > 1 else 0
        return rounds * (-(-steps // splits) + START_STEPS) + combine

    return min(range(1, min(steps, MAX_SPLITS) + 1), key=cost, default=1)


def _longest_walk(problem: AttentionProblem) -> int:
    """Keys that the tile of queries may see at most."""
    longest, options = problem.N, problem.options
    if options.window_left >= 0 and options.window_right >= 0:
        longest = min(longest, options.window_left + options.window_right + problem.M)
    if options.attention_chunk > 0:
        longest = min(longest, options.attention_chunk + problem.M)
    return longest
