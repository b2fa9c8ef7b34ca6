"""Checks that read the values of tensors, for which the host waits for the device."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ..problem import Operands, Options


def checking_values() -> bool:
    """Whether to make the checks that read tensor values and so wait for the device."""
    if torch.compiler.is_compiling():
        return False
    return os.environ.get("FLASHTILE_CHECK", "0") not in ("", "0")


def values(operands: Operands, options: Options) -> None:
    """Checks that read tensor values; only with ``FLASHTILE_CHECK=1`` in the environment."""
    if not checking_values():
        return
    limits = (
        ("q", operands.cu_seqlens_q, operands.seqused_q, operands.q, options.max_seqlen_q),
        ("k", operands.cu_seqlens_k, operands.seqused_k, operands.k, options.max_seqlen_k),
    )
    for side, cu_seqlens, used, x, longest in limits:
        if cu_seqlens is not None:
            cumulative_values(f"cu_seqlens_{side}", cu_seqlens, x.shape[0], longest, side)
        if used is not None:
            bounds = cu_seqlens.diff() if cu_seqlens is not None else torch.full_like(used, longest)
            if bool((used < 0).any()) or bool((used > bounds).any()):
                raise ValueError(
                    f"seqused_{side}: got {used.tolist()}, want between 0 and the lengths "
                    f"{bounds.tolist()}"
                )
    for name in ("q_descale", "k_descale", "v_descale"):
        x = getattr(operands, name)
        if x is not None and not bool(((x > 0) & x.isfinite()).all()):
            raise ValueError(
                f"{name}: got factors from {float(x.min())} to {float(x.max())}, want finite ones "
                "above zero"
            )
    if operands.leftpad_k is not None:
        _within("cache_leftpad", operands.leftpad_k, options.max_seqlen_k + 1)
    if operands.cache_batch_idx is not None:
        _within("cache_batch_idx", operands.cache_batch_idx, operands.k.shape[0])
    if operands.page_table is not None:
        _page_values(operands)


def _within(name: str, x: Tensor, size: int) -> None:
    if x.numel() and (int(x.min()) < 0 or int(x.max()) >= size):
        raise ValueError(
            f"{name}: got values from {int(x.min())} to {int(x.max())}, want 0 to {size - 1}"
        )


def _page_values(operands: Operands) -> None:
    table, k = operands.page_table, operands.k
    assert table is not None and operands.seqused_k is not None
    pages_used = (operands.seqused_k + k.shape[1] - 1) // k.shape[1]
    slots = torch.arange(table.shape[1], device=table.device)
    _within("page_table", table[slots < pages_used[:, None]], k.shape[0])


def cumulative_values(name: str, cu_seqlens: Tensor, total: int, longest: int, side: str) -> None:
    """The values of cumulative lengths: 0 first, no decrease, inside the tensor, none too long."""
    lengths = cu_seqlens.diff()
    if int(cu_seqlens[0]) != 0 or bool((lengths < 0).any()):
        raise ValueError(f"{name}: got {cu_seqlens.tolist()}, want 0 first and no decrease")
    if int(cu_seqlens[-1]) > total:
        raise ValueError(f"{name}: ends at {int(cu_seqlens[-1])}, but {side} has {total} tokens")
    if lengths.numel() and int(lengths.max()) > longest:
        raise ValueError(
            f"max_seqlen_{side}: got {longest}, but {name} has a sequence of {int(lengths.max())} "
            "tokens"
        )
