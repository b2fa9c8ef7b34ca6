"""Rotary embedding without gradients, as in ``flash_attn.ops.triton.rotary``."""

from __future__ import annotations

import torch
from torch import Tensor

from .rotary import apply_rotary_emb


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """`apply_rotary_emb` without recording gradients. `conjugate` rotates by the opposite angles,
    as the backward does.
    """
    sin = -sin if conjugate else sin
    positions = (seqlen_offsets, cu_seqlens, max_seqlen)
    with torch.no_grad():
        return apply_rotary_emb(x, cos, sin, interleaved, inplace, *positions)
