"""How many programs share a tile of keys, from a model of the time they take.

A program with a whole tile loops over the queries of all heads of a group. A problem with few key
heads has few, long tiles: multiprocessors idle if there are fewer tiles than multiprocessors, and
while the last ones finish. Parts of tiles fill them, but their sums pass through memory.

If the rows of a group do not fit the L2 cache, its programs, which soon are at different heads,
load them from memory again and again. The programs of a part load only the rows of its own heads.

Pure Python, like `forward/plan.py`.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ....lru import memoised
from ....problem import AttentionProblem
from .plan import TILES, dq_columns, has_lists, is_uneven, padded_columns, value_columns

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

# Programs that pass over the same heads find Q, dO and dQ in the L2 cache if the longest of them
# loads at most so many bytes. Simulated with unequally fast multiprocessors and a cache of 30 MB,
# which gives the traffic that ncu counted for 32:4 heads at 13,938 tokens, causal, on an H200.
FITTING_BYTES = 6e7
# Rows loaded again because the cache lost them, while other programs multiply: between what an H100
# and an H200 lose where the rows of a group do not fit (`docs/log/hopper.md`).
MISSED_BYTES_PER_US = 2.5e7

MOST_PARTS = 16
MOST_LENGTHS = 8  # of the sequences of a packed batch
MOST_WAVES = 8  # with more tiles for each multiprocessor, little is lost at the end
# Smaller gains are within the error of the model, or do not pay for another launch on the host.
LEAST_GAIN = 0.05
LEAST_GAIN_US = 10.0


class Parts(NamedTuple):
    """How programs share tiles of keys."""

    number: int  # of programs for each tile
    are_apart: bool  # other programs come between those of a tile, in the order of all programs


WHOLE = Parts(1, False)


@memoised(4096)
def parts_of(problem: AttentionProblem, keys: int, multiprocessors: int) -> Parts:
    """The parts of each tile of keys; `keys` is the number of rows of a packed k.

    Parts that balance the multiprocessors are neighbours, so that the longest tiles start first. If
    balance needs no parts, or if all tiles are equally long, the cache decides, and parts are
    apart. Above 128 columns the cache also decides where balance needs parts: programs that run
    together but pass over all heads of a large group are limited by the memory there. Under a
    block mask, the lengths of the loops are not known here, and tiles stay whole.
    """
    if has_lists(problem):
        return WHOLE
    rows = problem.B * problem.N if problem.layout == "dense" else keys
    tile = TILES[padded_columns(problem)]
    has_waves = rows * problem.Hk > MOST_WAVES * multiprocessors * tile.BLOCK_N
    misses = missed_share(problem, -(-problem.M // tile.BLOCK_M), 1) > 0
    if has_waves and not misses:
        return WHOLE
    tiles = tiles_of(problem, keys)
    number = 1
    if is_uneven(problem) or not misses:
        number = fastest(problem, tiles, multiprocessors, MOST_PARTS, counts_misses=False)
    if not misses or (number > 1 and not tile.is_split):
        return Parts(number, False)
    most = min(max(number, parts_in_workspace(problem)), MOST_PARTS)
    number = fastest(problem, tiles, multiprocessors, most, counts_misses=True)
    return Parts(number, number > 1)


def fastest(
    problem: AttentionProblem,
    tiles: list[tuple[int, int]],
    multiprocessors: int,
    most: int,
    counts_misses: bool,
) -> int:
    """The number of parts, up to `most`, with the least time, if it is less than that of whole
    tiles by enough.
    """
    if problem.options.deterministic:
        most = min(most, problem.group)
    times = [
        time_of(problem, tiles, parts, multiprocessors, counts_misses)
        for parts in range(1, most + 1)
    ]
    gain = times[0] - min(times)
    return times.index(min(times)) + 1 if gain > max(LEAST_GAIN * times[0], LEAST_GAIN_US) else 1


def parts_in_workspace(problem: AttentionProblem) -> int:
    """How many parts have sums of dK and dV about as large as the workspace of dQ: for equally long
    queries and keys, half as many as a group has heads. That a part fits the L2 cache is worth no
    more memory.
    """
    columns = padded_columns(problem)
    of_part = problem.N * (columns + value_columns(problem))
    return max(-(-problem.M * problem.group * dq_columns(problem, columns) // of_part), 1)


def time_of(
    problem: AttentionProblem,
    tiles: list[tuple[int, int]],
    parts: int,
    multiprocessors: int,
    counts_misses: bool = True,
) -> float:
    """Microseconds of the programs of `tiles_of` and of the addition of their parts."""
    columns = padded_columns(problem)
    programs = [
        (-(-length * problem.group // parts) * STEP_US[columns] + PROGRAM_US, count * parts)
        for length, count in tiles
    ]
    time = makespan(programs, multiprocessors)
    if len(programs) > 1:
        time += UNEVEN_END * programs[0][0]
    if counts_misses:
        steps = problem.group * sum(length * count for length, count in tiles)
        missed = missed_share(problem, tiles[0][0], parts) * steps
        time += missed * bytes_of_step(problem) / MISSED_BYTES_PER_US
    if parts > 1:
        both = columns + value_columns(problem)
        sums = sum(count for _, count in programs) * TILES[columns].BLOCK_N * both * 4
        time += KERNEL_US + 2 * sums / BYTES_PER_US  # written and read
    return time


def missed_share(problem: AttentionProblem, length: int, parts: int) -> float:
    """The share of all steps that do not find their rows in the cache; the longest tile has
    `length` steps of each head. With ordered additions, parts would not help: see
    `backward_swizzle`.
    """
    if problem.options.deterministic:
        return 0.0
    heads = problem.group / parts
    if problem.group % parts and parts % problem.group:
        heads += 1  # a part that begins and ends within heads shares both with others
    loaded = heads * length * bytes_of_step(problem)
    return max(1 - FITTING_BYTES / max(loaded, 1), 0.0)


def bytes_of_step(problem: AttentionProblem) -> int:
    """Bytes of a block of Q, dO, and dQ in float32."""
    columns = padded_columns(problem)
    of_dq = 4 * dq_columns(problem, columns)
    return TILES[columns].BLOCK_M * (2 * (problem.D + problem.Dv) + of_dq)


def makespan(programs: list[tuple[float, int]], multiprocessors: int) -> float:
    """The time of programs, (time, how many there are of it), the longest first (LPT order).

    It is at least: the mean over the multiprocessors; the longest program; and k + 1 times the
    program after the k * multiprocessors longest ones, because some multiprocessor has k + 1 of
    them. LPT order takes little more than the largest of these, if multiprocessors are equally
    fast.
    """
    longest = sum(time * count for time, count in programs) / multiprocessors
    total = 0
    for time, count in programs:
        before, total = total, total + count
        k = (total - 1) // multiprocessors
        if k * multiprocessors >= before:
            longest = max(longest, (k + 1) * time)
    return longest


def tiles_of(problem: AttentionProblem, keys: int) -> list[tuple[int, int]]:
    """(length, number of tiles of all heads), the longest first; see `tile_lengths`."""
    found: Counter[int] = Counter()
    for N, count in sequences_of(problem, keys):
        M = -(-problem.M * N // problem.N)
        for length in tile_lengths(problem, M, N):
            found[length] += count * problem.Hk
    return sorted(found.items(), reverse=True)


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
    tile, options = TILES[padded_columns(problem)], problem.options
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
