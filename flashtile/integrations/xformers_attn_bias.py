"""``xformers.ops.fmha.attn_bias``: masks as objects, which become options of flashtile.

A class says which keys a query sees: those of its own block, of a window around its position, up to
the diagonal. Blocks become packed sequences (`cu_seqlens`, `seqused_k`, pages) and the rest a
window, so no mask is made in memory. Where the diagonal starts at the first query and key and the
lengths differ, and where keys have gaps, the mask is `Spans`: two numbers for each query.

Source: xFormers 0.0.35, ``xformers/ops/fmha/attn_bias.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks import Spans

Device = torch.device | str | None
Lengths = Sequence[int]
QKV = tuple[Tensor, Tensor, Tensor]


def _int32(values: Lengths, device: Device) -> Tensor:
    """(len(values),) int32, by default on the GPU if there is one; the host does not wait."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    tensor = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


@dataclass
class _SeqLenInfo:
    """A dimension of tokens, in which each of several sequences has a block.

    Attributes:
        seqstart: (batch + 1,) int32, where each block starts; the last is where all end. In pages
            with gaps, blocks start in their own row of pages and the last means nothing.
        max_seqlen, min_seqlen: the longest and the shortest length.
        seqlen: (batch,) int32, the lengths.
        padding: the room of a block, if all have the same.
        seqstart_py, seqlen_py: the same numbers on the host.
    """

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]
    seqlen: Tensor
    seqlen_py: list[int]
    padding: int = 0

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Device = None) -> _SeqLenInfo:
        """Blocks that follow one another."""
        lengths = list(map(int, seqlens))
        return cls.from_seqlens_gappy([0, *accumulate(lengths)], lengths, False, device=device)

    @classmethod
    def from_seqlens_padded(
        cls, seqlens: Iterable[int], padding: int, *, device: Device = None
    ) -> _SeqLenInfo:
        """Blocks with room for `padding` tokens."""
        lengths = list(map(int, seqlens))
        if max(lengths, default=0) > padding:
            raise ValueError(f"seqlens: got {max(lengths)}, want at most {padding}, the padding")
        starts = [i * padding for i in range(len(lengths) + 1)]
        info = cls.from_seqlens_gappy(starts, lengths, False, device=device)
        return replace(info, padding=padding)

    @classmethod
    def from_seqlens_gappy(
        cls, seqstarts: Lengths, seqlens: Lengths, paged: bool, *, device: Device = None
    ) -> _SeqLenInfo:
        """Blocks that lie anywhere, even in one another. Without pages, one more start than blocks
        says where all end.
        """
        starts, lengths = [*map(int, seqstarts), *[-1] * paged], list(map(int, seqlens))
        if len(starts) != len(lengths) + 1:
            raise ValueError(f"seqstarts: got {len(seqstarts)} for {len(lengths)} lengths")
        bounds = max(lengths, default=0), min(lengths, default=0)
        return cls(_int32(starts, device), *bounds, starts, _int32(lengths, device), lengths)

    def from_seqlens_inplace(self, seqlens: Iterable[int]) -> None:
        """Other lengths in the same tensors, as a CUDA graph needs them."""
        self._overwrite(self.from_seqlens(seqlens, device=self.device))

    def from_seqlens_padded_inplace(self, seqlens: Iterable[int]) -> None:
        """Other lengths in the same tensors, as a CUDA graph needs them."""
        self._overwrite(self.from_seqlens_padded(seqlens, self.padding, device=self.device))

    def _overwrite(self, new: _SeqLenInfo) -> None:
        if len(new.seqlen_py) != len(self.seqlen_py) or new.max_seqlen > self.max_seqlen:
            raise ValueError(
                f"seqlens: got {len(new.seqlen_py)} sequences, the longest {new.max_seqlen}; "
                f"want {len(self.seqlen_py)} of at most {self.max_seqlen} tokens"
            )
        self.seqstart.copy_(new.seqstart)
        self.seqlen.copy_(new.seqlen)
        self.seqstart_py[:], self.seqlen_py[:] = new.seqstart_py, new.seqlen_py
        self.min_seqlen = new.min_seqlen

    def intervals(self) -> Iterator[tuple[int, int]]:
        """The start and the end of each block."""
        for start, length in zip(self.seqstart_py, self.seqlen_py, strict=False):
            yield start, start + length

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.seqstart.device

    def to(self, device: torch.device | str) -> _SeqLenInfo:
        """The same on another device: a copy, which lengths changed in place do not reach."""
        if self.device == torch.device(device):
            return self
        return replace(
            self,
            seqstart=self.seqstart.to(device, copy=True),
            seqstart_py=[*self.seqstart_py],
            seqlen=self.seqlen.to(device, copy=True),
            seqlen_py=[*self.seqlen_py],
        )

    def split(self, x: Tensor, batch_sizes: Lengths | None = None) -> list[Tensor]:
        """(1, total, ...) as a list of (batch_sizes[i], length, ...)."""
        if tuple(x.shape[:2]) != (1, self.seqstart_py[-1]):
            wanted = f"(1, {self.seqstart_py[-1]}, ...)"
            raise ValueError(f"tensor: got shape {tuple(x.shape)}, want {wanted}")
        sizes = batch_sizes or [1] * len(self.seqlen_py)
        firsts = [0, *accumulate(sizes)][:-1]
        lengths = [self.seqlen_py[first] for first in firsts]
        parts = x[0].split([n * size for n, size in zip(lengths, sizes, strict=True)])
        return [part.unflatten(0, (size, -1)) for part, size in zip(parts, sizes, strict=True)]


class _Window(NamedTuple):
    """The keys from `left` before a query's position to `right` after it; None is no bound."""

    left: int | None
    right: int | None
    is_top_left: bool  # whether positions are counted from the first query and key, or the last

    def intervals(self, i: Tensor, m: Any, n: Any) -> tuple[Tensor, Tensor]:
        """The first key of query `i` of `m`, and the end of its keys, of which there are `n`."""
        p = i if self.is_top_left else i + (n - m)
        n = torch.as_tensor(n, device=i.device)
        starts = torch.zeros_like(p) if self.left is None else (p - self.left).clamp(min=0)
        stops = n.expand_as(p) if self.right is None else torch.minimum(p + self.right + 1, n)
        return starts, stops


def _spans(starts: Tensor, stops: Tensor, first: Tensor | int = 0) -> Spans:
    """The keys from `first + starts` to `first + stops` of each query, for all heads."""
    return Spans(*((first + x).int()[None, None, :, None] for x in (starts, stops)))


class AttentionBias:
    """What is added to the scores: 0 where a query sees a key, -inf elsewhere."""

    _is_causal = False
    _is_top_left = False

    def __post_init__(self) -> None:
        for name, least in (("_window_size", 1), ("window_left", 0), ("window_right", 0)):
            size = getattr(self, name, least)
            if size < least:
                raise ValueError(f"{name}: got {size}, want at least {least}")

    def _window(self) -> _Window:
        size = getattr(self, "_window_size", None)
        left = getattr(self, "window_left", None) if size is None else size - 1
        right = 0 if self._is_causal else getattr(self, "window_right", None)
        return _Window(left, right, self._is_top_left)

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[QKV, dict[str, Any]]:
        """The tensors and the arguments of the call of `flashtile.attention` or, with
        `cu_seqlens_q`, `attention_varlen` that has this mask.
        """
        window, M, N = self._window(), q.shape[1], k.shape[1]
        if not window.is_top_left or M == N:
            return (q, k, v), {"window_size": window[:2]}
        mask = _spans(*window.intervals(torch.arange(M, device=q.device), M, N))
        return (q, k, v), {"mask": mask}

    def _blocks(self, M: int, N: int) -> Iterator[tuple[int, int, Tensor]]:
        """Where the queries of each block start and end, and the indices of its keys."""
        yield 0, M, torch.arange(N)

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> Tensor:
        """The bias of `shape` (..., queries, keys); slow, for a test or a look."""
        visible = torch.zeros(tuple(shape[-2:]), dtype=torch.bool)
        for start, end, keys in self._blocks(*visible.shape):
            m, n = end - start, len(keys)
            starts, stops = self._window().intervals(torch.arange(m)[:, None], m, n)
            j = torch.arange(n)
            visible[start:end, keys] = (starts <= j) & (j < stops)
        bias = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -torch.inf)
        return bias.to(device).expand(tuple(shape)).contiguous()

    def to(self, device: torch.device | str) -> Any:
        """The same on another device."""
        there = torch.device(device)
        parts = vars(self).items()
        away = {n: x.to(there) for n, x in parts if getattr(x, "device", there) != there}
        if not away:
            return self
        moved = copy(self)
        vars(moved).update(away)
        return moved


class LowerTriangularMask(AttentionBias):
    """Causal: query i sees the keys up to i, whatever their number."""

    _is_causal = _is_top_left = True

    def __init__(self, device: Device = None) -> None:
        """`device` is not used."""

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """Causal, and `bias` is added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Causal, with a tensor as in ``attn_bias=``, which has a gradient."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[QKV, dict[str, Any]]:
        """As for other masks."""
        qkv, arguments = super().call(q, k, v)
        return qkv, arguments | {"bias": self._bias}

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> Tensor:
        """The sum of mask and tensor."""
        return super().materialize(shape, dtype, device) + self._bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal: the last query sees all keys, the one before it all but one."""

    _is_causal = True

    def make_local_attention(
        self, window_size: int
    ) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """Of those keys, only the nearest `window_size`."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal from the bottom right, and at most `_window_size` keys."""

    _window_size: int


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """The keys from `window_left` before a query to `window_right` after it; the last query is at
    the last key.
    """

    window_left: int
    window_right: int


@dataclass
class _BlockMask(AttentionBias):
    """A query sees keys of its own block only. Queries and keys are those of one batch entry."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[QKV, dict[str, Any]]:
        """As for other masks; the tensors are packed sequences."""
        if q.shape[0] != 1:
            raise ValueError(f"query: got batch {q.shape[0]}, want 1 with {type(self).__name__}")
        arguments = {
            "cu_seqlens_q": self.q_seqinfo.seqstart,
            "max_seqlen_q": self.q_seqinfo.max_seqlen,
        }
        return (q[0], k[0], v[0]), arguments | self._keys() | self._visible(q.shape[1])

    def _keys(self) -> dict[str, Any]:
        """The arguments that say where the keys of each block are."""
        raise NotImplementedError

    def _visible(self, M: int) -> dict[str, Any]:
        """The arguments that say which of them a query sees."""
        return {"window_size": self._window()[:2]}

    def _spans(self, M: int, has_gaps: bool) -> dict[str, Any]:
        """The same as spans, of keys that are counted from the first of a block or, where blocks
        have gaps between them, from the first of all.
        """
        ends, k_info = self.q_seqinfo.seqstart[1:].long(), self.k_seqinfo
        row = torch.arange(M, device=ends.device)
        block = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
        m, n = self.q_seqinfo.seqlen[block], k_info.seqlen[block]
        bounds = self._window().intervals(row - (ends[block] - m), m, n)
        return {"mask": _spans(*bounds, k_info.seqstart[block] if has_gaps else 0)}

    def _blocks(self, M: int, N: int) -> Iterator[tuple[int, int, Tensor]]:
        wanted = self.q_seqinfo.seqstart_py[-1], self.k_seqinfo.seqstart_py[-1]
        if wanted != (M, N):
            raise ValueError(f"shape: got {M} queries and {N} keys, want {wanted}")
        blocks = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for queries, keys in blocks:
            yield *queries, torch.arange(*keys)


def _infos(q_seqlen: Iterable[int], keys: _SeqLenInfo) -> tuple[_SeqLenInfo, _SeqLenInfo]:
    """The blocks of queries and keys."""
    queries = _SeqLenInfo.from_seqlens(q_seqlen, device=keys.device)
    if len(queries.seqlen_py) != len(keys.seqlen_py):
        numbers = f"{len(queries.seqlen_py)} blocks of queries and {len(keys.seqlen_py)} of keys"
        raise ValueError(f"q_seqlen, kv_seqlen: got {numbers}, want equal numbers")
    return queries, keys


@dataclass
class BlockDiagonalMask(_BlockMask):
    """Sequences of different lengths, one after another: a query sees the keys of its own.

    Attributes:
        q_seqinfo, k_seqinfo: the lengths of queries and keys.
    """

    _batch_sizes: Lengths | None = None  # into how many sequences `split` takes each tensor

    def _keys(self) -> dict[str, Any]:
        info = self.k_seqinfo
        return {"cu_seqlens_k": info.seqstart, "max_seqlen_k": info.max_seqlen}

    def _visible(self, M: int) -> dict[str, Any]:
        if self._is_top_left and self.q_seqinfo.seqlen_py != self.k_seqinfo.seqlen_py:
            return self._spans(M, has_gaps=False)
        return super()._visible(M)

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Lengths, kv_seqlen: Lengths | None = None, *, device: Device = None
    ) -> Any:
        """Blocks of these lengths; by default as many keys as queries."""
        if kv_seqlen is None or list(kv_seqlen) == list(q_seqlen):
            info = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
            return cls(info, info)
        return cls(*_infos(q_seqlen, _SeqLenInfo.from_seqlens(kv_seqlen, device=device)))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Any, Tensor]:
        """The mask of tensors (batch_i, length_i, ...), and all of them as (1, total, ...)."""
        return cls.from_tensor_lists_qkv(tensors, tensors)[:2]

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[Tensor],
        tensors_k: Sequence[Tensor],
        tensors_v: Sequence[Tensor] | None = None,
    ) -> tuple[Any, Tensor, Tensor, Tensor | None]:
        """`from_tensor_list` for queries, keys and, if given, values of the keys' lengths."""
        for q, k, v in zip(tensors_q, tensors_k, tensors_v or tensors_k, strict=True):
            if len(q) != len(k) or k.shape[:2] != v.shape[:2]:
                shapes = [tuple(x.shape) for x in (q, k, v)]
                raise ValueError(f"tensors: got {shapes}, want equal batches and as many values")
        lengths = ([x.shape[1] for x in xs for _ in range(len(x))] for xs in (tensors_q, tensors_k))
        bias = cls.from_seqlens(*lengths, device=tensors_q[0].device)
        bias._batch_sizes = [len(x) for x in tensors_q]
        q, k = _joined(tensors_q), _joined(tensors_k)
        return bias, q, k, None if tensors_v is None else _joined(tensors_v)

    def split_queries(self, tensor: Tensor) -> Sequence[Tensor]:
        """(1, total queries, ...) as the list of `from_tensor_lists_qkv`."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> Sequence[Tensor]:
        """(1, total keys, ...) as the list of `from_tensor_lists_qkv`."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """(1, total, ...) as the list of `from_tensor_list`."""
        if self.q_seqinfo.seqlen_py != self.k_seqinfo.seqlen_py:
            raise ValueError("split: queries and keys differ, want split_queries or split_kv")
        return self.split_queries(tensor)

    def make_causal(self) -> Any:
        """Each block causal from its first query and key."""
        return self._as(BlockDiagonalCausalMask)

    def make_causal_from_bottomright(self) -> Any:
        """Each block causal from its last query and key."""
        return self._as(BlockDiagonalCausalFromBottomRightMask)

    def make_local_attention(self, window_size: int) -> Any:
        """`make_causal`, and at most `window_size` keys."""
        return self._as(BlockDiagonalCausalLocalAttentionMask, window_size)

    def make_local_attention_from_bottomright(self, window_size: int) -> Any:
        """`make_causal_from_bottomright`, and at most `window_size` keys."""
        return self._as(BlockDiagonalCausalLocalAttentionFromBottomRightMask, window_size)

    def _as(self, kind: type[BlockDiagonalMask], *window_size: int) -> Any:
        return kind(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, *window_size)

    def _lengths(self) -> Iterator[tuple[int, int]]:
        """The numbers of queries and keys of each block."""
        return zip(self.q_seqinfo.seqlen_py, self.k_seqinfo.seqlen_py, strict=True)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten(0, 1) for x in tensors])[None]


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Block-diagonal, and each block causal from its first query and key."""

    _is_causal = _is_top_left = True


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """The same with at most `_window_size` keys."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for m, n in self._lengths():
            if m - self._window_size >= n:
                raise RuntimeError(
                    f"_window_size: got {self._window_size}, with which some of {m} queries see "
                    f"none of {n} keys"
                )


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Block-diagonal, and each block causal from its last query and key."""

    _is_causal = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for m, n in self._lengths():
            if n < m:
                raise ValueError(
                    f"kv_seqlen: got {n} keys for {m} queries, want at least as many keys as "
                    "queries"
                )


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """The same with at most `_window_size` keys."""

    _window_size: int = 0


class BlockDiagonalPaddedKeysMask(_BlockMask):
    """Packed queries over a cache: a row of `padding` keys for each sequence, of which the first
    are used.
    """

    def _keys(self) -> dict[str, Any]:
        info = self.k_seqinfo
        keys = {"cu_seqlens_k": info.seqstart, "max_seqlen_k": info.padding}
        return keys | {"seqused_k": info.seqlen}

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Lengths,
        kv_padding: int,
        kv_seqlen: Lengths,
        causal_diagonal: Any = None,
        *,
        device: Device = None,
    ) -> Any:
        """`kv_seqlen` of `kv_padding` keys are used; `causal_diagonal` is not."""
        keys = _SeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device)
        return cls(*_infos(q_seqlen, keys))

    def make_paged(
        self,
        block_tables: Tensor,
        page_size: int,
        paged_type: type[PagedBlockDiagonalPaddedKeysMask],
    ) -> Any:
        """The same with keys in pages."""
        info = replace(self.k_seqinfo, padding=block_tables.shape[1] * page_size)
        return paged_type(self.q_seqinfo, info, block_tables, page_size)

    def make_local_attention(self, window_left: int, window_right: int) -> Any:
        """Of those keys, the ones in a window around the query."""
        infos = self.q_seqinfo, self.k_seqinfo
        return BlockDiagonalLocalAttentionPaddedKeysMask(*infos, window_left, window_right)


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same, causal: the last query of a sequence sees all of its keys."""

    causal_diagonal: Any = None  # not used
    _is_causal = True


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The keys from `window_left` before a query to `window_right` after it; the last query of a
    sequence is at its last key.
    """

    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Lengths,
        kv_padding: int,
        kv_seqlen: Lengths,
        window_left: int,
        window_right: int,
    ) -> Any:
        """`from_seqlens` with a window."""
        keys = _SeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding)
        return cls(*_infos(q_seqlen, keys), window_left, window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Causal as `BlockDiagonalCausalWithOffsetPaddedKeysMask`, and at most `_window_size` keys."""

    _window_size: int
    _is_causal = True

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Lengths, kv_padding: int, kv_seqlen: Lengths, window_size: int
    ) -> Any:
        """`from_seqlens` with a window."""
        return cls(
            *_infos(q_seqlen, _SeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding)), window_size
        )


class BlockDiagonalGappyKeysMask(_BlockMask):
    """Packed queries; the keys of a sequence are anywhere among all keys."""

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[QKV, dict[str, Any]]:
        """As for other masks; to flashtile it is one sequence."""
        _, arguments = super().call(q, k, v)
        return (q, k, v), {"mask": arguments["mask"]}

    def _keys(self) -> dict[str, Any]:
        return {}

    def _visible(self, M: int) -> dict[str, Any]:
        return self._spans(M, has_gaps=True)

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Lengths, kv_seqstarts: Lengths, kv_seqlen: Lengths, *, device: Device = None
    ) -> Any:
        """`kv_seqstarts` has one number more: where the last block's room ends."""
        keys = _SeqLenInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, False, device=device)
        return cls(*_infos(q_seqlen, keys))

    def make_paged(
        self,
        block_tables: Tensor,
        page_size: int,
        notional_padding: int,
        paged_type: type[PagedBlockDiagonalGappyKeysMask],
    ) -> Any:
        """The same with keys in pages, where each sequence had `notional_padding` keys of room."""
        info, row = self.k_seqinfo, range(block_tables.shape[1] * page_size)
        if notional_padding % page_size:
            raise ValueError(
                f"notional_padding: got {notional_padding} with pages of {page_size}. Notional "
                "padding should be divisible by the page size"
            )
        starts = [x - i * notional_padding for i, x in enumerate(info.seqstart_py[:-1])]
        if not all(start in row for start in starts):
            raise ValueError(f"kv_seqstarts: got {starts} in pages, want them in {row}")
        device = info.device
        paged = _SeqLenInfo.from_seqlens_gappy(starts, info.seqlen_py, True, device=device)
        return paged_type(self.q_seqinfo, paged, block_tables, page_size)


class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """The same, causal: the last query of a sequence sees all of its keys."""

    _is_causal = True


@dataclass
class _PagedMask(_BlockMask):
    """Keys and values are pages: (1, pages * page_size, heads, head_dim).

    Attributes:
        block_tables: (batch, pages per sequence) int32, the pages of each sequence.
    """

    block_tables: Tensor
    page_size: int

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[QKV, dict[str, Any]]:
        """As for other masks."""
        (q, k, v), arguments = super().call(q, k, v)
        return (q, *(x.unflatten(0, (-1, self.page_size)) for x in (k, v))), arguments

    def _keys(self) -> dict[str, Any]:
        return {"page_table": self.block_tables, "seqused_k": self.k_seqinfo.seqlen}

    def _first(self, block: int) -> int:
        """Where the keys start in their row of pages."""
        return 0

    def _blocks(self, M: int, N: int) -> Iterator[tuple[int, int, Tensor]]:
        for b, queries in enumerate(self.q_seqinfo.intervals()):
            key = self._first(b) + torch.arange(self.k_seqinfo.seqlen_py[b])
            page = self.block_tables[b].cpu()[key // self.page_size]
            yield *queries, page * self.page_size + key % self.page_size


class PagedBlockDiagonalPaddedKeysMask(_PagedMask):
    """`BlockDiagonalPaddedKeysMask` with keys in pages."""

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Lengths,
        kv_seqlen: Lengths,
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ) -> Any:
        """The first `kv_seqlen` keys of each row of pages are used."""
        padding, device = block_tables.shape[1] * page_size, device or block_tables.device
        keys = _SeqLenInfo.from_seqlens_padded(kv_seqlen, padding, device=device)
        return cls(*_infos(q_seqlen, keys), block_tables, page_size)


class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """`BlockDiagonalCausalWithOffsetPaddedKeysMask` with keys in pages."""

    _is_causal = True


class PagedBlockDiagonalGappyKeysMask(_PagedMask):
    """`BlockDiagonalGappyKeysMask` with keys in pages; starts count in a sequence's own pages."""

    def _keys(self) -> dict[str, Any]:
        info = self.k_seqinfo
        return super()._keys() | {"seqused_k": info.seqstart[:-1] + info.seqlen}

    def _visible(self, M: int) -> dict[str, Any]:
        return self._spans(M, has_gaps=True)

    def _first(self, block: int) -> int:
        return self.k_seqinfo.seqstart_py[block]

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Lengths,
        kv_seqstarts: Lengths,
        kv_seqlen: Lengths,
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ) -> Any:
        """`kv_seqlen` keys from `kv_seqstarts` on are used of each row of pages."""
        device = device or block_tables.device
        keys = _SeqLenInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, True, device=device)
        return cls(*_infos(q_seqlen, keys), block_tables, page_size)


class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """`BlockDiagonalCausalWithOffsetGappyKeysMask` with keys in pages."""

    _is_causal = True


VARLEN_BIASES = (
    BlockDiagonalMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
)
