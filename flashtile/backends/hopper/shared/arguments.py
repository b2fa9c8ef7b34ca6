"""What the kernels take, in named tuples. All strides count elements."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Sequences(NamedTuple):
    """Where the sequences lie: the tensors that say more than the bounds in `Sizes`."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None


class Pointers(NamedTuple):
    """Tensors that some calls have."""

    alibi_slopes: Tensor | None
    sink: Tensor | None


class Described(NamedTuple):
    """A tensor of head rows as TMA sees it, in tiles of its first columns and, where
    the head dim is no power of two, of the rest of them."""

    tiles: Any
    rests: Any


class Output(NamedTuple):
    """Where the results go."""

    desc: Any  # Described
    ptr: Any
    lse_ptr: Any


class Sizes(NamedTuple):
    """Bounds of all sequences, and the order of the tiles."""

    B: Any
    M: Any
    N: Any
    total_q: Any  # rows of a packed q
    total_k: Any
    heads: Any
    group: Any  # query heads that share a key head
    section: Any  # heads whose tiles run side by side
    tiles: Any


class Mask(NamedTuple):
    """The numbers of the structural mask; which of them hold is in the plan."""

    left: Any
    right: Any
    chunk: Any


class Score(NamedTuple):
    """What turns a product into a score in base 2, and a score beside those of the keys."""

    scale: Any
    softcap: Any
    alibi_ptr: Any
    alibi_batch: Any
    sink_ptr: Any


# Arguments that change with lengths: never specialised.
NUMBERS = (
    "B", "M", "N", "total_q", "total_k", "heads", "group", "section", "tiles", "left", "right",
    "chunk", "alibi_batch",
)  # fmt: skip
