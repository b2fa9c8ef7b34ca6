"""Checks of performance hints, which change no result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .tensors import same_device, tensor


def hints(pack_gqa: Any, sm_margin: Any, scheduler_metadata: Any, q: Tensor) -> None:
    """Check the hints of FlashAttention-3 and -4 except `num_splits`, which `scalars` checks."""
    if pack_gqa is not None and not isinstance(pack_gqa, bool):
        raise TypeError(f"pack_gqa: got {type(pack_gqa).__name__}, want True, False or None")
    if isinstance(sm_margin, bool) or not isinstance(sm_margin, (int, torch.SymInt)):
        raise TypeError(f"sm_margin: got {type(sm_margin).__name__}, want an int")
    if sm_margin < 0:
        raise ValueError(f"sm_margin: got {sm_margin}, want at least 0 multiprocessors")
    if scheduler_metadata is not None:
        tensor("scheduler_metadata", scheduler_metadata)
        if scheduler_metadata.dtype != torch.int32:
            got = scheduler_metadata.dtype
            raise TypeError(f"scheduler_metadata: got dtype {got}, want torch.int32")
        same_device("scheduler_metadata", scheduler_metadata, q)
