"""Block masks: tiles of the score matrix marked as empty, full or partial.

They are data, where the masks of `rules` are rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..autocast import autocast_off

EMPTY, FULL, PARTIAL = 0, 1, 2
# Marks after those of a mask's keys: a kernel's block that starts before the last key reads no
# others.
SPARE_MARKS = 128

# Elements that are evaluated at once. A function's temporaries may be int64: 8 MiB and 128 MiB.
CPU_ELEMENTS, GPU_ELEMENTS = 2**20, 2**24

Where = tuple[Tensor, ...]  # four int64 tensors (P,): the numbers of P tiles
Evaluate = Callable[[Where], Tensor]  # bool (P, BM, BN), True where visible

LARGEST_DRAWING = 32  # rows and columns


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Block-sparse mask: the score matrix cut into tiles, each empty, full or partial.

    Tile coordinates count from the first query and the first key of each sequence and do not shift
    when lengths differ: a call with fewer queries or keys than `lengths` uses the upper left corner
    of the mask. A call with more is refused. A mask with batch or head size 1 is shared over that
    dimension. It is combined (AND) with every other mask option of the call.

    Masks of equal lengths and tile sizes can be combined with ``&`` and ``|``, and ``~`` inverts
    one; their batch and head sizes broadcast. ``print(mask)`` draws the tiles.

    Operations of PyTorch may change the tensors in place. On a GPU, nothing else may (`.data`,
    DLPack, kernels of your own): lists of tiles are kept until PyTorch counts a change.

    Attributes:
        kinds: uint8 (batch or 1, heads or 1, ceil(M / BM), ceil(N / BN)); 0 empty, 1 full, 2
            partial.
        partial_index: int32, same shape: the index of a partial tile in `partial_tiles`, -1
            elsewhere.
        partial_tiles: bool (number of partial tiles, BM, BN), True where visible.
        lengths: (M, N), the queries and keys that the mask is for; the tiles cover at least these.

    Source: FlashAttention (Dao et al. 2022), section 3.3, block-sparse FlashAttention.
    """

    kinds: Tensor
    partial_index: Tensor
    partial_tiles: Tensor
    lengths: tuple[int, int]

    @property
    def tile_size(self) -> tuple[int, int]:
        """(BM, BN): query rows and keys of one tile."""
        return self.partial_tiles.shape[1], self.partial_tiles.shape[2]

    @staticmethod
    def from_tiles(kinds: Tensor, tile_size: tuple[int, int]) -> BlockMask:
        """A mask of whole tiles.

        Args:
            kinds: bool or integer, (nM, nN) or (batch or 1, heads or 1, nM, nN); non-zero tiles are
                visible.
            tile_size: (BM, BN), rows and keys of a tile.

        Raises:
            ValueError: `kinds` is not 2-D or 4-D, or a tile size is not a positive int.
        """
        kinds = _four_dimensional(kinds, "kinds") != 0
        BM, BN = _checked_tile_size(tile_size)
        return BlockMask(
            kinds.to(torch.uint8),
            torch.full(kinds.shape, -1, dtype=torch.int32, device=kinds.device),
            torch.zeros(0, BM, BN, dtype=torch.bool, device=kinds.device),
            (kinds.shape[2] * BM, kinds.shape[3] * BN),
        )

    @staticmethod
    def from_key_blocks(key_blocks: Tensor, seq_k: int, block_size: tuple[int, int]) -> BlockMask:
        """A mask of the blocks of keys that each block of queries lists. The host reads nothing.

        Args:
            key_blocks: integer (batch or 1, heads or 1, ceil(seq_q / q_block), top), indices of
                blocks of keys. -1 and other indices outside of [0, ceil(seq_k / k_block)) list
                none; a block that a list has twice counts once.
            seq_k: number of keys.
            block_size: (q_block, k_block), queries and keys of a block: the mask's tile.

        Raises:
            TypeError: `key_blocks` holds other numbers than integers.
            ValueError: `key_blocks` is not 4-D, or a size is not a positive int.

        Source: Native Sparse Attention (Yuan et al. 2025), section 3.3.2; MoBA (Lu et al. 2025),
        section 2.2.
        """
        if key_blocks.is_floating_point() or key_blocks.dtype == torch.bool:
            raise TypeError(f"key_blocks: got dtype {key_blocks.dtype}, want torch.int32")
        if key_blocks.dim() != 4:
            raise ValueError(
                f"key_blocks: got shape {tuple(key_blocks.shape)}, want 4 dimensions (batch, "
                "heads, blocks of queries, top)"
            )
        columns = -(-seq_k // checked_pair("block_size", block_size, "(queries, keys)")[1])
        index = key_blocks.long()  # narrow integers may not hold the number of columns
        # All others mark one more column.
        listed = torch.where((index >= 0) & (index < columns), index, columns)
        kinds = key_blocks.new_zeros((*key_blocks.shape[:3], columns + 1), dtype=torch.uint8)
        return BlockMask.from_tiles(kinds.scatter_(-1, listed, 1)[..., :columns], block_size)

    @staticmethod
    def from_dense(mask: Tensor, tile_size: tuple[int, int] = (128, 128)) -> BlockMask:
        """Cut a dense mask into tiles.

        Args:
            mask: bool, (M, N) or (batch or 1, heads or 1, M, N), True where visible.
            tile_size: (BM, BN), rows and keys of a tile.

        Raises:
            TypeError: `mask` is not bool.
            ValueError: `mask` is not 2-D or 4-D, or a tile size is not a positive int.
        """
        if mask.dtype != torch.bool:
            raise TypeError(f"mask: got dtype {mask.dtype}, want torch.bool (True where visible)")
        mask = _four_dimensional(mask, "mask")
        BM, BN = _checked_tile_size(tile_size)
        M, N = mask.shape[2:]
        kinds, tiles = _cut(mask, (BM, BN))
        return _with_partial_tiles(kinds, lambda where: tiles[where], (M, N))

    @staticmethod
    def from_flex(flex_mask: Any) -> BlockMask:
        """Convert a FlexAttention ``BlockMask``, with its tile size and lengths; its ``mask_mod``
        is evaluated only on the partial tiles.

        Args:
            flex_mask: ``torch.nn.attention.flex_attention.BlockMask``.

        The number of partial tiles depends on data, so the host waits for the GPU. Convert once
        and reuse the result, and convert outside of ``torch.compile``.
        """
        BM, BN = flex_mask.BLOCK_SIZE
        shape = flex_mask.kv_indices.shape  # (batch, heads, nM, nN)
        # Slicing a FlexAttention mask keeps the lengths of the whole mask.
        M = min(flex_mask.seq_lengths[0], shape[2] * BM)
        N = min(flex_mask.seq_lengths[1], shape[3] * BN)
        kinds = torch.zeros(shape, dtype=torch.uint8, device=flex_mask.kv_indices.device)
        _mark(kinds, flex_mask.kv_num_blocks, flex_mask.kv_indices, PARTIAL)
        if flex_mask.full_kv_num_blocks is not None:
            _mark(kinds, flex_mask.full_kv_num_blocks, flex_mask.full_kv_indices, FULL)

        evaluate = function_of_tiles(flex_mask.mask_mod, (M, N), (BM, BN))
        tiles = [torch.zeros(0, BM, BN, dtype=torch.bool, device=kinds.device)]
        tiles += [evaluate(where).bool() for where in groups(kinds == PARTIAL, (BM, BN))]
        return _with_partial_tiles(kinds, lambda _: torch.cat(tiles), (M, N))

    @staticmethod
    def from_function(
        mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        lengths: tuple[int, int],
        *,
        batch: int = 1,
        heads: int = 1,
        tile_size: tuple[int, int] = (128, 128),
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """Evaluate a function on every tile, a few tiles at a time.

        Args:
            mask_mod: ``mask_mod(b, h, i, j)``, whether query i sees key j, as in FlexAttention. It
                gets scalar int64 tensors, returns a scalar bool tensor, and runs under
                `torch.vmap`; it may index tensors on `device`.
            lengths: (M, N), the queries and keys that the mask is for.
            batch, heads: 1 for a mask that all sequences, or all heads, share.
            tile_size: (BM, BN), rows and keys of a tile.
            device: where to evaluate and keep the mask; PyTorch's default device by default.

        The host waits for a GPU. Memory holds the partial tiles and a bounded number of others. Use
        it outside of ``torch.compile``, and reuse the result.

        Raises:
            TypeError: `mask_mod` does not return a bool tensor.
            ValueError: `mask_mod` returns a tensor that is not a scalar, or a size is not a
                positive int.
            NotImplementedError: `mask_mod` reads a number, as ``if i < j`` does.
        """
        BM, BN = tile_size = _checked_tile_size(tile_size)
        M, N = lengths = checked_pair("lengths", lengths, "(queries, keys)")
        for name, size in (("batch", batch), ("heads", heads)):
            if not isinstance(size, int) or size <= 0:
                raise ValueError(f"{name}: got {size!r}, want a positive integer")

        def checked(*numbers: Tensor) -> Tensor:
            visible = mask_mod(*numbers)
            if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
                got = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
                raise TypeError(f"mask_mod: got a result of {got}, want a tensor of torch.bool")
            if visible.dim():
                raise ValueError(
                    f"mask_mod: got a result of shape {tuple(visible.shape)}, want a scalar: "
                    "whether one query sees one key"
                )
            return visible

        device = torch.get_default_device() if device is None else device
        kinds = torch.zeros(
            batch, heads, -(-M // BM), -(-N // BN), dtype=torch.uint8, device=device
        )
        evaluate = function_of_tiles(checked, lengths, tile_size)
        undecided = torch.ones_like(kinds, dtype=torch.bool)
        return BlockMask(*classified(kinds, undecided, evaluate, tile_size), lengths)

    def __and__(self, other: BlockMask) -> BlockMask:
        return self._combined(other, torch.logical_and)

    def __or__(self, other: BlockMask) -> BlockMask:
        return self._combined(other, torch.logical_or)

    def __invert__(self) -> BlockMask:
        kinds = torch.where(self.kinds == PARTIAL, PARTIAL, (self.kinds == EMPTY).to(torch.uint8))
        return BlockMask(kinds, self.partial_index, ~self.partial_tiles, self.lengths)

    def _combined(
        self, other: BlockMask, operator: Callable[[Tensor, Tensor], Tensor]
    ) -> BlockMask:
        """`operator` element by element; tiles that are partial in neither mask are not read."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        if (self.lengths, self.tile_size) != (other.lengths, other.tile_size):
            raise ValueError(
                f"block masks: got lengths {self.lengths} and {other.lengths} with tiles of "
                f"{self.tile_size} and {other.tile_size}, want equal ones"
            )
        masks = self._expanded(other), other._expanded(self)
        kinds = operator(*(mask.kinds == FULL for mask in masks)).to(torch.uint8)
        undecided = (masks[0].kinds == PARTIAL) | (masks[1].kinds == PARTIAL)

        def evaluate(where: Where) -> Tensor:
            return operator(*(mask._elements(where) for mask in masks))

        return BlockMask(*classified(kinds, undecided, evaluate, self.tile_size), self.lengths)

    def _expanded(self, other: BlockMask) -> BlockMask:
        """The same mask with batch and head sizes broadcast to those of `other`."""
        sizes = torch.broadcast_shapes(self.kinds.shape, other.kinds.shape)
        index = self.partial_index.expand(sizes)
        return BlockMask(self.kinds.expand(sizes), index, self.partial_tiles, self.lengths)

    def _elements(self, where: Where) -> Tensor:
        """Tiles by their numbers, bool (P, BM, BN), with the last row and key repeated."""
        kinds, tile = self.kinds[where], self.partial_index[where].long().clamp(min=0)
        whole = (kinds == FULL)[:, None, None].expand(-1, *self.tile_size)
        if not len(self.partial_tiles):
            return whole
        BM, BN = self.tile_size
        rows, keys = rows_and_keys(where, self.lengths, self.tile_size)
        index = tile[:, None, None], (rows % BM)[:, :, None], (keys % BN)[:, None, :]
        return torch.where((kinds == PARTIAL)[:, None, None], self.partial_tiles[index], whole)

    def to(self, device: torch.device | str) -> BlockMask:
        """The mask on another device."""
        return BlockMask(
            self.kinds.to(device),
            self.partial_index.to(device),
            self.partial_tiles.to(device),
            self.lengths,
        )

    def sparsity(self) -> float:
        """Percentage of tiles that are empty and skipped, as FlexAttention counts it. The host
        waits for a GPU.
        """
        return 100 * (self.kinds == EMPTY).double().mean().item()

    def __repr__(self) -> str:
        batch, heads = self.kinds.shape[:2]
        return (
            f"BlockMask(batch={batch}, heads={heads}, lengths={self.lengths}, "
            f"tile_size={self.tile_size}, device={str(self.kinds.device)!r})"
        )

    def __str__(self) -> str:
        """The mask of the first sequence and head: full tiles are blocks, partial ones shaded."""
        if self.kinds.is_meta or type(self.kinds) is not Tensor:  # fake tensors have no numbers
            return repr(self)
        head = f"{self!r}, {self.sparsity():.1f} % of the tiles are empty"
        return f"{head}\n{drawing(self.kinds[0, 0])}"

    def to_dense(self, M: int, N: int) -> Tensor:
        """The mask, element by element: bool (batch or 1, heads or 1, M, N), True where visible.

        Raises:
            ValueError: M or N is larger than in `lengths`.
        """
        if self.lengths[0] < M or self.lengths[1] < N:
            raise ValueError(f"M, N: got {(M, N)}, want at most {self.lengths}")
        BM, BN = self.tile_size
        tiles = (self.kinds == FULL)[..., None, None].expand(-1, -1, -1, -1, BM, BN).clone()
        partial = self.kinds == PARTIAL
        tiles[partial] = self.partial_tiles[self.partial_index[partial].long()]
        return tiles.transpose(3, 4).flatten(4, 5).flatten(2, 3)[:, :, :M, :N]


def _four_dimensional(x: Tensor, name: str) -> Tensor:
    if x.dim() not in (2, 4):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, want 2 or 4 dimensions")
    return x[None, None] if x.dim() == 2 else x


def _checked_tile_size(tile_size: tuple[int, int]) -> tuple[int, int]:
    return checked_pair("tile_size", tile_size, "(rows, keys)")


def checked_pair(name: str, sizes: tuple[int, int], meaning: str) -> tuple[int, int]:
    """`sizes`, after a check that they are two positive integers."""
    pair = tuple(sizes) if isinstance(sizes, (tuple, list)) else ()
    if len(pair) != 2 or not all(type(size) is int and size > 0 for size in pair):
        raise ValueError(f"{name}: got {sizes!r}, want two positive integers {meaning}")
    return pair[0], pair[1]


def _mark(kinds: Tensor, counts: Tensor, indices: Tensor, kind: int) -> None:
    """Write `kind` at the first `counts` of the key-tile `indices` of every query-tile row."""
    slots = torch.arange(indices.shape[-1], device=indices.device)
    used = slots < counts[..., None]
    # Unused slots hold arbitrary indices, -1 too; adding their 0 keeps the mark of a used slot.
    tiles = torch.where(used, indices, 0).long()
    marks = torch.zeros_like(kinds).scatter_add_(-1, tiles, used.to(kinds.dtype))
    kinds[marks > 0] = kind


def _cut(mask: Tensor, tile_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The kinds (batch, heads, nM, nN) of the tiles of a dense mask (batch, heads, M, N), and their
    elements (batch, heads, nM, nN, BM, BN), False past the last row and key.
    """
    (M, N), (BM, BN) = mask.shape[2:], tile_size
    nM, nN = -(-M // BM), -(-N // BN)

    def tiles(fill: bool) -> Tensor:
        padded = torch.nn.functional.pad(mask, (0, nN * BN - N, 0, nM * BM - M), value=fill)
        return padded.unflatten(3, (nN, BN)).unflatten(2, (nM, BM)).transpose(3, 4)

    elements = tiles(False)
    any_visible, all_visible = elements.flatten(4).any(-1), tiles(True).flatten(4).all(-1)
    kinds = any_visible.to(torch.uint8) * 2 - (any_visible & all_visible).to(torch.uint8)
    return kinds, elements


def with_every_tile(mask: Tensor, tile_size: tuple[int, int]) -> BlockMask:
    """`BlockMask.from_dense` of a mask (batch, heads, M, N), except that the host does not read
    which tiles are partial: the elements of all are stored.
    """
    M, N = mask.shape[2:]
    kinds, tiles = _cut(mask, tile_size)
    number = torch.arange(kinds.numel(), dtype=torch.int32, device=mask.device).view(kinds.shape)
    index = torch.where(kinds == PARTIAL, number, -1)
    return BlockMask(kinds, index, tiles.flatten(0, 3), (M, N))


def _with_partial_tiles(
    kinds: Tensor, evaluate: Callable[[tuple[Tensor, ...]], Tensor], lengths: tuple[int, int]
) -> BlockMask:
    """Number the partial tiles and compute their elements with `evaluate`."""
    where = (kinds == PARTIAL).nonzero(as_tuple=True)
    partial_index = torch.full(kinds.shape, -1, dtype=torch.int32, device=kinds.device)
    count = where[0].numel()
    partial_index[where] = torch.arange(count, dtype=torch.int32, device=kinds.device)
    return BlockMask(kinds, partial_index, evaluate(where), lengths)


# Tiles of a block mask: evaluate them in small groups, classify them, and draw them.
#
# The tiles of a mask are numbered (batch, head, tile row, tile column). No function here holds more
# than `CPU_ELEMENTS` or `GPU_ELEMENTS` elements of the mask at once, apart from the partial tiles
# that it returns.


def classified(
    kinds: Tensor, undecided: Tensor, evaluate: Evaluate, tile_size: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluate the tiles of a mask of which the kind is not known, and keep the partial ones.

    Args:
        kinds: uint8 (batch, heads, nM, nN), EMPTY or FULL where the kind is known.
        undecided: bool, same shape: the tiles to evaluate.
        evaluate: computes the elements of given tiles. Past the last row and key of the mask it
            repeats them, so that they do not change the kind of a tile.
        tile_size: (BM, BN).

    Returns:
        The attributes `kinds`, `partial_index` and `partial_tiles` of `masks.BlockMask`. The host
        waits for the device, because the number of partial tiles depends on the elements.
    """
    kinds, partial_index = kinds.clone(), torch.full_like(kinds, -1, dtype=torch.int32)
    kept = [torch.zeros(0, *tile_size, dtype=torch.bool, device=kinds.device)]
    count = 0
    for where in groups(undecided, tile_size):
        elements = evaluate(where)
        is_full, is_seen = elements.flatten(1).all(-1), elements.flatten(1).any(-1)
        is_partial = is_seen & ~is_full
        found = elements[is_partial]
        kinds[where] = is_full.to(torch.uint8) * FULL + is_partial.to(torch.uint8) * PARTIAL
        partial_index[tuple(x[is_partial] for x in where)] = torch.arange(
            count, count + len(found), dtype=torch.int32, device=kinds.device
        )
        kept.append(found)
        count += len(found)
    return kinds, partial_index, torch.cat(kept)


def groups(chosen: Tensor, tile_size: tuple[int, int]) -> list[Where]:
    """The numbers of the tiles where `chosen`, bool (batch, heads, nM, nN), is True, in groups that
    are small enough to be evaluated at once.
    """
    limit = CPU_ELEMENTS if chosen.device.type == "cpu" else GPU_ELEMENTS
    size = max(1, limit // (tile_size[0] * tile_size[1]))
    where = chosen.nonzero(as_tuple=True)
    return list(zip(*(x.split(size) for x in where), strict=True)) if len(where[0]) else []


def rows_and_keys(
    where: Where, lengths: tuple[int, int], tile_size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The rows (P, BM) and the keys (P, BN) of tiles; past `lengths`, the last row and key."""
    (M, N), (BM, BN) = lengths, tile_size
    _, _, m, n = where
    rows = m[:, None] * BM + torch.arange(BM, device=m.device)
    keys = n[:, None] * BN + torch.arange(BN, device=n.device)
    return rows.clamp(max=M - 1), keys.clamp(max=N - 1)


def function_of_tiles(
    function: Callable[..., Any], lengths: tuple[int, int], tile_size: tuple[int, int]
) -> Evaluate:
    """Evaluate a function of four scalars (batch, head, query, key) on whole tiles. It may use them
    as an index into a captured tensor.
    """
    over_keys = torch.vmap(function, in_dims=(None, None, None, 0))
    over_rows = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    over_tiles = torch.vmap(over_rows, in_dims=(0, 0, 0, 0))

    def evaluate(where: Where) -> Tensor:
        b, h, _, _ = where
        with autocast_off(b), _OfScalars():
            elements: Tensor = over_tiles(b, h, *rows_and_keys(where, lengths, tile_size))
        return elements

    return evaluate


# Methods that read the numbers of a tensor. Arguments of mask and score functions have none yet.
READ_NUMBERS = frozenset(
    getattr(Tensor, name)
    for name in (
        "item", "tolist", "numpy", "data_ptr", "__array__", "__bool__", "__int__", "__float__",
        "__index__", "__complex__", "untyped_storage",
    )
)  # fmt: skip


class _OfScalars(TorchFunctionMode):
    """``x[i]`` by the operation `index`: PyTorch 2.9 reads the number `i` of a subscript, which
    `torch.vmap` refuses. A function that reads a number itself is refused by our own error.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in READ_NUMBERS and torch._C._functorch.is_batchedtensor(args[0]):
            raise NotImplementedError(
                f"mask_mod: {function.__name__} reads the value of a tensor, which is many at once "
                "here; use torch.where instead of if, and & and | instead of and and or"
            )
        if function is Tensor.__getitem__:
            x, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if all(isinstance(n, Tensor) for n in indices):
                return torch.ops.aten.index(x, list(indices))
        return function(*args, **(kwargs or {}))


def drawing(kinds: Tensor) -> str:
    """Tiles (nM, nN) as text, one line for each row: full blocks, shaded where partial, blank where
    empty. A cell of a large mask stands for several tiles.
    """
    step_m, step_n = (-(-size // LARGEST_DRAWING) for size in kinds.shape)
    lines = []
    for rows in kinds.cpu().split(step_m):
        line = ""
        for cell in rows.split(step_n, dim=1):
            is_empty, is_full = bool((cell == EMPTY).all()), bool((cell == FULL).all())
            line += "  " if is_empty else "██" if is_full else "░░"
        lines.append(line)
    return "\n".join(lines)
