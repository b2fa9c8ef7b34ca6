"""Limits of split-KV partial results, which a caller's workspace must hold.

They depend on sizes only: lengths on the GPU are not read, so one workspace serves a captured graph
whose caches grow.
"""

from __future__ import annotations

import torch

from .hardware import multiprocessors

MAX_SPLITS = 256
# Rows of partial results to a multiprocessor, one for each query, head and part: more would take
# much memory for little time.
MOST_PART_ROWS = 512


def workspace_size(
    tokens: int, heads: int, value_head_dim: int, num_splits: int, device: torch.device
) -> int:
    """Bytes that partial results take at most, in calls of up to `tokens` query tokens."""
    rows = tokens * heads
    if device.type == "cpu" or num_splits == 1:
        return 0
    parts = num_splits * rows
    if num_splits == 0:
        parts = min(MAX_SPLITS * rows, MOST_PART_ROWS * multiprocessors(device))
    return parts * (value_head_dim + 1) * torch.float32.itemsize
