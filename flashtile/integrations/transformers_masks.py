"""Transformers' attention masks in the form that costs flashtile least, without ever losing one.

Transformers describes a mask as a function of four indices and lets each attention implementation
turn it into what that one needs. `attention_mask` recognises the functions that transformers itself
composes (causal, sliding window, chunk, packed sequences), so that the usual mask is a 2-D tensor
of padding; any other function becomes the exact 4-D mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from transformers import masking_utils

MaskFunction = Callable[..., Any]
T = TypeVar("T")


class Pattern(NamedTuple):
    """What a mask shows, padding apart, in the arguments of `flashtile.attention`."""

    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    attention_chunk: int = 0
    segments: Tensor | None = None  # (batch, keys) integers, one for each packed sequence

    @property
    def has_positions(self) -> bool:
        """Whether it matters how many tokens stand between a query and a key."""
        return self.window_size != (-1, -1) or self.attention_chunk > 0

    def hides(self, keys: int) -> bool:
        """Whether a window or chunk is short enough to hide some of that many keys."""
        sides = [side for side in self.window_size if side >= 0]
        return any(side < keys - 1 for side in sides) or 0 < self.attention_chunk < keys

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments."""
        return {
            "causal": self.causal,
            "window_size": self.window_size,
            "attention_chunk": self.attention_chunk,
        }


def recognise(mask_function: MaskFunction) -> Pattern | None:
    """The pattern of a mask function that transformers composed; None for any other function."""
    if mask_function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern()
    if torch.compiler.is_compiling():  # closures cannot be looked into there
        return None
    read = _READERS.get(getattr(mask_function, "__code__", None))
    return None if read is None else read(**inspect.getclosurevars(mask_function).nonlocals)


def _all_of(mask_functions: tuple[MaskFunction, ...]) -> Pattern | None:
    causal, left, right, chunk = False, -1, -1, 0
    segments = None
    for mask_function in mask_functions:
        part = recognise(mask_function)
        if part is None or (chunk and part.attention_chunk not in (0, chunk)):
            return None
        causal = causal or part.causal
        left = _narrower(left, part.window_size[0])
        right = _narrower(right, part.window_size[1])
        chunk = chunk or part.attention_chunk
        segments = part.segments if segments is None else segments
    return Pattern(causal, (left, right), chunk, segments)


def _narrower(a: int, b: int) -> int:
    """The smaller of two window sides, where -1 is unbounded."""
    return max(a, b) if min(a, b) < 0 else min(a, b)


def _sliding_window(sliding_window: int) -> Pattern:
    return Pattern(window_size=(sliding_window - 1, -1))  # transformers counts the query itself


def _bidirectional_window(sliding_window: int) -> Pattern:
    return Pattern(window_size=(sliding_window, sliding_window))


def _chunk(chunk_size: int, left_padding: Tensor) -> Pattern:
    return Pattern(
        attention_chunk=chunk_size
    )  # counted from the first real token, as flashtile does


def _packed(packed_sequence_mask: Tensor) -> Pattern:
    return Pattern(segments=packed_sequence_mask)


def _packed_positions(mask_function: MaskFunction, position_ids: Tensor) -> Pattern | None:
    # Inside one packed sequence positions rise by one, so distances are the same; a chunk's start
    # may not be.
    inner = recognise(mask_function)
    return None if inner is None or inner.attention_chunk else inner


def _reader_table() -> dict[Any, Callable[..., Pattern | None]]:
    """Reader of the captured variables, by the code of the closure that each factory of
    transformers returns."""
    index = torch.zeros(1, 1, dtype=torch.long)
    closures: list[tuple[str, tuple[Any, ...], Callable[..., Pattern | None]]] = [
        ("and_masks", (), _all_of),
        ("sliding_window_overlay", (1,), _sliding_window),
        ("sliding_window_bidirectional_overlay", (1,), _bidirectional_window),
        ("chunked_overlay", (1, index), _chunk),
        ("packed_sequence_mask_function", (index,), _packed),
        (
            "remap_positions_for_packed_sequence",
            (masking_utils.causal_mask_function, index),
            _packed_positions,
        ),
    ]
    table = {}
    for factory, arguments, reader in closures:
        if hasattr(masking_utils, factory):
            closure = getattr(masking_utils, factory)(*arguments)
            # A closure that captures other variables is another function: then it stays
            # unrecognised.
            if set(closure.__code__.co_freevars) == set(inspect.signature(reader).parameters):
                table[closure.__code__] = reader
    return table


_READERS = _reader_table()


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """The mask function that `register` gives to transformers.

    Args:
        batch_size, q_length, kv_length: sizes of the mask; query i has the position ``q_offset +
            i``, key j ``kv_offset + j``.
        mask_function: whether a query sees a key, from (batch, head, query, key).
        attention_mask: (batch, tokens) bool, False at padding, indexed by position.
        options: what transformers passes besides, for other implementations.

    Returns:
        None, when the module's causality says it all; or (batch, keys) bool, False at padding; or
        (batch, keys) integers, one from 1 up for each packed sequence; or (batch, 1, q_length,
        kv_length) bool, the exact mask. The 2-D ones remember their `Pattern`; keys past their
        width are slots of a cache not yet written.
    """
    exact = partial(
        _exact,
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        options,
    )
    tracing = torch.compiler.is_compiling()
    pattern = recognise(mask_function)
    if pattern is None or (pattern.attention_chunk and kv_offset):
        return exact()
    if tracing and isinstance(q_offset, Tensor):  # how much of a static cache is written is data
        return exact()
    keys = kv_length
    if pattern.causal:
        keys = min(keys, int(q_offset) + q_length - kv_offset)
    mask = None
    if attention_mask is not None:
        mask = attention_mask[:, kv_offset : kv_offset + keys].bool()
        mask = torch.nn.functional.pad(mask, (0, keys - mask.shape[1]))
        if not tracing and mask.all():
            mask = None
    if pattern.segments is not None:
        if mask is not None or q_length != keys:
            return exact()
        return remember(pattern.segments.int() + 1, pattern)
    if mask is not None and pattern.has_positions and has_holes(mask):
        return exact()  # a distance counts the padding in between
    if mask is None and (keys < kv_length or pattern.hides(keys)):
        mask = torch.ones(batch_size, keys, dtype=torch.bool, device=options.get("device"))
    return mask if mask is None or tracing else remember(mask, pattern)


def _exact(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: MaskFunction,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """The 4-D mask, element by element, made by transformers."""
    mask = masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=cast(int, q_offset),  # it takes tensors, too
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    return cast(Tensor, mask)


def has_holes(mask: Tensor) -> bool:
    """Whether some row of a (batch, keys) bool mask has padding between real tokens."""
    starts = mask[:, 1:] & ~mask[:, :-1]
    return bool((starts.sum(1) + mask[:, :1].sum(1) > 1).any())


def remember(mask: Tensor, pattern: Pattern) -> Tensor:
    """Tie `pattern` to this very tensor object, which transformers hands to every layer."""
    # An attribute of our own: tensors take them, their type does not say so.
    mask.flashtile_pattern = pattern  # type: ignore[attr-defined]
    return mask


def remembered(mask: Tensor) -> Pattern | None:
    """The pattern tied to `mask`, if it is still the object that `attention_mask` returned."""
    return getattr(mask, "flashtile_pattern", None)


def once(mask: Tensor, make: Callable[..., T], *arguments: Any) -> T:
    """``make(mask, *arguments)``, kept on the tensor object, so that a model's layers share it."""
    if torch.compiler.is_compiling():
        return make(mask, *arguments)
    version = 0 if mask.is_inference() else mask._version
    known = getattr(mask, "flashtile_known", {})
    key = (make, version, *arguments)
    if key not in known:
        known[key] = make(mask, *arguments)
        # As in `remember`: an attribute of our own.
        mask.flashtile_known = known  # type: ignore[attr-defined]
    return cast(T, known[key])


class Packing(NamedTuple):
    """Where the real tokens of a padded batch stand, and how they split into sequences."""

    query_index: Tensor  # (total_q,) into the flattened (batch * q_length)
    key_index: Tensor  # (total_k,) into the flattened (batch * keys)
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def packing(mask: Tensor, q_length: int, pack_queries: bool) -> Packing:
    """The packing of a (batch, keys) mask.

    Args:
        mask: bool, a row is a sequence; or integers that number sequences from 1 up. False and 0
            are padding.
        q_length: the queries are the last `q_length` tokens.
        pack_queries: leave out the queries at padding, too. Otherwise every query is kept.
    """
    key_index, cu_k, max_k = _sequences(mask)
    if pack_queries and q_length == mask.shape[1]:
        return Packing(key_index, key_index, cu_k, cu_k, max_k, max_k)
    queries = (
        mask[:, mask.shape[1] - q_length :]
        if pack_queries
        else mask.new_ones(mask.shape[0], q_length)
    )
    query_index, cu_q, max_q = _sequences(queries)
    return Packing(query_index, key_index, cu_q, cu_k, max_q, max_k)


def _sequences(mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Flat index of the real tokens, cumulative lengths of their sequences, and the longest
    length."""
    index = mask.flatten().nonzero().flatten()
    if mask.dtype == torch.bool:
        lengths = mask.sum(1)
    else:
        row = torch.arange(mask.shape[0], device=mask.device)[:, None] * (mask.max() + 1)
        lengths = (mask + row).flatten()[index].unique_consecutive(return_counts=True)[1]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return index, cu_seqlens, int(lengths.max()) if lengths.numel() else 0


def left_padding(mask: Tensor) -> Tensor | None:
    """Padding tokens in front of each row of a (batch, keys) bool mask, int32; None if there are
    any elsewhere."""
    if has_holes(mask) or not bool(mask[:, -1].all()):
        return None
    return (~mask).sum(1).int()


def is_whole(mask: Tensor) -> bool:
    """Whether a bool mask has no padding at all."""
    return bool(mask.all())


def restarting_positions(position_ids: Tensor, queries: int, keys: int) -> Tensor | None:
    """Sequences packed into one row, numbered from 1 up, when (1, tokens) position ids start over;
    else None.

    Each sequence starts at the smallest position: the rule of transformers' own flash attention.
    """
    if queries != keys or position_ids.shape != (1, queries):
        return None
    starts = position_ids == position_ids.min()
    numbers = starts.cumsum(1).int()
    return numbers if bool(starts[0, 0]) and int(numbers[0, -1]) > 1 else None
