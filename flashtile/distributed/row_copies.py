"""Copies of rows between a rank's tensors, its messages and the buffer of a call.

A copy takes as long as its bytes take to be read and written, if the GPU moves many of them in an
instruction. PyTorch joins tensors with gaps between their rows, such as some heads of all, one
element at a time; here elements are as wide as the rows allow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .schedule import Rows

WORDS = (torch.complex128, torch.complex64, torch.int32)  # of 16, 8 and 4 bytes


def join_rows(
    sources: Sequence[Tensor], pieces: Sequence[Rows], out: Tensor | None = None
) -> Tensor:
    """Rows of several tensors (rows, heads, head_dim), one after the other.

    Args:
        sources: by `Rows.source`; there is at least one.
        out: where to write them; None is new memory, or a view where they lie in one piece.
    """
    parts = [sources[piece.source][piece.start : piece.stop] for piece in pieces]
    if out is None and len(parts) < 2:
        return parts[0] if parts else sources[0][:0]
    if out is None:
        rows = sum(len(part) for part in parts)
        out = parts[0].new_empty(rows, *parts[0].shape[1:])
    if out.numel():
        *wide, target = _in_words([*parts, out])
        torch.cat(wide, out=target)
    return out


def _in_words(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as (rows, words), with the widest words that fit all of them."""
    flat = [x.flatten(1) for x in tensors]
    size = flat[0].element_size()
    for dtype in WORDS:
        ratio = dtype.itemsize // size
        counts = (n for x in flat for n in (x.shape[1], x.stride(0), x.storage_offset()))
        is_aligned = not any(x.data_ptr() % dtype.itemsize for x in flat)
        if ratio > 1 and is_aligned and not any(n % ratio for n in counts):
            return [x.view(dtype) for x in flat]
    return flat
