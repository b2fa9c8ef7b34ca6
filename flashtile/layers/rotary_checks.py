"""Checks of the arguments of rotary embedding. They run before anything is written."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import checks

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def check_layout(name: str, x: Tensor, layout: str) -> None:
    checks.tensor(name, x)
    sizes = layout.split(", ")
    fixed = [(i, int(size)) for i, size in enumerate(sizes) if size.isdigit()]
    if x.dim() != len(sizes) or any(x.shape[i] != size for i, size in fixed):
        raise ValueError(f"{name}: expected shape ({layout}), got {tuple(x.shape)}")
    _check_kind(name, x, _FLOATS, x.device)


def check_tables(x: Tensor, cos: Tensor, sin: Tensor, suffix: str) -> None:
    for name, table in ((f"cos{suffix}", cos), (f"sin{suffix}", sin)):
        checks.tensor(name, table)
        if table.dim() != 2 or table.shape != cos.shape:
            wanted = "(table_len, rotary_dim / 2), the same for cos and sin"
            raise ValueError(f"{name}: expected shape {wanted}, got {tuple(table.shape)}")
        _check_kind(name, table, _FLOATS, x.device)
    check_rotary_dim(f"cos{suffix}", cos, x.shape[-1])


def check_rotary_dim(name: str, table: Tensor, head_dim: int) -> None:
    if 2 * table.shape[-1] > head_dim:
        raise ValueError(
            f"{name}: got {table.shape[-1]} columns, which rotate {2 * table.shape[-1]} features "
            f"of a head, but head_dim is {head_dim}; want at most {head_dim // 2} columns"
        )


def check_positions(
    x: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> int:
    """Check the positions and return the length of the longest sequence."""
    batch, seqlen = x.shape[:2]
    if cu_seqlens is not None:
        if max_seqlen is None:
            raise ValueError("max_seqlen: needed with cu_seqlens, got None")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(f"cu_seqlens: expected (batch + 1,), got {tuple(cu_seqlens.shape)}")
        _check_kind("cu_seqlens", cu_seqlens, _INTEGERS, x.device)
        batch, seqlen = cu_seqlens.shape[0] - 1, max_seqlen
    if isinstance(seqlen_offsets, Tensor):
        if seqlen_offsets.shape != (batch,):
            got = tuple(seqlen_offsets.shape)
            raise ValueError(f"seqlen_offsets: expected an int or shape ({batch},), got {got}")
        _check_kind("seqlen_offsets", seqlen_offsets, _INTEGERS, x.device)
    elif not isinstance(seqlen_offsets, (int, torch.SymInt)):
        raise TypeError(f"seqlen_offsets: expected an int or a tensor, got {seqlen_offsets!r}")
    elif seqlen_offsets < 0:
        raise ValueError(f"seqlen_offsets: must not be negative, got {seqlen_offsets}")
    return seqlen


def check_position_values(
    x: Tensor,
    rows: int,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    suffix: str,
) -> None:
    """Check that the tables of `rows` positions reach the tokens of every sequence."""
    if not checks.checking_values((x, seqlen_offsets, cu_seqlens)):
        return
    if cu_seqlens is None:
        lengths = [x.shape[1]] * x.shape[0]
    else:
        lengths = checks.cumulative_values("cu_seqlens", cu_seqlens, x.shape[0], "x")
        if max(lengths, default=0) > (max_seqlen or 0):
            raise ValueError(
                f"max_seqlen: got {max_seqlen}, want at least {max(lengths)}, the longest sequence "
                "of cu_seqlens"
            )
    if not isinstance(seqlen_offsets, Tensor):
        return
    firsts = seqlen_offsets.tolist()
    used = [(first, n) for first, n in zip(firsts, lengths, strict=True) if n > 0]
    if any(first < 0 or first + n > rows for first, n in used):
        raise ValueError(
            f"seqlen_offsets: got {firsts} for sequences of {lengths} tokens, want positions from "
            f"0 to {rows - 1}, the rows of cos{suffix}"
        )


def _check_kind(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected a dtype among {dtypes}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: is on {tensor.device}, but the input is on {device}")
