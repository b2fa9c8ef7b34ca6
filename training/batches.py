"""Windows of a token stream, in an order that depends only on the seed and the step.

No state is kept between steps. A resumed run, and several devices that share a batch, therefore
read the same windows as an uninterrupted run on one device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .corpus import Stream


@dataclass(frozen=True)
class Batch:
    """Windows of `context` tokens and the token that follows each.

    Dense: `input_ids` and `targets` are (windows, context) int64 and `cu_seqlens` is None.
    Packed: they are (windows * context,), and `cu_seqlens` (documents + 1,) int32 keeps attention
    inside documents; a document that goes on in the next window starts there anew.
    `max_seqlen` bounds the documents' lengths: a power of two or the context, so that what is
    compiled for it changes rarely; None if dense. `attended` is the mean length over tokens of what
    a token's document can attend to.
    """

    input_ids: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int | None
    attended: float

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        cu_seqlens = self.cu_seqlens
        return Batch(
            self.input_ids.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            None if cu_seqlens is None else cu_seqlens.to(device, non_blocking=True),
            self.max_seqlen,
            self.attended,
        )


def training_windows(stream: Stream, context: int, seed: int, first: int, count: int) -> np.ndarray:
    """The starts of `count` windows of the endless training order, beginning with number `first`.

    (count,) int64. Every epoch is a new permutation of adjoining windows, shifted by a new offset.
    """
    per_epoch = len(stream.tokens) // context - 1
    numbers = np.arange(first, first + count)
    starts = [
        _epoch_order(seed, int(number // per_epoch), per_epoch, context)[number % per_epoch]
        for number in numbers
    ]
    return np.array(starts, np.int64)


@functools.lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, windows: int, context: int) -> np.ndarray:
    generator = np.random.default_rng([seed, epoch])
    offset = generator.integers(context)
    return generator.permutation(windows) * context + offset


def validation_windows(stream: Stream, context: int, count: int, together: int) -> np.ndarray:
    """The starts of the first `count` windows of `stream`, or of all when there are fewer.

    A multiple of `together`, the windows of one forward pass on every device; `ValueError` names
    the key when the stream has fewer.
    """
    windows = (len(stream.tokens) - 1) // context
    if windows < together:
        raise ValueError(
            f"data.validation_share: what is held out are {windows} windows of data.context; "
            f"{together} are wanted, one forward pass on every device"
        )
    return np.arange(min(count, windows) // together * together) * context


def read_batch(stream: Stream, starts: np.ndarray, context: int, packed: bool) -> Batch:
    """The windows that begin at `starts` (windows,)."""
    windows = np.stack([stream.tokens[s : s + context + 1] for s in starts]).astype(np.int64)
    input_ids, targets = torch.from_numpy(windows[:, :-1]), torch.from_numpy(windows[:, 1:])
    if not packed:
        return Batch(input_ids.contiguous(), targets.contiguous(), None, None, float(context))
    bounds = document_bounds(stream, starts, context)
    lengths = np.diff(bounds).astype(np.float64)
    power_of_two = 1 << (int(lengths.max()) - 1).bit_length()
    return Batch(
        input_ids.flatten(),
        targets.flatten(),
        torch.from_numpy(bounds),
        min(power_of_two, context),
        float((lengths**2).sum() / lengths.sum()),
    )


def document_bounds(stream: Stream, starts: np.ndarray, context: int) -> np.ndarray:
    """Where documents begin in the flattened windows, and where the last ends: int32.

    The start of a window always counts, because the part of a cut document begins there.
    """
    bounds = [
        row * context + np.union1d(0, inside - start)
        for row, (start, inside) in enumerate(
            (start, _between(stream.starts, start, start + context)) for start in starts
        )
    ]
    return np.concatenate([*bounds, [len(starts) * context]]).astype(np.int32)


def _between(sorted_values: np.ndarray, low: int, high: int) -> np.ndarray:
    """The values v with low <= v < high."""
    return sorted_values[np.searchsorted(sorted_values, low) : np.searchsorted(sorted_values, high)]
