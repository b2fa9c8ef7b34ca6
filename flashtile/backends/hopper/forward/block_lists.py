"""The blocks of keys that each tile of queries visits under a block mask.

A list is kept until the mask changes. The producer walks it, and consumers read it only where they
mask: a block that every row sees completely needs no lookup.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....lru import Memo
from ....masks import FULL, PARTIAL, Visibility
from ....problem import AttentionProblem, Operands
from .plan import KernelConfig

# Tiles of bits that every list may use: all keys visible, and none. The mask's own tiles follow.
ALL, NONE, OWN = 0, 1, 2


class BlockLists(NamedTuple):
    """Lists of blocks, one for each tile of queries, of `batch` x `heads` masks. `batch` is 1 if
    all sequences share a mask, and `heads` is 1 if all heads do.
    """

    order: Tensor  # int32 (batch, heads, tiles): tiles, the longest lists first (LPT order)
    counts: Tensor  # int32 (batch, heads, tiles, 2): full blocks, and blocks in all
    # int32 (batch, heads, tiles, blocks, 2): first key and tile of bits; full blocks come first
    entries: Tensor
    bits: Tensor  # int32 (tiles of bits, BLOCK_M, BLOCK_N / 32): visible keys, a bit for each
    batch_step: int  # masks from one sequence to the next, and from one head to the next
    head_step: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors, which a repeated launch replaces."""
        return self.order, self.counts, self.entries, self.bits

    def with_tensors(self, *tensors: Tensor) -> BlockLists:
        """The same lists in other tensors."""
        order, counts, entries, bits = tensors
        return self._replace(order=order, counts=counts, entries=entries, bits=bits)


def lists_of(problem: AttentionProblem, config: KernelConfig, operands: Operands) -> BlockLists:
    """The lists of a call's block mask, from an earlier call if the mask has not changed."""
    kinds, index, partial = operands.tile_kinds, operands.partial_index, operands.partial_tiles
    assert kinds is not None and index is not None and partial is not None
    tensors = kinds, index, partial
    # A graph reads the mask when it is replayed, and inference tensors do not count their changes.
    is_captured = kinds.is_cuda and torch.cuda.is_current_stream_capturing()
    if is_captured or any(x.is_inference() for x in tensors):
        return make_lists(problem, config, operands)
    stream = torch.cuda.current_stream(kinds.device).cuda_stream if kinds.is_cuda else 0
    key = id(kinds), stream, problem.M, problem.N, problem.facts, config.BLOCK_M, config.BLOCK_N
    versions = [x._version for x in tensors]
    known = _known.get(key)
    if known is not None and known[0]() is kinds and known[1] == versions:
        return known[2]
    lists = make_lists(problem, config, operands)
    _known[key] = weakref.ref(kinds), versions, lists
    return lists


_known: Memo[Any, tuple[weakref.ref[Tensor], list[int], BlockLists]] = Memo(32)


def make_lists(problem: AttentionProblem, config: KernelConfig, operands: Operands) -> BlockLists:
    """The lists of a call's block mask together with its mask rules.

    The tiles of the mask consist of whole tiles of the kernel (`plan.block_mask_reasons`).
    """
    kinds, index, partial = operands.tile_kinds, operands.partial_index, operands.partial_tiles
    assert kinds is not None and index is not None and partial is not None
    BLOCK_M, BLOCK_N = config.BLOCK_M, config.BLOCK_N
    down, across = partial.shape[1] // BLOCK_M, partial.shape[2] // BLOCK_N
    tiles, blocks = -(-problem.M // BLOCK_M), -(-problem.N // BLOCK_N)

    def at_blocks(x: Tensor) -> Tensor:
        larger = x.repeat_interleave(down, 2).repeat_interleave(across, 3)
        return larger[:, :, :tiles, :blocks]

    kinds, index = at_blocks(kinds), at_blocks(index)
    seen, whole = by_rules(problem, BLOCK_M, BLOCK_N, kinds.device)
    visited = seen & (kinds != 0)
    full = visited & whole & (kinds == FULL)
    # Full blocks, then blocks to mask, then those that are not visited.
    n = torch.arange(blocks, device=kinds.device, dtype=torch.int32)
    rank = torch.where(full, 0, torch.where(visited, blocks, 2 * blocks)) + n
    chosen = rank.argsort(-1)
    m = torch.arange(tiles, device=kinds.device, dtype=torch.int32)[:, None]
    own_bits = OWN + (index * down + m % down) * across + n % across
    bits_index = torch.where(kinds == PARTIAL, own_bits, ALL)
    entries = torch.stack((n.mul(BLOCK_N).expand_as(bits_index), bits_index), -1)
    entries = entries.take_along_dim(chosen[..., None], -2).to(torch.int32)
    total = visited.sum(-1)
    # A tile that sees nothing visits one block, of which it sees nothing.
    nothing = torch.tensor((0, NONE), dtype=torch.int32, device=kinds.device)
    entries[..., 0, :] = torch.where((total == 0)[..., None], nothing, entries[..., 0, :])
    counts = torch.stack((full.sum(-1), total.clamp(min=1)), -1)
    batch, heads = kinds.shape[:2]
    return BlockLists(
        total.argsort(stable=True, dim=-1, descending=True).to(torch.int32),
        counts.to(torch.int32),
        entries.contiguous(),
        as_bits(partial, BLOCK_M, BLOCK_N),
        heads if batch > 1 else 0,
        1 if heads > 1 else 0,
    )


def by_rules(
    problem: AttentionProblem, BLOCK_M: int, BLOCK_N: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(some key is visible, all keys are visible to all rows) by the mask rules, for every tile of
    queries and block of keys: as `Visibility.classify`.
    """
    M, N = problem.M, problem.N
    rules = Visibility(problem.facts, M, N)
    rows = range(0, M, BLOCK_M)
    first = torch.tensor([rules.key_range(m0) for m0 in rows], device=device)
    last = torch.tensor([rules.key_range(min(m0 + BLOCK_M, M) - 1) for m0 in rows], device=device)
    n0 = torch.arange(0, N, BLOCK_N, device=device)
    n1 = n0 + BLOCK_N
    seen = (n1 > first[:, :1]) & (n0 < last[:, 1:])
    return seen, (last[:, :1] <= n0) & (n1 <= first[:, 1:])


def as_bits(partial: Tensor, BLOCK_M: int, BLOCK_N: int) -> Tensor:
    """Partial tiles of a mask, cut into tiles of the kernel, after the tiles `ALL` and `NONE`."""
    cut = partial.unflatten(2, (-1, BLOCK_N)).unflatten(1, (-1, BLOCK_M)).transpose(2, 3)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=partial.device)
    # The first key is in the lowest bit.
    eights = cut.flatten(0, 2).unflatten(-1, (-1, 8))
    packed = (eights.to(torch.uint8) * weights).sum(-1, dtype=torch.uint8).view(torch.int32)
    bits = packed.new_empty(OWN + len(packed), BLOCK_M, BLOCK_N // 32)
    bits[ALL], bits[NONE], bits[OWN:] = -1, 0, packed
    return bits
