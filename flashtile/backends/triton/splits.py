"""How many programs share the KV loop of one tile of queries (split-KV, flash-decoding).

The choice depends only on sizes, not on lengths on the GPU, so a captured graph stays valid while
its caches grow.
"""

from __future__ import annotations

from ...gpu.workspace import MAX_SPLITS, MOST_PART_ROWS
from ...lru import memoised
from ...problem import AttentionProblem
from .plan import KernelConfig

# Programs that one multiprocessor (SM) runs at the same time; tiles of few rows leave room for two.
PROGRAMS_PER_SM = 2
# Slowdown of an SM that runs a single program, which does not saturate memory bandwidth.
SINGLE_PROGRAM_SLOWDOWN = 1.08
# Costs in steps of the KV loop: starting a program; launching the merge, and reading 32 parts.
START_STEPS = 1.5
COMBINE_STEPS, COMBINE_STEPS_OF_32 = 3, 1
# Largest number of rows, queries times the heads that share a key head, of a call that counts as
# decoding: 128 heads share the latent keys of DeepSeek's MLA.
FEW_QUERIES = 128


def splits_of(problem: AttentionProblem, config: KernelConfig, sm_count: int, tokens: int) -> int:
    """Number of parts into which the KV loop of every program of `config` is split.

    The caller's number, if given. By default only calls with few queries (decoding) are split; in
    other calls, the tiles of queries are enough programs.

    Args:
        tokens: rows of q, including packed rows of no sequence, for which parts have rows, too.
    """
    asked = problem.options.num_splits
    if asked > 0 or 0 in (problem.B, problem.M, problem.N, tokens):
        return max(asked, 1)
    rows = problem.M * (config.GROUP if config.IS_PACKED_GROUP else 1)
    if rows > max(FEW_QUERIES, config.BLOCK_M) or config.MASK_TILE_M > 0:
        return 1
    heads = problem.Hk if config.IS_PACKED_GROUP else problem.Hq
    programs = problem.B * heads * -(-rows // config.BLOCK_M)
    steps = -(-_longest_loop(problem) // config.BLOCK_N)
    most = MOST_PART_ROWS * sm_count // (tokens * problem.Hq)
    return fastest_splits(programs, steps, sm_count, min(most, MAX_SPLITS))


@memoised(4096)
def fastest_splits(programs: int, steps: int, sm_count: int, most: int = MAX_SPLITS) -> int:
    """The cheapest number of parts, up to `most`, for `programs` KV loops of `steps` steps.

    Programs that run at the same time share the memory bandwidth, so a round takes time in
    proportion to the number of programs on the fullest SM. Of equally cheap numbers, the smallest.
    """

    def cost(splits: int) -> float:
        rounds, remainder = divmod(programs * splits, sm_count * PROGRAMS_PER_SM)
        last = -(-remainder // sm_count)
        shares = rounds * PROGRAMS_PER_SM + (SINGLE_PROGRAM_SLOWDOWN if last == 1 else last)
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
