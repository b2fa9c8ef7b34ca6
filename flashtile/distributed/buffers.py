"""The tensors of a step's call: its keys and values, and what depends on which keys they are.

A rank's own keys and the messages of others become one buffer, sorted by document and position. A
copy takes as long as its bytes take to be read and written, if the GPU moves many of them in an
instruction. PyTorch joins tensors with gaps between their rows, such as some heads of all, one
element at a time; here elements are as wide as the rows allow. Keys and values of equal width are
copied by one kernel, since a launch may take longer than the copy.

A bias of a rank, (documents or 1, heads or 1, rows or 1, keys or 1), has the rank's rows of every
document, as a dense batch, or (by_token) the rank's tokens of all documents one after the other,
and all keys of a document. A call gets (sequences or 1, heads or 1, rows or 1, keys or 1), where a
sequence has its rows and the keys of its buffer first.

Masks count keys in the whole document. The rows of a sequence in a buffer are sorted by position,
so its rows inside an interval of positions are an interval, too, whatever keys the buffer lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..lru import memoised
from ..masks import EMPTY, Positions, Span
from ..problem import NO_RUN, Operands
from .schedule import Rows, Schedule, Stage, starts

WORDS = (torch.complex128, torch.complex64, torch.int32)  # of 16, 8 and 4 bytes


class KVRows(NamedTuple):
    """Keys and values as rows of words."""

    k: Tensor  # (rows, words)
    v: Tensor


class PackedKV(NamedTuple):
    """The keys and values (rows, heads, head_dim) that `rows` holds."""

    rows: KVRows
    heads: int
    head_dims: tuple[int, int]
    dtype: torch.dtype  # of the numbers

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> PackedKV:
        """In the widest words that divide every head of both."""
        # (rows, heads * head_dim); a copy if the numbers of a row do not follow each other
        rows_k, rows_v = (x.resolve_neg().flatten(1) for x in (k, v))
        rows_k, rows_v = (x if x.stride(1) == 1 else x.contiguous() for x in (rows_k, rows_v))
        size, together = k.element_size(), 0
        for x, dim in ((rows_k, k.shape[2]), (rows_v, v.shape[2])):
            together |= (dim | x.stride(0) | int(x.storage_offset())) * size | x.data_ptr()
        words = [word for word in WORDS if word.itemsize > size and not together % word.itemsize]
        if words and k.numel() and v.numel():
            rows_k, rows_v = rows_k.view(words[0]), rows_v.view(words[0])
        return cls(KVRows(rows_k, rows_v), k.shape[1], (k.shape[2], v.shape[2]), k.dtype)

    def of_heads(self, heads: slice) -> PackedKV:
        """Some of the heads."""
        count = heads.stop - heads.start
        if count == self.heads:
            return self
        parts = (
            x[:, heads.start * width : heads.stop * width]
            for x, width in zip(self.rows, self._words_of_head(), strict=True)
        )
        return self._replace(rows=KVRows(*parts), heads=count)

    def _words_of_head(self) -> list[int]:
        size = self.rows.k.element_size()
        return [dim * self.dtype.itemsize // size for dim in self.head_dims]

    def keys_and_values(self, rows: KVRows) -> tuple[Tensor, Tensor]:
        """Rows of words as keys and values."""
        k, v = (
            x.view(self.dtype).view(x.shape[0], self.heads, dim)
            for x, dim in zip(rows, self.head_dims, strict=True)
        )
        return k, v

    def message(self, spans: Sequence[Span]) -> Tensor:
        """Some of the rows, as numbers: those of the keys, and then those of the values."""
        k, v = ([x[start:stop] for start, stop in spans] for x in self.rows)
        return self._joined(k, v).view(self.dtype)

    def buffer(self, sources: Sequence[KVRows], order: Sequence[Rows]) -> KVRows:
        """Rows of several sources, one after the other: new memory, or a view where they lie in
        one piece."""
        if not order:
            return KVRows(self.rows.k[:0], self.rows.v[:0])
        k = [sources[source].k[start:stop] for source, start, stop in order]
        v = [sources[source].v[start:stop] for source, start, stop in order]
        if len(order) == 1:
            return KVRows(k[0], v[0])
        return self.split(self._joined(k, v), sum(stop - start for _, start, stop in order))

    def empty(self, rows: int) -> Tensor:
        """Memory for a message of so many rows, as numbers."""
        count = rows * self.heads * sum(self.head_dims)
        return self.rows.k.new_empty(count, dtype=self.dtype)

    def split(self, whole: Tensor, rows: int) -> KVRows:
        """A message of so many rows, as numbers or as words."""
        words = whole.view(self.rows.k.dtype)
        of_k, of_v = self.rows.k.shape[1], self.rows.v.shape[1]
        if of_k == of_v:
            return KVRows(*words.view(2, rows, of_k).unbind())
        end = rows * of_k
        return KVRows(words[:end].view(rows, of_k), words[end:].view(rows, of_v))

    def _joined(self, k: list[Tensor], v: list[Tensor]) -> Tensor:
        """Pieces of the keys and then those of the values, without gaps, as words or numbers."""
        if self.rows.k.shape[1] == self.rows.v.shape[1]:
            return torch.cat(k + v).view(-1)
        rows = sum(x.shape[0] for x in k)
        whole = self.empty(rows)
        for pieces, out in zip((k, v), self.split(whole, rows), strict=True):
            torch.cat(pieces, out=out)
        return whole


class SequenceTensors(NamedTuple):
    """Fields of `Operands`, int32."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    q_runs: Tensor | None
    k_runs: Tensor | None
    sequences: Tensor | None


@memoised(256)
def sequence_tensors(
    queries: tuple[Positions, ...],
    keys: tuple[Positions, ...],
    with_positions: bool,
    sequence_numbers: tuple[tuple[int, int], ...] | None,
    device: torch.device,
    stream: int,
) -> SequenceTensors:
    """The tensors of a call with these rows in its sequences.

    Args:
        with_positions: whether the backend needs to know where the rows stand.
        numbers: `Operands.sequences`; None if nothing counts by them.
        stream: `stream_of` the device.
    """
    int32 = partial(torch.tensor, dtype=torch.int32, device=device)
    with torch.inference_mode(False):  # later calls may need gradients
        q_runs = k_runs = None
        if with_positions:
            most = max((len(positions.runs) for positions in (*queries, *keys)), default=0)
            width = max(2, 1 << (most - 1).bit_length())  # so that GPUs need few kernels
            q_runs, k_runs = (int32(_runs(x, width)).view(-1, width, 2) for x in (queries, keys))
        return SequenceTensors(
            int32(starts(queries)),
            int32(starts(keys)),
            q_runs,
            k_runs,
            None if sequence_numbers is None else int32(sequence_numbers).view(-1, 2),
        )


def _runs(sequences: Sequence[Positions], width: int) -> list[list[tuple[int, int]]]:
    """`Operands.q_runs` as lists."""
    used = [[(run.row, run.position) for run in positions.runs] for positions in sequences]
    return [runs + [(NO_RUN, 0)] * (width - len(runs)) for runs in used]


def indices(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 (values,)."""
    return _indices(values, device, stream_of(device))


def stream_of(device: torch.device) -> int:
    """The current stream. What was made on it may still be read there when a cache drops it, so
    another stream gets tensors of its own."""
    if device.type != "cuda":
        return 0
    number = torch.cuda.current_device() if device.index is None else device.index
    raw: int = torch._C._cuda_getCurrentRawStream(number)  # without an object for each call
    return raw


@memoised(256)
def _indices(values: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int64, device=device)


Index = tuple[slice, slice, slice, slice]


class _Part(NamedTuple):
    """The slices of a rank's bias and of a call's bias that hold the same numbers."""

    of_rank: Index
    of_call: Index


def bias_of_buffer(bias: Tensor, schedule: Schedule, stage: Stage, by_token: bool) -> Tensor:
    """The bias of a stage's call."""
    parts = list(_parts(bias, schedule, stage, by_token))
    is_alike = _are_alike(bias, schedule, stage, by_token)
    if len(parts) == 1 and (is_alike or len(schedule.documents) == 1):
        return bias[parts[0].of_rank]
    longest = [max(x.length for x in side) for side in (schedule.queries, stage.keys)]
    sizes = [1 if n == 1 else m for n, m in zip(bias.shape[2:], longest, strict=True)]
    batch = bias.shape[0] if is_alike else len(schedule.documents)
    gathered = bias.new_zeros(batch, bias.shape[1], *sizes)
    for part in parts:
        gathered[part.of_call] = bias[part.of_rank]
    return gathered


def add_bias_gradient(
    total: Tensor, gradient: Tensor, schedule: Schedule, stage: Stage, by_token: bool
) -> None:
    """Add the gradient of what `bias_of_buffer` has made to that of the rank's bias."""
    for part in _parts(total, schedule, stage, by_token):
        total[part.of_rank] += gradient[part.of_call]


def _parts(bias: Tensor, schedule: Schedule, stage: Stage, by_token: bool) -> Iterator[_Part]:
    everything = slice(None)
    is_alike = _are_alike(bias, schedule, stage, by_token)
    rows_before = starts(schedule.queries)
    for number, document in enumerate(schedule.documents):
        of_rank = slice(document, document + 1) if bias.shape[0] > 1 else everything
        of_call = slice(number, number + 1)
        if is_alike:
            of_rank = of_call = everything
        rows = rows_of_rank = everything
        if bias.shape[2] > 1:
            rows = slice(0, schedule.queries[number].length)
            first = rows_before[number] if by_token else 0
            rows_of_rank = slice(first, first + rows.stop)
        keys = [(everything, everything)]
        if bias.shape[3] > 1:
            keys = [
                (slice(position, position + length), slice(row, row + length))
                for row, position, length in stage.keys[number].runs
            ]
        for of_document, of_buffer in keys:
            yield _Part(
                (of_rank, everything, rows_of_rank, of_document),
                (of_call, everything, rows, of_buffer),
            )
        if is_alike:
            return


def _are_alike(bias: Tensor, schedule: Schedule, stage: Stage, by_token: bool) -> bool:
    """Whether all documents of the bias are here, with the same rows and keys."""
    if by_token or bias.shape[0] not in (1, len(schedule.documents)):
        return False
    return len({*zip(schedule.queries, stage.keys, strict=True)}) == 1


def of_heads(x: Any, heads: slice) -> Any:
    """Some heads of a tensor (batch, heads or 1, ...), if there is one."""
    return x[:, heads] if x is not None and x.shape[1] > 1 else x


def rows_before(ends: Tensor, queries: Sequence[Positions], keys: Sequence[Positions]) -> Tensor:
    """Ends of intervals of keys as rows of the buffer.

    Args:
        ends: (1, heads or 1, tokens, intervals) int32, numbers of keys in their document.
        queries: of every sequence, one after the other in `ends`.
        keys: of the same sequences in the buffer.

    Returns:
        For each end, how many rows of its sequence stand before it.
    """
    ends = ends.clamp(min=0)  # so that no difference overflows
    sequences = ends.split([positions.length for positions in queries], dim=2)
    rows = [torch.zeros_like(x) for x in sequences]
    for total, x, positions in zip(rows, sequences, keys, strict=True):
        for run in positions.runs:
            total += (x - run.position).clamp(0, run.length)
    return torch.cat(rows, dim=2) if rows else ends


def tiles_of_buffer(operands: Operands, schedule: Schedule, stage: Stage) -> Operands:
    """The operands with the tiles of a block mask that the rows of each sequence meet in a buffer,
    (sequences, heads or 1, row tiles, key tiles). Rows and keys begin at multiples of the tile."""
    kinds, index, partial = operands.tile_kinds, operands.partial_index, operands.partial_tiles
    if kinds is None or index is None or partial is None:
        return operands
    _, BM, BN = partial.shape
    in_documents = [
        positions.shifted(-shift)  # queries count from the first one of their document
        for positions, shift in zip(schedule.queries, schedule.shifts, strict=True)
    ]
    beyond = tuple(kinds.shape[2:])  # an empty tile after the last one fills up short sequences
    rows = _tile_numbers(in_documents, BM, beyond[0], kinds.device)[:, None, :, None]
    keys = _tile_numbers(stage.keys, BN, beyond[1], kinds.device)[:, None, None, :]
    documents = schedule.documents if kinds.shape[0] > 1 else (0,) * len(schedule.documents)
    sequences = indices(documents, kinds.device).view(-1, 1, 1, 1)
    heads = torch.arange(kinds.shape[1], device=kinds.device).view(1, -1, 1, 1)
    kinds, index = (
        pad(x, (0, 1, 0, 1), value=outside)[sequences, heads, rows, keys]
        for x, outside in ((kinds, EMPTY), (index, -1))
    )
    return operands._replace(tile_kinds=kinds, partial_index=index)


def _tile_numbers(
    sides: Sequence[Positions], size: int, beyond: int, device: torch.device
) -> Tensor:
    """The numbers of the tiles that the rows of every sequence fill, (sequences, most tiles)."""
    tiles = [[n for a, b in x.spans for n in range(a // size, -(-b // size))] for x in sides]
    most = max(map(len, tiles), default=0)
    filled = (n for row in tiles for n in (*row, *(beyond,) * (most - len(row))))
    return indices(tuple(filled), device).view(len(tiles), most)
