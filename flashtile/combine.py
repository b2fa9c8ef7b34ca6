"""`flash_attn_combine`: merge partial results of attention."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from .call import checks
from .ops.merge import merge_parts


@overload
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: Literal[True] = True,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]: ...
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Combine the partial results of attention that was split over the keys.

    Args:
        out_partial: (splits, batch, seq, heads, head_dim) or (splits, total, heads, head_dim),
            floating.
        lse_partial: (splits, batch, seq, heads) or (splits, total, heads), float32 or float64,
            natural log.
        out: tensor of the result's shape to write the result to; its dtype overrides `out_dtype`.
        out_dtype: dtype of the result; `out_partial`'s by default.
        cu_seqlens: (batch + 1,) int32, where each sequence starts among the packed tokens.
        seqused: (batch,) int32, number of tokens of each sequence to combine, counted from its
            start.
        virtual_batch_idx: (batch,) int32, the order in which FlashAttention-4 processes the batch.
            Accepted and ignored: it changes no result.
        return_lse: False returns None in place of the log-sum-exp.

    Returns:
        out (batch, seq, heads, head_dim) or (total, heads, head_dim), and lse (batch, seq, heads)
        or (total, heads). A row has out 0 and lse -inf if no split saw a key for it, or if
        `cu_seqlens` and `seqused` leave it out.

    Raises:
        ValueError: the shapes do not fit together, or on a CPU lengths do not fit out_partial.
        TypeError: a dtype is not floating, or lengths are not integers.

    Source: FlashAttention-2 (Dao 2023), section 3.1; the signature is FlashAttention-4's.
    """
    _check_parts(out_partial, lse_partial, out, out_dtype)
    _check_lengths(out_partial, cu_seqlens, seqused, virtual_batch_idx)
    if cu_seqlens is not None or seqused is not None:
        used = _used_rows(out_partial, cu_seqlens, seqused)
        lse_partial = lse_partial.masked_fill(~used[..., None], -torch.inf)
    dtype = out.dtype if out is not None else (out_dtype or out_partial.dtype)
    combined, lse = merge_parts(out_partial, lse_partial, dtype)
    if out is not None:
        combined = out.copy_(combined)
    return combined, lse if return_lse else None


def _check_parts(out_partial: Any, lse_partial: Any, out: Any, out_dtype: Any) -> None:
    checks.tensor("out_partial", out_partial)
    checks.tensor("lse_partial", lse_partial)
    if out_partial.dim() not in (4, 5):
        raise ValueError(
            f"out_partial: got shape {checks.shape_of(out_partial)}, want (splits, batch, seq, "
            "heads, head_dim) or (splits, total, heads, head_dim)"
        )
    without_head_dim = "out_partial without its last dimension"
    checks.tensor(
        "lse_partial", lse_partial, shape=tuple(out_partial.shape[:-1]), meaning=without_head_dim
    )
    checks.tensor("lse_partial", lse_partial, like=out_partial)
    if not out_partial.is_floating_point():
        raise TypeError(f"out_partial: got dtype {out_partial.dtype}, want a floating dtype")
    if lse_partial.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"lse_partial: got dtype {lse_partial.dtype}, want float32 or float64")
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise TypeError(f"out_dtype: got {out_dtype}, want a floating dtype")
    if out is not None:
        checks.tensor("out", out)
        checks.tensor(
            "out", out, shape=tuple(out_partial.shape[1:]), meaning="out_partial without its splits"
        )
        checks.tensor("out", out, like=out_partial)
        if not out.is_floating_point():
            raise TypeError(f"out: got dtype {out.dtype}, want a floating dtype")


def _check_lengths(
    out_partial: Tensor, cu_seqlens: Any, seqused: Any, virtual_batch_idx: Any
) -> None:
    is_packed = out_partial.dim() == 4
    batch = None if is_packed else out_partial.shape[1]
    if cu_seqlens is not None:
        checks.cumulative("cu_seqlens", cu_seqlens, out_partial)
        if not is_packed:
            raise ValueError(
                f"cu_seqlens: is for packed tokens, but out_partial is a padded batch of shape "
                f"{checks.shape_of(out_partial)}"
            )
        batch = cu_seqlens.shape[0] - 1
    for name, x in (("seqused", seqused), ("virtual_batch_idx", virtual_batch_idx)):
        if x is not None and batch is None:
            raise ValueError(f"{name}: needs cu_seqlens when out_partial is packed")
        checks.per_sequence(name, x, out_partial, batch or 0)
    if batch is None or not checks.checking_values((out_partial, cu_seqlens, seqused)):
        return
    tokens = out_partial.shape[-3]
    lengths = [tokens] * batch
    if cu_seqlens is not None:
        lengths = checks.cumulative_values("cu_seqlens", cu_seqlens, tokens, "out_partial")
    if seqused is not None:
        checks.used_lengths("seqused", seqused, lengths)


def _used_rows(out_partial: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None) -> Tensor:
    """Which tokens are used: bool (batch, seq) or (total,)."""
    token = torch.arange(out_partial.shape[-3], device=out_partial.device)
    if cu_seqlens is None:
        assert seqused is not None
        return token < seqused[:, None]
    starts, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    if seqused is not None:
        ends = torch.minimum(ends, starts + seqused[:, None])
    return ((starts <= token) & (token < ends)).any(0)
