"""How many programs share a tile of keys, from a model of the time they take.

A program with a whole tile loops over the queries of all heads of a group. A problem with few key
heads has few, long tiles: multiprocessors idle if there are fewer tiles than multiprocessors, and
while the last ones finish. Parts of tiles fill them, but their sums pass through memory.

Pure Python, like `forward/plan.py`.
"""

from __future__ import annotations

from ....lru import memoised
from ....problem import AttentionProblem
from .plan import TILES, padded_columns, value_columns

# Of a step with so many columns, on an H200: measured at 64, 80, 128, 144 and 160, else from the
# predicted speed.
STEP_US = {64: 2.6, 80: 1.7, 96: 1.8, 128: 2.3, 144: 1.7, 160: 1.9, 192: 2.2, 256: 2.8}
PROGRAM_US = 5.0  # of a program, without its steps
KERNEL_US = 5.0  # of the kernel that adds the parts, without its memory traffic
BYTES_PER_US = 3e6

# Programs of unlike lengths end apart, by this share of the longest one, because multiprocessors
# are not equally fast (5 % in either direction). Measured with 8:1 heads at 32,768 tokens and with
# 28:4 at 6,000.
UNEVEN_END = 0.3

MOST_PARTS = 16
MOST_WAVES = 8  # with more tiles for each multiprocessor, little is lost at the end
# Smaller gains are within the error of the model, or do not pay for another launch on the host.
LEAST_GAIN = 0.05
LEAST_GAIN_US = 10.0


@memoised(4096)
def parts_of(problem: AttentionProblem, keys: int, multiprocessors: int) -> int:
    """The number of programs for each tile of keys.

    `keys` is the number of rows of a packed k. The lengths of its sequences are not known here: the
    model assumes as many sequences of the longest length as fit. Under a block mask, the lengths of
    the loops are not known either, and tiles are not shared.
    """
    if problem.block_tile is not None:
        return 1
    lengths = tile_lengths(problem)
    copies = problem.Hk * (problem.B if problem.layout == "dense" else max(keys // problem.N, 1))
    if len(lengths) * copies > MOST_WAVES * multiprocessors:
        return 1
    most = min(MOST_PARTS, problem.group) if problem.options.deterministic else MOST_PARTS
    times = [
        time_of(problem, lengths, copies, parts, multiprocessors) for parts in range(1, most + 1)
    ]
    gain = times[0] - min(times)
    return times.index(min(times)) + 1 if gain > max(LEAST_GAIN * times[0], LEAST_GAIN_US) else 1


def time_of(
    problem: AttentionProblem, lengths: list[int], copies: int, parts: int, multiprocessors: int
) -> float:
    """Microseconds of the programs and of the addition of their parts, if `copies` heads and
    sequences have tiles of these lengths.
    """
    columns = padded_columns(problem)
    times = [
        -(-length * problem.group // parts) * STEP_US[columns] + PROGRAM_US for length in lengths
    ]
    time = makespan(times, copies * parts, multiprocessors)
    if times[-1] < times[0]:
        time += UNEVEN_END * times[0]
    if parts > 1:
        both = columns + value_columns(problem)
        sums = len(times) * copies * parts * TILES[columns].BLOCK_N * both * 4
        time += KERNEL_US + 2 * sums / BYTES_PER_US  # written and read
    return time


def makespan(times: list[float], copies: int, multiprocessors: int) -> float:
    """The time of `copies` programs of each of `times`, the longest first (LPT order).

    It is at least: the mean over the multiprocessors; the longest program; and k + 1 times the
    program after the k * multiprocessors longest ones, because some multiprocessor has k + 1 of
    them. LPT order takes little more than the largest of these, if multiprocessors are equally
    fast.
    """
    mean = sum(times) * copies / multiprocessors
    waves = -(-len(times) * copies // multiprocessors)
    bounds = ((k + 1) * times[k * multiprocessors // copies] for k in range(waves))
    return max(mean, *bounds)


def tile_lengths(problem: AttentionProblem) -> list[int]:
    """Blocks of queries of one head that see each tile of keys of the longest sequence, the longest
    first.
    """
    tile, options, M, N = TILES[padded_columns(problem)], problem.options, problem.M, problem.N
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
