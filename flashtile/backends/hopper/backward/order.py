"""The order of the programs, and how many share a tile of keys, from a model of the time they take.

A program with a whole tile loops over the queries of all heads of a group. A problem with few key
heads has few, long tiles: multiprocessors idle if there are fewer tiles than multiprocessors, and
while the last ones finish. Parts of tiles fill them, but their sums pass through memory.

The heads whose tiles run at the same time share the L2 cache. If many do, the longest tiles start
first and all end together. If their rows do not fit the cache, programs load them from memory again
and again. A part loads only the rows of its own query heads.

Pure Python, like `forward/plan.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapreplace
from itertools import islice, repeat
from typing import NamedTuple

from ....gpu.hardware import Gpu
from ....lru import memoised
from ....problem import AttentionProblem
from ..forward.plan import CACHED_BYTES, WIDEST_SWIZZLE
from .plan import dq_columns, has_lists, is_uneven, padded_columns, tile_of, value_columns

# Of a step with so many columns, on an H200: measured at 64, 80, 128, 144 and 160, else from the
# predicted speed. With fewer queries than keys, 64 columns take at most the time of 80.
STEP_US = {64: 2.6, 80: 1.7, 96: 1.8, 128: 2.3, 144: 1.7, 160: 1.9, 192: 2.2, 256: 2.8}
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
    """How programs share tiles of keys, and in which order they start."""

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
