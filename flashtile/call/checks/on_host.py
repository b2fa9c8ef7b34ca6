"""Checks that read the values of tensors, for which the host waits for the GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...problem import Operands, Options
from ..layouts import Packed
from .layouts import cumulative
from .scalars import integer
from .tensors import is_readable, tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def longest(name: str, given: Any, name_of_starts: str, cu_seqlens: Any, q: Any) -> Any:
    """The longest length: as given, or read from cumulative lengths, which waits for the GPU."""
    if type(given) is int:
        return given
    if given is not None:
        return integer(name, given)
    tensor("q", q)
    cumulative(name_of_starts, cu_seqlens, q)
    if not is_readable(cu_seqlens):
        raise TypeError(
            f"{name}: got None, want an int because {name_of_starts} cannot be read "
            "(torch.compile, fake or meta tensors)"
        )
    return max(cu_seqlens.diff().tolist(), default=0)


def _asked() -> str:
    return os.environ.get("FLASHTILE_CHECK", "")


def checks_values_on_gpu() -> bool:
    """Whether `checking_values` can be true of tensors on a GPU."""
    return _asked() not in ("", "0")


def checking_values(given: Iterable[Any]) -> bool:
    """Whether to check the values of the tensors among `given`.

    ``FLASHTILE_CHECK=1`` enables the checks everywhere, and ``FLASHTILE_CHECK=0`` disables them. By
    default they run only for CPU tensors, for which nothing waits. They never run if there are no
    values: under a tracer, on fake and meta tensors, in a transform of torch.func.
    """
    if torch.compiler.is_compiling():
        return False
    asked = _asked()
    if asked == "0" or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack() > 0 or torch.jit.is_tracing():
        return False
    devices = ("cpu", "cuda") if asked else ("cpu",)
    tensors = (x for x in given if isinstance(x, Tensor))  # on a GPU the first one is enough
    return all(type(x) in _PLAIN and x.device.type in devices for x in tensors)


def values(operands: Operands, options: Options) -> None:
    """Check that lengths, rows and pages stay inside their tensors, and that scales are valid; see
    `checking_values`.
    """
    limits = (
        ("q", operands.cu_seqlens_q, operands.seqused_q, operands.q, options.max_seqlen_q),
        ("k", operands.cu_seqlens_k, operands.seqused_k, operands.k, options.max_seqlen_k),
    )
    for side, cu_seqlens, used, x, longest in limits:
        if cu_seqlens is not None:
            packed_lengths(side, cu_seqlens, used, x.shape[0], longest)
        elif used is not None:
            used_lengths(f"seqused_{side}", used, [longest] * used.shape[0])
    for name in ("q_descale", "k_descale", "v_descale"):
        x = getattr(operands, name)
        if x is not None and not bool(((x > 0) & x.isfinite()).all()):
            raise ValueError(
                f"{name}: got scales from {float(x.min())} to {float(x.max())}, want finite scales "
                "above zero"
            )
    if operands.cache_batch_idx is not None:
        within("cache_batch_idx", operands.cache_batch_idx, operands.k.shape[0])
    if operands.leftpad_k is not None:
        _left_pads(operands.leftpad_k, operands)
    if operands.page_table is not None:
        _page_values(operands)


def within(name: str, x: Tensor, size: int) -> None:
    """Check that indices of rows or pages are from 0 to `size` - 1."""
    if x.numel() and (int(x.min()) < 0 or int(x.max()) >= size):
        raise ValueError(
            f"{name}: got values from {int(x.min())} to {int(x.max())}, want 0 to {size - 1}"
        )


def page_lengths(layout: Packed, k: Tensor, used: Tensor | None) -> None:
    """Check that the pages have room for the keys of each sequence."""
    assert layout.page_table is not None
    counts = packed_lengths("k", layout.cu_seqlens_k, used, None, layout.max_seqlen_k)
    name = "cu_seqlens_k" if used is None else "seqused_k"
    lengths_in_pages(name, counts, layout.page_table, k.shape[1])


def _left_pads(leftpad: Tensor, operands: Operands) -> None:
    used = operands.seqused_k
    if used is None:
        assert operands.cu_seqlens_k is not None
        used = operands.cu_seqlens_k.diff()
    pads, lengths = leftpad.tolist(), used.tolist()
    if any(not 0 <= pad <= n for pad, n in zip(pads, lengths, strict=True)):
        raise ValueError(
            f"cache_leftpad (leftpad_k): got {pads}, want between 0 and the lengths {lengths}"
        )


def _page_values(operands: Operands) -> None:
    table, k = operands.page_table, operands.k
    assert table is not None and operands.seqused_k is not None
    pages_used = (operands.seqused_k + k.shape[1] - 1) // k.shape[1]
    slots = torch.arange(table.shape[1], device=table.device)
    within("page_table (block_table)", table[slots < pages_used[:, None]], k.shape[0])


def lengths_in_pages(name: str, lengths: list[int], page_table: Tensor, page_size: int) -> None:
    """Check that each row of the page table has room for the length of its sequence."""
    capacity = page_table.shape[1] * page_size
    if max(lengths, default=0) > capacity:
        raise RuntimeError(
            f"page_table (block_table): got lengths {lengths} in {name}, want at most {capacity} "
            f"in {page_table.shape[1]} pages of {page_size}"
        )


def packed_lengths(
    side: str, cu_seqlens: Tensor, used: Tensor | None, total: int | None, longest: int
) -> list[int]:
    """Check and return the lengths of all sequences, or the `used` lengths if given.

    Args:
        side: "q" for queries or "k" for keys.
        total: number of tokens in the packed tensor; None for pages.
        longest: `max_seqlen` of the side, which no length may exceed.
    """
    name = f"cu_seqlens_{side}"
    lengths = cumulative_values(name, cu_seqlens, total, side)
    if used is not None:
        name = f"seqused_{side}"
        lengths = used_lengths(name, used, lengths)
    if max(lengths, default=0) > longest:
        raise ValueError(
            f"max_seqlen_{side}: got {longest}, want at least {max(lengths)}, the longest sequence "
            f"of {name}"
        )
    return lengths


def used_lengths(name: str, used: Tensor, bounds: list[int]) -> list[int]:
    """The used lengths, after a check that each is between 0 and its bound."""
    lengths: list[int] = used.tolist()
    if any(not 0 <= n <= most for n, most in zip(lengths, bounds, strict=True)):
        raise ValueError(f"{name}: got {lengths}, want between 0 and the lengths {bounds}")
    return lengths


def cumulative_values(name: str, cu_seqlens: Tensor, total: int | None, side: str) -> list[int]:
    """The lengths, after a check that `cu_seqlens` starts with 0, never decreases, and ends inside
    the tensor.
    """
    starts = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(starts)]
    if starts[0] != 0 or min(lengths, default=0) < 0:
        raise ValueError(
            f"{name}: got {starts}, want cumulative lengths that start with 0 and never decrease"
        )
    if total is not None and starts[-1] > total:
        raise ValueError(
            f"{name}: got {starts[-1]} at the end, want at most {total}, the tokens of {side}"
        )
    return lengths
