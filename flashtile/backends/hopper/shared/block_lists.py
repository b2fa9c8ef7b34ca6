"""The blocks that each tile visits under a block mask: for a tile of queries the blocks of keys, in
the backward for a tile of keys the blocks of queries.

Lists are kept until the mask changes. Producers loop over them, and consumers read them only where
they mask: a full block, of which every row sees every key, needs no lookup. A list is visited from
its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ....lru import Memo
from ....masks import FULL, PARTIAL
from ....masks.block_mask import SPARE_MARKS
from ....problem import AttentionProblem, Operands

MOST_ELEMENTS = 2**26  # of a mask, looked at together

# Tiles of bits that every list may use: all keys visible, and none. The mask's own tiles follow.
ALL, NONE, OWN = 0, 1, 2


class BlockLists(NamedTuple):
    """Lists of blocks, one for each tile, of `batch` x `heads` masks. `batch` is 1 if all sequences
    share a mask, and `heads` is 1 if all heads do.
    """

    # int32 (batch, heads, tiles): tiles, the longest lists first (LPT order); for tiles of keys
    # (programs, 4): the sequence, key head, tile and number of steps of each program
    order: Tensor
    counts: Tensor  # int32 (batch, heads, tiles, 2): full blocks, and blocks in all
    # int32 (batch, heads, tiles, blocks, 2): first key and tile of bits; for tiles of keys
    # (batch, heads, tiles, blocks, 3): block, tile of bits and number of predecessors
    entries: Tensor
    # int32 (tiles of bits, BLOCK_M, BLOCK_N / 32): visible keys, a bit for each; for tiles of keys
    # (tiles of bits, BLOCK_N, BLOCK_M / 32): visible queries
    bits: Tensor
    unseen: Tensor  # int32 (batch, heads, N + `SPARE_MARKS`): 1 for keys that no query sees
    batch_step: int  # masks from one sequence to the next, and from one head to the next
    head_step: int

    @property
    def steps(self) -> tuple[int, int]:
        """The numbers: Triton compiles kernels anew for them."""
        return self.batch_step, self.head_step

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the lists, which a repeated launch exchanges for those of its own call."""
        return self[:5]

    def with_tensors(self, *tensors: Tensor) -> BlockLists:
        """The same lists in other tensors."""
        order, counts, entries, bits, unseen = tensors
        return BlockLists(order, counts, entries, bits, unseen, *self.steps)


def lists_by_queries(
    problem: AttentionProblem, operands: Operands, BLOCK_M: int, BLOCK_N: int
) -> BlockLists:
    """A list for each tile of queries, of a call's block mask together with its mask rules."""

    def make() -> BlockLists:
        visited, full, bits = cut_mask(problem, operands, BLOCK_M, BLOCK_N)
        blocks = visited.shape[3]
        # Full blocks, then blocks to mask, then those that are not visited.
        n = torch.arange(blocks, device=visited.device, dtype=torch.int32)
        rank = torch.where(full, 0, torch.where(visited, blocks, 2 * blocks)) + n
        entries = torch.stack((n.mul(BLOCK_N).expand_as(bits), bits), -1)
        entries = entries.take_along_dim(rank.argsort(-1)[..., None], -2).to(torch.int32)
        total = visited.sum(-1)
        # A tile that sees nothing visits one block, of which it sees nothing.
        entries[..., 0, 0].masked_fill_(total == 0, 0)
        entries[..., 0, 1].masked_fill_(total == 0, NONE)
        order = total.argsort(stable=True, dim=-1, descending=True)
        counts = torch.stack((full.sum(-1), total.clamp(min=1)), -1)
        partial = mask_tensors(operands)[2]
        bits_of_mask = as_bits(partial, BLOCK_M, BLOCK_N)
        return as_lists(order, counts, entries, bits_of_mask, unseen_keys(problem, operands))

    key = "queries", problem.group, *facts_of(problem, BLOCK_M, BLOCK_N)
    return kept(key, operands, make)


def lists_by_keys(
    problem: AttentionProblem,
    operands: Operands,
    BLOCK_M: int,
    BLOCK_N: int,
    swizzle: int,
    is_ordered: bool,
) -> BlockLists:
    """A list for each tile of keys, of a call's block mask together with its mask rules.

    All query heads of a group pass over a tile, each with its own list if the mask differs among
    heads. `swizzle` is the number of key heads whose tiles run at the same time.

    If additions to dQ are ordered, tiles add to a block in the order in which their programs start:
    the predecessors of a tile at a block are the tiles before it that see the block.
    """
    B, Hk, group = problem.B, problem.Hk, problem.group

    def make() -> BlockLists:
        cut = cut_mask(problem, operands, BLOCK_M, BLOCK_N)
        visited, full, bits = (x.transpose(2, 3) for x in cut)
        heads, blocks = visited.shape[1], visited.shape[3]
        total = visited.sum(-1)
        steps = total * group  # (batch, key heads, tiles)
        if heads > 1:
            steps = total.unflatten(1, (-1, group)).sum(2)
        order = steps.argsort(stable=True, dim=-1, descending=True)
        of_heads = order.repeat_interleave(heads // order.shape[1], 1)[..., None]
        predecessors = visited.take_along_dim(of_heads, -2).cumsum(-2) - 1
        predecessors = predecessors.take_along_dim(of_heads.argsort(-2), -2)
        m = torch.arange(blocks, device=visited.device)
        if is_ordered:
            # All tiles visit the blocks from the last one to the first. In unlike orders they would
            # wait for each other all the time. Therefore full blocks are masked as well.
            full = torch.zeros_like(full)
            rank = torch.where(visited, 0, blocks) + m
        else:
            # The visit begins with the blocks to mask. Both kinds are visited upwards, which suits
            # a causal mask: see `is_ascending` in `backward/plan.py`.
            rank = torch.where(full, 0, torch.where(visited, blocks, 2 * blocks)) - m
        entries = torch.stack((m.expand_as(bits), bits, predecessors), -1)
        entries = entries.take_along_dim(rank.argsort(-1)[..., None], -2)
        order = order_of_programs(order, steps.take_along_dim(order, -1), B, Hk, swizzle)
        counts = torch.stack((full.sum(-1), total), -1)
        partial = mask_tensors(operands)[2]
        bits_of_mask = as_bits(partial, BLOCK_M, BLOCK_N, by_keys=True)
        return as_lists(order, counts, entries, bits_of_mask, unseen_keys(problem, operands))

    key = "keys", B, Hk, group, swizzle, is_ordered, *facts_of(problem, BLOCK_M, BLOCK_N)
    return kept(key, operands, make)


def order_of_programs(
    tiles: Tensor, steps: Tensor, sequences: int, heads: int, swizzle: int
) -> Tensor:
    """(programs, 4): the sequence, key head, tile and steps of each program, from the tiles of each
    head (batch, heads or 1, tiles), the longest first, and their steps.

    The heads follow each other in runs of `swizzle`, the tiles of a run by length. Tiles with more
    than twice the mean number of steps come before all others: the last run would end late.
    """
    count, all_heads = tiles.shape[-1], sequences * heads
    shape = sequences, heads, count
    tiles, steps = (x.expand(shape).reshape(all_heads, count).T for x in (tiles, steps))
    rank = torch.arange(count, device=tiles.device)[:, None]
    head = torch.arange(all_heads, device=tiles.device).expand(count, all_heads)
    run = (head + -all_heads % swizzle) // swizzle
    is_long = steps > 2 * steps.float().mean()
    sort_key = torch.where(is_long, -steps, run * count + rank).flatten()
    found = torch.stack((head // heads, head % heads, tiles, steps), -1).flatten(0, 1)
    return found[sort_key.argsort(stable=True)]


def as_lists(
    order: Tensor, counts: Tensor, entries: Tensor, bits: Tensor, unseen: Tensor
) -> BlockLists:
    """The lists from tensors of any integers."""
    batch, heads = counts.shape[:2]
    return BlockLists(
        order.to(torch.int32).contiguous(),
        counts.to(torch.int32),
        entries.to(torch.int32).contiguous(),
        bits,
        unseen,
        heads if batch > 1 else 0,
        1 if heads > 1 else 0,
    )


def facts_of(problem: AttentionProblem, BLOCK_M: int, BLOCK_N: int) -> tuple[Any, ...]:
    """What lists depend on besides the mask."""
    return problem.M, problem.N, problem.facts, BLOCK_M, BLOCK_N


class Kept(NamedTuple):
    """What was made of a block mask."""

    mask: tuple[weakref.ref[Tensor], ...]  # its tensors
    versions: list[int]
    made: Any


_kept: Memo[Any, Kept] = Memo(64)
_Made = TypeVar("_Made")


def kept(key: Any, operands: Operands, make: Callable[[], _Made]) -> _Made:
    """`make()`, from an earlier call with an equal `key` if the block mask has not changed. It is
    kept as long as the mask.

    Only what PyTorch counts is a change. Writes by `.data` and by kernels of others are not
    counted, and to find them every call would have to read the mask, which is why `BlockMask`
    rules them out.
    """
    tensors = mask_tensors(operands)
    kinds = tensors[0]
    # A graph reads the mask when it is replayed, and inference tensors do not count their changes.
    is_captured = kinds.is_cuda and torch.cuda.is_current_stream_capturing()
    if is_captured or any(x.is_inference() for x in tensors):
        return make()
    stream = torch.cuda.current_stream(kinds.device).cuda_stream if kinds.is_cuda else 0
    key = *map(id, tensors), stream, key
    versions = [x._version for x in tensors]
    known = _kept.get(key)
    is_same = known is not None and all(
        mine() is x for mine, x in zip(known.mask, tensors, strict=True)
    )
    if known is not None and is_same and known.versions == versions:
        return cast(_Made, known.made)
    made = make()
    mask = tuple(weakref.ref(x, lambda _: _kept.forget(key)) for x in tensors)
    _kept[key] = Kept(mask, versions, made)
    return made


def mask_tensors(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """The kinds, the indices and the partial tiles of a call's block mask."""
    kinds, index, partial = operands.tile_kinds, operands.partial_index, operands.partial_tiles
    assert kinds is not None and index is not None and partial is not None
    return kinds, index, partial


class Blocks(NamedTuple):
    """What a block mask and the mask rules leave of each tile of queries and keys: (batch, heads,
    tiles of queries, tiles of keys).
    """

    visited: Tensor  # bool: some element is visible
    full: Tensor  # bool: all elements are
    bits: Tensor  # the index of the tile of bits, which does not have the mask rules


def cut_mask(problem: AttentionProblem, operands: Operands, BLOCK_M: int, BLOCK_N: int) -> Blocks:
    """A call's block mask together with its mask rules, in tiles of a kernel. The tiles of the mask
    consist of whole ones.
    """
    kinds, index, partial = mask_tensors(operands)
    down, across = partial.shape[1] // BLOCK_M, partial.shape[2] // BLOCK_N
    tiles, blocks = -(-problem.M // BLOCK_M), -(-problem.N // BLOCK_N)

    def at_blocks(x: Tensor) -> Tensor:
        larger = x.repeat_interleave(down, 2).repeat_interleave(across, 3)
        return larger[:, :, :tiles, :blocks]

    kinds, index = at_blocks(kinds), at_blocks(index)
    seen, whole = by_rules(problem, BLOCK_M, BLOCK_N, kinds.device)
    visited = seen & (kinds != 0)
    m = torch.arange(tiles, device=kinds.device, dtype=torch.int32)[:, None]
    n = torch.arange(blocks, device=kinds.device, dtype=torch.int32)
    own_bits = OWN + (index * down + m % down) * across + n % across
    bits = torch.where(kinds == PARTIAL, own_bits, ALL)
    return Blocks(visited, visited & whole & (kinds == FULL), bits)


def unseen_keys(problem: AttentionProblem, operands: Operands) -> Tensor:
    """The marks of keys that no query of a group of heads sees: `BlockLists.unseen`."""
    kinds, index, partial = mask_tensors(operands)
    batch, heads, tiles, columns = kinds.shape
    rows, keys = partial.shape[1:]

    def make() -> Tensor:
        first, stop = row_ranges(problem, torch.arange(columns * keys, device=kinds.device))
        # (batch, heads, tiles + 1, columns): the full tiles above a row of tiles
        above = torch.nn.functional.pad((kinds == FULL).cumsum(2, dtype=torch.int32), (0, 0, 1, 0))
        # (columns, keys): the tiles [begin, end) with rows that see a key by the rules
        begin = first // rows
        end = torch.where(first < stop, -(-stop // rows), begin)
        begin, end = (x.clamp(max=tiles).view(columns, keys) for x in (begin, end))
        column = torch.arange(columns, device=kinds.device)[:, None]
        # (batch, heads, columns, keys)
        seen = above[:, :, end, column] != above[:, :, begin, column]
        most = max(MOST_ELEMENTS // (batch * heads * rows * keys), 1)
        across = min(most, columns)
        down = max(most // across, 1)
        corners = product(range(0, tiles, down), range(0, columns, across))
        for m, n in corners if len(partial) else ():
            row = torch.arange(m * rows, min(m + down, tiles) * rows, device=kinds.device)[:, None]
            of_keys = slice(n * keys, min(n + across, columns) * keys)
            # (tiles, columns, rows, keys)
            visible = (row >= first[of_keys]) & (row < stop[of_keys])
            visible = visible.unflatten(1, (-1, keys)).unflatten(0, (-1, rows)).transpose(1, 2)
            kind, chosen = (x[:, :, m : m + down, n : n + across] for x in (kinds, index))
            # (batch, heads, tiles, columns, rows, keys)
            visible = visible & partial[chosen.long().clamp(min=0)]
            visible = visible & (kind == PARTIAL)[..., None, None]
            seen[:, :, n : n + across] |= visible.any(4).any(2)
        if heads > 1:
            by_group = seen.unflatten(1, (-1, problem.group)).any(2)
            seen = by_group.repeat_interleave(problem.group, 1)
        marks = (~seen.flatten(2)[..., : problem.N]).int()
        return torch.nn.functional.pad(marks, (0, SPARE_MARKS))

    return kept(("unseen", problem.group, problem.M, problem.N, problem.facts), operands, make)


def row_ranges(problem: AttentionProblem, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The rows [first, stop) that see each of `keys` by the mask rules; the ranges of keys of
    ascending rows begin and end at ascending keys.
    """
    start, stop = key_ranges(problem, torch.arange(problem.M, device=keys.device))
    first, last = (torch.searchsorted(x.contiguous(), keys, right=True) for x in (stop, start))
    return first, last


def by_rules(
    problem: AttentionProblem, BLOCK_M: int, BLOCK_N: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(some key is visible, all keys are visible to all rows) by the mask rules, for every tile of
    queries and block of keys: as `Visibility.classify`.
    """
    m0 = torch.arange(0, problem.M, BLOCK_M, device=device)[:, None]
    n0 = torch.arange(0, problem.N, BLOCK_N, device=device)
    n1 = n0 + BLOCK_N
    first_start, first_stop = key_ranges(problem, m0)
    last_start, last_stop = key_ranges(problem, (m0 + BLOCK_M).clamp(max=problem.M) - 1)
    return (n1 > first_start) & (n0 < last_stop), (last_start <= n0) & (n1 <= first_stop)


def key_ranges(problem: AttentionProblem, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The visible keys [start, stop) of `rows` by the mask rules, computed on the device: a graph
    cannot capture a copy from the host.
    """
    p = rows + (problem.N - problem.M)
    start, stop = torch.zeros_like(p), torch.full_like(p, problem.N)
    for rule in problem.facts:
        rule_start, rule_stop = rule.key_range(p, problem.N)
        start, stop = start.maximum(rule_start), stop.minimum(rule_stop)
    return start, stop


def as_bits(partial: Tensor, BLOCK_M: int, BLOCK_N: int, by_keys: bool = False) -> Tensor:
    """Partial tiles of a mask, cut into tiles of the kernel, after the tiles `ALL` and `NONE`: the
    keys of a row in its words, or with `by_keys` the queries of a key.
    """
    cut = partial.unflatten(2, (-1, BLOCK_N)).unflatten(1, (-1, BLOCK_M)).transpose(2, 3)
    if by_keys:
        cut = cut.transpose(3, 4)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=partial.device)
    # The first element is in the lowest bit.
    eights = cut.flatten(0, 2).unflatten(-1, (-1, 8))
    packed = (eights.to(torch.uint8) * weights).sum(-1, dtype=torch.uint8).view(torch.int32)
    bits = packed.new_empty(OWN + len(packed), *packed.shape[1:])
    bits[ALL], bits[NONE], bits[OWN:] = -1, 0, packed
    return bits
